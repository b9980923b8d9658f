// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::Range;
use proptest::prelude::*;

fn r(start: u64, length: u64) -> Range {
    Range::new(start, length).unwrap()
}

#[test]
fn nothing_empty_and_nothing_past_the_end() {
    assert_eq!(Range::new(5, 0), None);
    assert_eq!(Range::new(u64::MAX, 1), None);
    assert_eq!(Range::new(u64::MAX - 1, 1).map(Range::end), Some(u64::MAX));
}

#[test]
fn what_is_in_both() {
    let range = r(5, 7);
    assert_eq!((range.start(), range.length(), range.end()), (5, 7, 12));
    assert_eq!(range.intersection(r(8, 100)), Some(r(8, 4)));
    assert!(range.overlaps(r(11, 1)) && !range.overlaps(r(12, 1)));
}

#[test]
fn blocks() {
    assert_eq!(r(1, 8190).whole_blocks(4096), None);
    assert_eq!(r(1, 12287).whole_blocks(4096), Some(r(4096, 8192)));
    assert_eq!(r(u64::MAX - 10, 5).whole_blocks(4096), None);
    assert!(r(4096, 8192).is_aligned(4096));
    assert!(!r(4097, 8192).is_aligned(4096));
    assert!(!r(4096, 8191).is_aligned(4096));
    assert!(!r(4097, 4097).is_aligned(4096));
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn an_intersection_is_in_both(a: (u64, u64), b: (u64, u64), at: u64) {
        if let (Some(a), Some(b)) = (Range::new(a.0, a.1), Range::new(b.0, b.1)) {
            let holds = |range: Range, at: u64| range.start() <= at && at < range.end();
            let both = a.intersection(b);
            for at in [at, a.start(), b.start(), a.end() - 1, b.end() - 1] {
                prop_assert_eq!(both.is_some_and(|both| holds(both, at)), holds(a, at) && holds(b, at));
            }
            prop_assert_eq!(a.overlaps(b), both.is_some());
        }
    }

    #[test]
    fn whole_blocks_are_whole(start: u64, length in 1_u64..1 << 30, shift in 0_u32..31) {
        let size = 1_u64 << shift;
        if let Some(range) = Range::new(start, length) {
            match range.whole_blocks(size) {
                Some(blocks) => {
                    prop_assert!(blocks.is_aligned(size));
                    prop_assert!(blocks.start() >= range.start() && blocks.end() <= range.end());
                    prop_assert!(blocks.start() - range.start() < size && range.end() - blocks.end() < size);
                }
                None => prop_assert!(range.length() < 2 * size),
            }
        }
    }
}
