// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Lists of page frame numbers, and the runs they are made of.

use alloc::vec::Vec;
use core::fmt;

/// How many page frames one request of the device's bit 7 may have; Linux sends no more either.
pub const MAX_PFNS: usize = 256;

/// A list of page frames of this length, which is no multiple of four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PfnError(pub usize);

impl fmt::Display for PfnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of page frames of {} bytes, which is no multiple of 4", self.0)
    }
}

impl core::error::Error for PfnError {}

/// The page frames in a request: 32 bits each, little-endian.
///
/// # Errors
///
/// The length is no multiple of four.
pub fn parse_pfns(bytes: &[u8]) -> Result<impl Iterator<Item = u32> + '_, PfnError> {
    if !bytes.len().is_multiple_of(4) {
        return Err(PfnError(bytes.len()));
    }
    Ok(bytes.chunks_exact(4).map(|four| four.try_into().map(u32::from_le_bytes).unwrap_or_default()))
}

/// Pages that follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first page frame.
    pub first: u32,
    /// How many there are.
    pub pages: u32,
}

impl Run {
    /// Whether `pfn` is one of them.
    pub const fn contains(self, pfn: u32) -> bool {
        // Relative, since the run can end at the very last page frame.
        pfn.wrapping_sub(self.first) < self.pages
    }
}

/// The runs that a list is made of: sorted, each page once, no two that touch each other.
///
/// The list may be in any order and name a page more than once. Costs memory in proportion to the
/// list, so bound that first.
pub fn runs(pfns: &[u32]) -> Vec<Run> {
    let mut sorted = pfns.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut found: Vec<Run> = Vec::new();
    for pfn in sorted {
        match found.last_mut() {
            // No overflow: 2^32 different page frames would be a list of 16 GiB.
            Some(run) if run.first.checked_add(run.pages) == Some(pfn) => {
                run.pages = run.pages.saturating_add(1)
            }
            _ => found.push(Run { first: pfn, pages: 1 }),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec;

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

    fn close() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(prop_oneof![0_u32..64, (u32::MAX - 40)..=u32::MAX, any::<u32>()], 0..300)
    }

    proptest! {
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
}
