// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::{MAX_STATS_BYTES, Statistics};
use proptest::prelude::*;

fn entry(tag: u16, value: u64) -> Vec<u8> {
    tag.to_le_bytes().into_iter().chain(value.to_le_bytes()).collect()
}

#[test]
fn known_and_unknown_tags() {
    let mut bytes = entry(4, 1 << 40);
    bytes.extend(entry(999, 5));
    bytes.extend(entry(5, 7));
    bytes.extend(entry(5, 8));
    bytes.extend([1, 2, 3]);
    let found = Statistics::parse(&bytes);
    assert_eq!(found.free_memory, Some(1 << 40));
    assert_eq!(found.total_memory, Some(8));
    assert_eq!(found.entries().count(), 2);
    assert_eq!(MAX_STATS_BYTES, 64 * entry(0, 0).len());
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn anything_can_be_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..700)) {
        prop_assert!(Statistics::parse(&bytes).entries().count() <= bytes.len() / 10);
    }

    #[test]
    fn every_tag_comes_back(values: [u64; 16]) {
        let bytes: Vec<u8> = (0_u16..).zip(values).flat_map(|(tag, value)| entry(tag, value)).collect();
        let found: Vec<u64> = Statistics::parse(&bytes).entries().map(|(_, value)| value).collect();
        prop_assert_eq!(found, values);
    }
}
