// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Reports of free pages.

use balloon_discard::{Claim, Reason};
use balloon_protocol::{Features, PAGE_SIZE, QueueKind, Range};

use super::job::{Job, total};
use super::state::Device;

impl Device {
    pub(super) fn report(&mut self, job: &mut Job) {
        let chain = &job.chain;
        job.request = Some(self.memory.regions.begin(QueueKind::Reporting));
        let ranges = chain.writable.iter().filter_map(|(at, length)| Range::new(*at, u64::from(*length)));
        for (_, piece) in ranges.flat_map(|range| self.memory.regions.pieces(range)) {
            job.received = job.received.saturating_add(piece.length());
        }
        let malformed = chain.malformed || !chain.readable.is_empty();
        if malformed {
            self.metrics.malformed.inc();
        }
        job.refused = chain.writable.is_empty();
        for (address, length) in &chain.writable {
            let reason = match Range::new(*address, u64::from(*length)) {
                _ if malformed => Reason::Malformed,
                None => Reason::OutsideMemory,
                Some(range) if !range.is_aligned(PAGE_SIZE) => Reason::Misaligned,
                Some(range) => {
                    job.todo.push(range);
                    continue;
                }
            };
            self.metrics.skipped.add(reason.label(), u64::from(*length));
            job.refused = true;
        }
    }

    pub(super) fn reported(&mut self, job: &mut Job) -> u32 {
        self.metrics.received.add(QueueKind::Reporting.label(), job.received);
        // There is no used length for 4 GiB and more.
        let length = u32::try_from(total(&job.chain.writable)).unwrap_or(0);
        let negotiated = self.features.contains(Features::DEVICE_INIT_REPORTED);
        #[cfg(feature = "lying")]
        if let Some(lied) = crate::lying::reported(self.options.lie, negotiated, length) {
            return lied;
        }
        let used = match self.report_claim(job).map(Claim::known) {
            Some(Ok(backing)) if negotiated && length != 0 => {
                self.metrics.proven.add(backing.label(), job.received);
                length
            }
            _ => 0,
        };
        self.report_now.count(job.received, job.discarded, used.into());
        used
    }

    /// What is claimed of all parts of a report.
    fn report_claim(&mut self, job: &mut Job) -> Option<Claim> {
        self.note_state();
        let request = job.request.take().filter(|_| !job.refused)?;
        let answer = self.memory.regions.answer(request, []);
        let parts = job.chain.writable.iter().map(|(at, length)| {
            let range = Range::new(*at, u64::from(*length));
            range.map_or(Claim::unproven(Reason::OutsideMemory), |range| answer.claim(range))
        });
        parts.reduce(Claim::and)
    }
}
