// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::Bitmap;
use proptest::prelude::*;
use std::collections::BTreeSet;

#[test]
fn least_significant_first() {
    let mut bitmap = Bitmap::new(10);
    bitmap.set(0);
    bitmap.set(9);
    assert_eq!(bitmap.as_bytes(), [0b0000_0001, 0b0000_0010]);
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn only_what_was_set(pages in 0_usize..300, wanted in proptest::collection::btree_set(0_usize..400, 0..50)) {
        let mut bitmap = Bitmap::new(pages);
        for n in &wanted {
            bitmap.set(*n);
        }
        prop_assert_eq!(bitmap.as_bytes().len(), pages.div_ceil(8));
        let found: BTreeSet<usize> = (0..500).filter(|n| bitmap.get(*n)).collect();
        let inside: BTreeSet<usize> = wanted.into_iter().filter(|n| *n < pages).collect();
        prop_assert_eq!(found, inside);
    }
}
