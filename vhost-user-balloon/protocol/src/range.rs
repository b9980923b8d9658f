// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ranges of guest memory.

/// A range of addresses that does not pass the end of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    start: u64,
    length: u64,
}

impl Range {
    /// `length` bytes from `start`; `None` if that is empty or passes the end of the address space.
    #[must_use]
    pub const fn new(start: u64, length: u64) -> Option<Self> {
        if length == 0 || start.checked_add(length).is_none() {
            return None;
        }
        Some(Self { start, length })
    }

    /// The first address.
    #[must_use]
    pub const fn start(self) -> u64 {
        self.start
    }

    /// How many bytes there are; never zero.
    #[must_use]
    pub const fn length(self) -> u64 {
        self.length
    }

    /// The address behind the last one.
    #[must_use]
    pub const fn end(self) -> u64 {
        // `new` has seen to it that this does not overflow.
        self.start.wrapping_add(self.length)
    }

    /// What is in both.
    #[must_use]
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        Self::new(start, end.checked_sub(start)?)
    }

    /// Whether they have an address in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.intersection(other).is_some()
    }

    /// The whole blocks of `size` bytes in it; `size` is a power of two.
    #[must_use]
    pub fn whole_blocks(self, size: u64) -> Option<Self> {
        let mask = size.checked_sub(1)?;
        let start = self.start.checked_add(mask)? & !mask;
        let end = self.end() & !mask;
        Self::new(start, end.checked_sub(start)?)
    }

    /// Whether it begins and ends at multiples of `size`, a power of two.
    #[must_use]
    pub const fn is_aligned(self, size: u64) -> bool {
        (self.start | self.length) & size.wrapping_sub(1) == 0
    }
}
