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
    #[must_use]
    pub const fn contains(self, pfn: u32) -> bool {
        // Relative, since the run can end at the very last page frame.
        pfn.wrapping_sub(self.first) < self.pages
    }
}

/// The runs that a list is made of: sorted, each page once, no two that touch each other.
///
/// The list may be in any order and name a page more than once. Costs memory in proportion to the
/// list, so bound that first.
#[must_use]
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
