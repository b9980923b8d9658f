// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pages in the balloon: a host page larger than 4 KiB goes when the balloon holds all of it.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::Run;

const WORDS: usize = 64;
/// How many pages a chunk covers: 16 MiB of guest memory.
const CHUNK: u32 = 64 * 64;

/// How many chunks a set has at most: those of 1 TiB of guest memory.
const MAX_CHUNKS: usize = 1 << 16;

/// A set of page frames.
///
/// It costs at most 640 bytes for each 16 MiB of guest memory that has a page in the set: 640 KiB for 16 GiB. A front end can
/// name more memory than there is, so it ends at 40 MiB: pages are not added that would need more. A device takes them for
/// pages that are not in the balloon.
///
/// A device can rely on it over requests only if the driver has to deflate a page before it uses it again
/// (`MUST_TELL_HOST`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSet {
    chunks: BTreeMap<u32, Box<[u64; WORDS]>>,
}

/// The parts of a run by chunk and word: chunk, number of the word, bits.
fn words(run: Run) -> impl Iterator<Item = (u32, usize, u64)> {
    let end = u64::from(run.first).saturating_add(u64::from(run.pages)).min(1 << 32);
    let mut at = u64::from(run.first);
    core::iter::from_fn(move || {
        let page = u32::try_from(at).ok().filter(|_| at < end)?;
        let bit = page % 64;
        let count = end.saturating_sub(at).min(u64::from(64_u32.saturating_sub(bit)));
        at = at.saturating_add(count);
        let ones = if count == 64 { u64::MAX } else { (1_u64 << count).wrapping_sub(1) };
        let word = usize::try_from(page % CHUNK / 64).unwrap_or(usize::MAX);
        Some((page / CHUNK, word, ones << bit))
    })
}

impl PageSet {
    /// An empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self { chunks: BTreeMap::new() }
    }

    /// Add the pages of a run.
    pub fn insert(&mut self, run: Run) {
        for (chunk, word, bits) in words(run) {
            if self.chunks.len() >= MAX_CHUNKS && !self.chunks.contains_key(&chunk) {
                continue;
            }
            let words = self.chunks.entry(chunk).or_insert_with(|| Box::new([0; WORDS]));
            if let Some(word) = words.get_mut(word) {
                *word |= bits;
            }
        }
    }

    /// Remove the pages of a run.
    pub fn remove(&mut self, run: Run) {
        for (chunk, word, bits) in words(run) {
            let Some(words) = self.chunks.get_mut(&chunk) else { continue };
            if let Some(word) = words.get_mut(word) {
                *word &= !bits;
            }
            if words.iter().all(|word| *word == 0) {
                self.chunks.remove(&chunk);
            }
        }
    }

    /// Whether all pages of a run are in the set.
    #[must_use]
    pub fn contains(&self, run: Run) -> bool {
        words(run).all(|(chunk, word, bits)| {
            let found = self.chunks.get(&chunk).and_then(|words| words.get(word));
            found.is_some_and(|found| found & bits == bits)
        })
    }

    /// The first run of pages from `page` on; it ends at a border of 16 MiB at the latest.
    #[must_use]
    pub fn next_run(&self, page: u32) -> Option<Run> {
        self.chunks.range(page / CHUNK..).find_map(|(chunk, words)| {
            let base = chunk.saturating_mul(CHUNK);
            let skip = page.saturating_sub(base);
            let has = |bit: u32| {
                let word = usize::try_from(bit / 64).ok().and_then(|word| words.get(word));
                word.is_some_and(|word| word & (1 << (bit % 64)) != 0)
            };
            let first = (skip..CHUNK).find(|bit| has(*bit))?;
            let end = (first..CHUNK).find(|bit| !has(*bit)).unwrap_or(CHUNK);
            Some(Run { first: base.saturating_add(first), pages: end.saturating_sub(first) })
        })
    }

    /// Remove all pages.
    pub fn clear(&mut self) {
        self.chunks.clear();
    }
}
