// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::{PageSet, Run};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::ops::Range;

/// Where runs begin, their length and their number: over several chunks of 4096 pages, under Miri
/// over the end of one.
const FIRST: Range<u32> = if cfg!(miri) { 4000..4100 } else { 0..9000 };
const PAGES: Range<u32> = if cfg!(miri) { 1..200 } else { 1..5000 };
const STEPS: Range<usize> = if cfg!(miri) { 0..4 } else { 0..20 };

#[test]
fn the_very_last_page() {
    let mut set = PageSet::new();
    set.insert(Run { first: u32::MAX, pages: 9 });
    assert_eq!(set.next_run(0), Some(Run { first: u32::MAX, pages: 1 }));
    set.remove(Run { first: u32::MAX - 100, pages: 101 });
    assert_eq!(set, PageSet::new(), "an empty chunk is freed");
    set.insert(Run { first: 5, pages: 1 });
    set.clear();
    assert_eq!(set, PageSet::new());
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn like_a_set(
        steps in proptest::collection::vec((any::<bool>(), FIRST, PAGES), STEPS),
        at in FIRST,
        length in 1_u32..200,
    ) {
        let mut set = PageSet::new();
        let mut model = BTreeSet::new();
        for (insert, first, pages) in steps {
            let run = Run { first, pages };
            if insert {
                set.insert(run);
                model.extend(first..first + pages);
            } else {
                set.remove(run);
                model.retain(|page| !run.contains(*page));
            }
        }
        let wanted = (at..at + length).all(|page| model.contains(&page));
        prop_assert_eq!(set.contains(Run { first: at, pages: length }), wanted);
        let mut found = Vec::new();
        let mut next = 0;
        while let Some(run) = set.next_run(next) {
            found.extend(run.first..run.first + run.pages);
            next = run.first + run.pages;
        }
        prop_assert_eq!(found, model.into_iter().collect::<Vec<_>>());
    }
}

/// A front end names 16 TiB, with a page in each chunk.
#[test]
fn it_has_a_bound() {
    let mut set = PageSet::new();
    let page = |chunk: u32| Run { first: chunk << 12, pages: 1 };
    for chunk in 0..1 << 16 {
        set.insert(page(chunk));
    }
    set.insert(page(1 << 16));
    assert!(set.contains(page(0)) && set.contains(page((1 << 16) - 1)));
    assert!(!set.contains(page(1 << 16)));
    set.remove(page(7));
    set.insert(page(1 << 16));
    assert!(set.contains(page(1 << 16)) && !set.contains(page(7)));
}
