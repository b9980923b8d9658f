// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host pages larger than the balloon's: they go when the balloon holds every part of them.

use alloc::collections::BTreeMap;
use alloc::collections::btree_map::Entry;
use alloc::vec;
use alloc::vec::Vec;

/// A host page: which region it is in, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPage {
    /// The region, as the caller numbers them.
    pub region: usize,
    /// The number of the page in the region's file, counted in pages of the host.
    pub index: u64,
}

/// Which parts of each host page are in the balloon, whatever the order and requests they came in.
///
/// Parts are remembered over requests, so use it that way only if the driver has to tell the device
/// before it uses a page again (`MUST_TELL_HOST`): otherwise a part can be in use when the last other
/// part arrives. Without that, use a fresh one for each request.
///
/// It costs one bit for each page in the balloon and some bytes for each host page that is touched,
/// so the size of guest memory bounds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPages {
    parts: BTreeMap<HostPage, Parts>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Parts {
    bits: Vec<u64>,
    present: u32,
}

impl HostPages {
    /// Nothing is in the balloon.
    pub fn new() -> Self {
        Self::default()
    }

    /// Part `part` of `parts` is in the balloon now. Returns whether all of them are, if it was not.
    pub fn insert(&mut self, page: HostPage, part: u32, parts: u32) -> bool {
        if part >= parts {
            return false;
        }
        let words = usize::try_from(parts.div_ceil(64)).unwrap_or(usize::MAX);
        let entry = self.parts.entry(page).or_insert_with(|| Parts { bits: vec![0; words], present: 0 });
        let Some((word, bit)) = entry.bit(part) else { return false };
        if *word & bit != 0 {
            return false;
        }
        *word |= bit;
        entry.present = entry.present.saturating_add(1);
        entry.present == parts
    }

    /// Part `part` has left the balloon.
    pub fn remove(&mut self, page: HostPage, part: u32) {
        if let Entry::Occupied(mut entry) = self.parts.entry(page) {
            let parts = entry.get_mut();
            let Some((word, bit)) = parts.bit(part) else { return };
            if *word & bit != 0 {
                *word &= !bit;
                parts.present = parts.present.saturating_sub(1);
            }
            if parts.present == 0 {
                entry.remove();
            }
        }
    }

    /// Forget everything: the driver has begun anew, its memory is another one, or nobody knows what it took
    /// out of the balloon.
    pub fn clear(&mut self) {
        self.parts.clear();
    }

    /// How many host pages have a part in the balloon.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether nothing is in the balloon.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

impl Parts {
    fn bit(&mut self, part: u32) -> Option<(&mut u64, u64)> {
        let word = self.bits.get_mut(usize::try_from(part / 64).ok()?)?;
        Some((word, 1 << (part % 64)))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const PAGE: HostPage = HostPage { region: 0, index: 3 };

    #[test]
    fn the_last_part_completes_it() {
        let mut pages = HostPages::new();
        for part in (1..512).rev() {
            assert!(!pages.insert(PAGE, part, 512));
        }
        assert!(!pages.insert(PAGE, 511, 512), "twice the same");
        assert!(pages.insert(PAGE, 0, 512));
        assert!(!pages.insert(PAGE, 0, 512), "complete already");
    }

    #[test]
    fn what_left_has_to_come_back() {
        let mut pages = HostPages::new();
        pages.insert(PAGE, 0, 2);
        pages.remove(PAGE, 0);
        assert!(pages.is_empty());
        assert!(!pages.insert(PAGE, 1, 2));
        assert!(pages.insert(PAGE, 0, 2));
        pages.remove(PAGE, 1);
        assert!(pages.insert(PAGE, 1, 2), "complete for the second time");
    }

    #[test]
    fn nonsense_changes_nothing() {
        let mut pages = HostPages::new();
        assert!(!pages.insert(PAGE, 512, 512));
        assert!(!pages.insert(PAGE, 0, 0));
        pages.remove(PAGE, 0);
        pages.remove(PAGE, u32::MAX);
        assert!(pages.is_empty());
    }

    proptest! {
        #[test]
        fn like_a_set(steps in proptest::collection::vec((any::<bool>(), 0_u64..3, 0_u32..9), 0..400), size in 1_u32..9) {
            let mut pages = HostPages::new();
            let mut model: BTreeSet<(u64, u32)> = BTreeSet::new();
            for (insert, index, part) in steps {
                let page = HostPage { region: 1, index };
                if insert {
                    let new = part < size && model.insert((index, part));
                    let complete = (0..size).all(|p| model.contains(&(index, p)));
                    prop_assert_eq!(pages.insert(page, part, size), new && complete);
                } else {
                    pages.remove(page, part);
                    model.remove(&(index, part));
                }
                let touched: BTreeSet<u64> = model.iter().map(|(i, _)| *i).collect();
                prop_assert_eq!(pages.len(), touched.len());
            }
        }
    }
}
