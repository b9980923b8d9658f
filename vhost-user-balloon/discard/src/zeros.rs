// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A set of addresses.

use std::collections::BTreeMap;

use balloon_protocol::Range;

/// Ranges that do not touch each other: start and end.
#[derive(Debug, Default)]
pub struct Zeros(BTreeMap<u64, u64>);

impl Zeros {
    /// Add a range.
    pub fn insert(&mut self, range: Range) {
        let (mut start, mut end) = (range.start(), range.end());
        // Those that overlap it or touch it become a part of it.
        while let Some((first, last)) = self.0.range(..=end).next_back().filter(|(_, last)| **last >= start) {
            (start, end) = (start.min(*first), end.max(*last));
            let first = *first;
            self.0.remove(&first);
        }
        self.0.insert(start, end);
    }

    /// Remove the pages of 4 KiB that a range touches. Whether there were any.
    pub fn remove(&mut self, range: Range) -> bool {
        let mut found = false;
        let mask = balloon_protocol::PAGE_SIZE.wrapping_sub(1);
        let (start, end) = (range.start() & !mask, range.end().saturating_add(mask) & !mask);
        while let Some((first, last)) = self.0.range(..end).next_back().filter(|(_, last)| **last > start) {
            let (first, last) = (*first, *last);
            found = true;
            self.0.remove(&first);
            if last > end {
                self.0.insert(end, last);
            }
            if first < start {
                self.0.insert(first, start);
            }
        }
        found
    }

    /// Whether all of a range is in there.
    pub fn has(&self, range: Range) -> bool {
        let before = self.0.range(..=range.start()).next_back();
        before.is_some_and(|(_, end)| *end >= range.end())
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 0x1000;

    fn r(first: u64, pages: u64) -> Range {
        Range::new(first * PAGE, pages * PAGE).unwrap()
    }

    /// Against a list of pages.
    #[test]
    #[allow(clippy::cast_possible_truncation)]
    fn as_a_list_of_pages() {
        let mut seed = 7_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut zeros = Zeros::default();
        let mut pages = [false; 40];
        // Miri is a thousand times slower.
        for _ in 0..if cfg!(miri) { 30 } else { 20_000 } {
            let (first, count, add) = (random(32), random(7) + 1, random(2) == 0);
            let range = r(first, count);
            let had = pages[first as usize..(first + count) as usize].iter().any(|there| *there);
            if add {
                zeros.insert(range)
            } else {
                assert_eq!(zeros.remove(range), had)
            }
            for page in &mut pages[first as usize..(first + count) as usize] {
                *page = add;
            }
            for (page, there) in pages.iter().enumerate() {
                assert_eq!(zeros.has(r(page as u64, 1)), *there, "page {page}");
            }
            let (first, count) = (random(32), random(7) + 1);
            let all = pages[first as usize..(first + count) as usize].iter().all(|there| *there);
            assert_eq!(zeros.has(r(first, count)), all);
        }
    }

    #[test]
    fn a_byte_is_its_page() {
        let mut zeros = Zeros::default();
        zeros.insert(r(0, 4));
        assert!(zeros.remove(Range::new(PAGE + 0xfff, 2).unwrap()));
        assert!(zeros.has(r(0, 1)) && !zeros.has(r(1, 1)) && !zeros.has(r(2, 1)) && zeros.has(r(3, 1)));
        assert!(!zeros.remove(Range::new(u64::MAX - 1, 1).unwrap()));
        zeros.clear();
        assert!(!zeros.has(r(0, 1)));
    }
}
