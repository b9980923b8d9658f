// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Ranges of guest memory, cut at the borders of its regions.

/// A range of addresses that does not pass the end of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Range {
    start: u64,
    length: u64,
}

impl Range {
    /// `length` bytes from `start`; `None` if that is empty or passes the end of the address space.
    pub const fn new(start: u64, length: u64) -> Option<Self> {
        if length == 0 || start.checked_add(length).is_none() {
            return None;
        }
        Some(Self { start, length })
    }

    /// The first address.
    pub const fn start(self) -> u64 {
        self.start
    }

    /// How many bytes there are; never zero.
    pub const fn length(self) -> u64 {
        self.length
    }

    /// The address behind the last one.
    pub const fn end(self) -> u64 {
        // `new` has seen to it that this does not overflow.
        self.start.wrapping_add(self.length)
    }

    /// What is in both.
    pub fn intersection(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        Self::new(start, end.checked_sub(start)?)
    }

    /// Whether they have an address in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.intersection(other).is_some()
    }

    /// The whole blocks of `size` bytes in it; `size` is a power of two.
    pub fn whole_blocks(self, size: u64) -> Option<Self> {
        let mask = size.checked_sub(1)?;
        let start = self.start.checked_add(mask)? & !mask;
        let end = self.end() & !mask;
        Self::new(start, end.checked_sub(start)?)
    }

    /// Whether it begins and ends at multiples of `size`, a power of two.
    pub const fn is_aligned(self, size: u64) -> bool {
        (self.start | self.length) & size.wrapping_sub(1) == 0
    }
}

/// The part of a range that lies in one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which region, counted as they were given.
    pub region: usize,
    /// Guest addresses, inside of the region.
    pub range: Range,
}

/// Cut `range` at the borders of `regions`; what lies in none of them is left out.
///
/// The pieces cover all of the range if and only if their lengths add up to its length, provided that
/// no two regions overlap.
pub fn clip(range: Range, regions: impl IntoIterator<Item = Range>) -> impl Iterator<Item = Piece> {
    regions
        .into_iter()
        .enumerate()
        .filter_map(move |(region, whole)| Some(Piece { region, range: range.intersection(whole)? }))
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

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
    fn blocks() {
        assert_eq!(r(1, 8190).whole_blocks(4096), None);
        assert_eq!(r(1, 12287).whole_blocks(4096), Some(r(4096, 8192)));
        assert_eq!(r(u64::MAX - 10, 5).whole_blocks(4096), None);
        assert!(r(4096, 8192).is_aligned(4096));
        assert!(!r(4097, 8192).is_aligned(4096));
        assert!(!r(4096, 8191).is_aligned(4096));
    }

    #[test]
    fn a_hole_between_regions_is_left_out() {
        let pieces: Vec<Piece> = clip(r(0, 100), [r(0, 10), r(50, 100)]).collect();
        assert_eq!(pieces, [Piece { region: 0, range: r(0, 10) }, Piece { region: 1, range: r(50, 50) }]);
    }

    proptest! {
        #[test]
        fn every_piece_is_in_the_range_and_in_its_region(
            start: u64, length: u64,
            regions in proptest::collection::vec((any::<u64>(), 1_u64..1 << 40), 0..8),
        ) {
            let regions: Vec<Range> = regions.into_iter().filter_map(|(s, l)| Range::new(s, l)).collect();
            if let Some(range) = Range::new(start, length) {
                for piece in clip(range, regions.iter().copied()) {
                    let whole = regions[piece.region];
                    prop_assert!(piece.range.start() >= whole.start() && piece.range.end() <= whole.end());
                    prop_assert!(piece.range.start() >= range.start() && piece.range.end() <= range.end());
                }
            }
        }

        #[test]
        fn adjacent_regions_cover_what_is_in_them(cuts in proptest::collection::btree_set(1_u64..1000, 2..9), a in 0_u64..1000, b in 1_u64..1000) {
            let cuts: Vec<u64> = cuts.into_iter().collect();
            let regions: Vec<Range> = cuts.windows(2).map(|w| r(w[0], w[1] - w[0])).collect();
            let all = r(cuts[0], cuts[cuts.len() - 1] - cuts[0]);
            let covered: u64 = clip(r(a, b), regions).map(|p| p.range.length()).sum();
            prop_assert_eq!(covered, r(a, b).intersection(all).map_or(0, Range::length));
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
}
