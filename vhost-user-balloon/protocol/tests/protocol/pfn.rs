// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::{PfnError, Run, parse_pfns, runs};
use proptest::prelude::*;
use std::collections::BTreeSet;

#[test]
fn examples() {
    assert_eq!(runs(&[]), vec![]);
    assert_eq!(runs(&[3, 1, 2, 2]), vec![Run { first: 1, pages: 3 }]);
    assert_eq!(
        runs(&[u32::MAX, 0, u32::MAX - 1]),
        vec![Run { first: 0, pages: 1 }, Run { first: u32::MAX - 1, pages: 2 }]
    );
    assert!(runs(&[u32::MAX])[0].contains(u32::MAX));
    assert!(!runs(&[u32::MAX])[0].contains(0));
}

#[test]
fn a_ragged_list_is_refused() {
    assert_eq!(parse_pfns(&[0; 7]).err(), Some(PfnError(7)));
    assert_eq!(parse_pfns(&[1, 0, 0, 0, 0, 1, 0, 0]).unwrap().collect::<Vec<_>>(), [1, 256]);
}

/// How many pages a list has at most; Miri is a thousand times slower.
const PAGES: usize = if cfg!(miri) { 16 } else { 300 };

fn close() -> impl Strategy<Value = Vec<u32>> {
    let page = prop_oneof![0_u32..64, (u32::MAX - 40)..=u32::MAX, any::<u32>()];
    proptest::collection::vec(page, 0..PAGES)
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn the_same_pages_in_order_and_maximal(pfns in close()) {
        let found = runs(&pfns);
        let expanded: Vec<u32> = found.iter().flat_map(|r| (0..r.pages).map(|n| r.first + n)).collect();
        let wanted: Vec<u32> = pfns.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        prop_assert_eq!(expanded, wanted);
        for pair in found.windows(2) {
            prop_assert!(u64::from(pair[0].first) + u64::from(pair[0].pages) < u64::from(pair[1].first));
        }
    }

    #[test]
    fn the_order_does_not_matter(mut pfns in close()) {
        let forward = runs(&pfns);
        pfns.reverse();
        prop_assert_eq!(forward, runs(&pfns));
    }

    #[test]
    fn contains_is_membership(pfns in close(), other: u32) {
        let inside = runs(&pfns).iter().any(|r| r.contains(other));
        prop_assert_eq!(inside, pfns.contains(&other));
        for pfn in &pfns {
            prop_assert!(runs(&pfns).iter().any(|r| r.contains(*pfn)));
        }
    }
}
