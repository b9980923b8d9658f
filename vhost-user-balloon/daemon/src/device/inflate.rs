// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Inflate and deflate requests.

use std::time::Instant;

use balloon_discard::Backing;
use balloon_protocol::{Bitmap, Features, MAX_PFNS, PAGE_SHIFT, PAGE_SIZE, QueueKind, Range, Run, runs};
use vm_memory::{Bytes, GuestAddress};

use super::job::{Job, range_of, total, whole_run};
use super::state::Device;
#[cfg(feature = "lying")]
use crate::lying::Lie;
use crate::malformed;
use crate::ring::Chain;

/// How many pages that were kept are discarded at once: 4 MiB.
const BACKLOG_PAGES: u32 = 1024;

impl Device {
    pub(super) fn inflate(&mut self, job: &mut Job) {
        let Some(pfns) = self.list(&job.chain) else { return };
        job.request = Some(self.memory.regions.begin(QueueKind::Inflate));
        let (remembers, suspended, memory) = (self.remembers(), self.is_suspended(), &self.memory);
        let runs = runs(&pfns);
        for run in &runs {
            // Only pages in memory: others, as many as there are numbers, would cost memory as well.
            let pieces = range_of(*run).into_iter().flat_map(|range| memory.regions.pieces(range));
            for (region, piece) in pieces {
                job.received = job.received.saturating_add(piece.length());
                let Some(part) = whole_run(piece).filter(|_| remembers) else { continue };
                if region.host_page() > PAGE_SIZE {
                    self.in_balloon.insert(part);
                }
                if suspended {
                    self.kept.insert(part);
                }
            }
        }
        let mut seen = None;
        runs.into_iter().for_each(|run| self.targets(run, &mut seen, &mut job.todo));
        job.pfns = pfns;
    }

    /// Discard what came into the balloon while that was suspended, for a turn. Returns whether there is more.
    pub fn run_backlog(&mut self) -> bool {
        let began = Instant::now();
        self.note_state();
        while !self.is_suspended()
            && let Some(run) = self.kept.next_run(0)
        {
            // One call for each turn of this loop.
            let run = Run { pages: run.pages.min(BACKLOG_PAGES), ..run };
            self.kept.remove(run);
            let mut targets = Vec::new();
            self.targets(run, &mut None, &mut targets);
            for target in targets {
                whole_run(target).into_iter().for_each(|run| self.kept.remove(run));
                self.discard(QueueKind::Inflate, None, target);
            }
            if began.elapsed() >= self.options.turn {
                break;
            }
        }
        !self.is_suspended() && self.kept.next_run(0).is_some()
    }

    pub(super) fn inflated(&mut self, job: &mut Job) -> u32 {
        self.metrics.received.add(QueueKind::Inflate.label(), job.received);
        let negotiated = self.features.contains(Features::DEVICE_INIT_ON_INFLATE);
        #[cfg(feature = "lying")]
        let negotiated = negotiated || self.options.lie == Some(Lie::FullLength);
        if !negotiated || job.chain.writable.is_empty() {
            return 0;
        }
        let Some(answers) = self.places(job) else { return 0 };
        if !self.memory.may_touch(answers.iter().copied()) {
            malformed!(self, "too many answers to inflate requests were in untouched memory");
            return 0;
        }
        let (bitmap, zero) = self.bitmap(job, &answers);
        let length = u32::try_from(bitmap.as_bytes().len()).unwrap_or(0);
        #[cfg(feature = "lying")]
        let (bitmap, length) = {
            let is_memory = |pfn: &u32| self.memory.regions.at(u64::from(*pfn) << PAGE_SHIFT).is_some();
            let memory: Vec<bool> = job.pfns.iter().map(is_memory).collect();
            crate::lying::inflated(self.options.lie, bitmap, &memory, length)
        };
        let mut rest = bitmap.as_bytes();
        for answer in answers {
            let length = usize::try_from(answer.length()).unwrap_or(usize::MAX).min(rest.len());
            let (part, later) = rest.split_at(length);
            if let Err(error) = self.memory.map().write_slice(part, GuestAddress(answer.start())) {
                let address = answer.start();
                malformed!(self, %error, address, "an answer to an inflate request outside of memory");
                return 0;
            }
            rest = later;
        }
        if let Some((backing, bytes)) = zero {
            self.metrics.proven.add(backing.label(), bytes);
        }
        length
    }

    /// Where the answer to a request is written; `None` if it cannot be answered.
    fn places(&mut self, job: &Job) -> Option<Vec<Range>> {
        let (pfns, chain) = (&job.pfns, &job.chain);
        let room = total(&chain.writable);
        let mut left = u64::try_from(Bitmap::bytes_for(pfns.len())).unwrap_or(u64::MAX);
        if chain.malformed || pfns.is_empty() || pfns.len() > MAX_PFNS || left > room {
            malformed!(self, pages = pfns.len(), room, "an inflate request that cannot be answered");
            return None;
        }
        let part = |(address, length): &(u64, u32)| {
            let part = u64::from(*length).min(left);
            left = left.saturating_sub(part);
            Range::new(*address, part)
        };
        Some(chain.writable.iter().filter_map(part).collect())
    }

    /// The answer, and how much it claims.
    fn bitmap(&mut self, job: &mut Job, places: &[Range]) -> (Bitmap, Option<(Backing, u64)>) {
        self.note_state();
        let mut bitmap = Bitmap::new(job.pfns.len());
        let mut zero = None;
        let Some(request) = job.request.take() else { return (bitmap, zero) };
        let answer = self.memory.regions.answer(request, places.iter().copied());
        for (n, pfn) in job.pfns.iter().enumerate() {
            let page = Range::new(u64::from(*pfn) << PAGE_SHIFT, PAGE_SIZE);
            if let Some(Ok(backing)) = page.map(|page| answer.claim(page).known()) {
                bitmap.set(n);
                let bytes = zero.map_or(0, |(_, bytes)| bytes);
                zero = Some((backing, PAGE_SIZE.saturating_add(bytes)));
            }
        }
        (bitmap, zero)
    }

    pub(super) fn deflate(&mut self, chain: &Chain) {
        match self.list(chain) {
            Some(pfns) => runs(&pfns).into_iter().for_each(|run| {
                self.in_balloon.remove(run);
                self.kept.remove(run);
            }),
            // Any page may be in use once this is answered.
            None => self.forget_pages(),
        }
    }
}
