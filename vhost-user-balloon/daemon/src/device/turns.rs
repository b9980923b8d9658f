// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Rings in turns: one is served for a while, and then the next.

use std::time::Instant;

use balloon_protocol::QueueKind;

use super::job::{Job, Progress, whole_run};
use super::state::Device;
use crate::malformed;
use crate::memory::STEP;
use crate::ring::{Kick, Ring};

impl Device {
    /// A ring was kicked: do what is in it. Returns whether there is more to do.
    pub fn kicked(&mut self, index: usize) -> bool {
        let Some(ring) = self.rings.get_mut(index) else { return false };
        match ring.take_kick() {
            Kick::Yes => self.run_ring(index),
            Kick::No => false,
            Kick::Hangup => {
                malformed!(self, ring = index, "the descriptor for kicks has come to its end");
                false
            }
        }
    }

    /// Do what is in a ring, for as long as a turn is. Returns whether there may be more.
    pub fn run_ring(&mut self, index: usize) -> bool {
        let Some(kind) = self.queues.kind(index) else { return false };
        if !self.rings.get(index).is_some_and(Ring::is_running) {
            return false;
        }
        let mut used = false;
        let began = Instant::now();
        let more = loop {
            let job = match self.jobs.get_mut(index).and_then(Option::take) {
                Some(job) => Ok(Some(job)),
                None => self.next_job(index, kind),
            };
            let done = match job {
                Ok(None) => break false,
                Ok(Some(mut job)) => match self.work(&mut job, began) {
                    Progress::More => {
                        if let Some(slot) = self.jobs.get_mut(index) {
                            *slot = Some(job);
                        }
                        break true;
                    }
                    Progress::Held => Ok(()),
                    Progress::Used(length) => {
                        used = true;
                        self.push(index, job.chain.head, length)
                    }
                },
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                malformed!(self, %error, ring = index, "stopped looking at a ring");
                break false;
            }
            if began.elapsed() >= self.options.turn {
                break true;
            }
        };
        // Also where the ring broke: what was answered before that was.
        if used && let Some(ring) = self.rings.get_mut(index) {
            ring.call();
        }
        more
    }

    pub(super) fn next_job(
        &mut self,
        index: usize,
        kind: QueueKind,
    ) -> Result<Option<Job>, virtio_queue::Error> {
        let Some(ring) = self.rings.get_mut(index) else { return Ok(None) };
        let Some(chain) = ring.pop(self.memory.map())? else { return Ok(None) };
        self.watch(index);
        if chain.malformed {
            malformed!(self, ring = index, head = chain.head, "a buffer without an end or in no order");
        }
        self.metrics.requests.add(kind.label(), 1);
        let mut job = Job::new(kind, chain);
        match kind {
            QueueKind::Inflate => self.inflate(&mut job),
            QueueKind::Reporting => self.report(&mut job),
            _ => {}
        }
        job.todo.reverse();
        Ok(Some(job))
    }

    pub(super) fn work(&mut self, job: &mut Job, began: Instant) -> Progress {
        self.note_state();
        while let Some(range) = job.todo.pop() {
            let (step, rest) = self.memory.regions.step(range, STEP);
            job.todo.extend(rest);
            let discarded = self.discard(job.kind, job.request.as_ref(), step);
            if self.is_suspended()
                && job.request.as_ref().is_some_and(|request| request.table() == self.pages_of)
                && job.kind == QueueKind::Inflate
                && self.remembers()
                && !self.came_back(step)
            {
                // Discarding was suspended after the list was read.
                let inside = self.memory.regions.at(step.start()).and(whole_run(step));
                inside.into_iter().for_each(|run| self.kept.insert(run));
            }
            job.discarded = job.discarded.saturating_add(discarded);
            if !job.todo.is_empty() && began.elapsed() >= self.options.turn {
                return Progress::More;
            }
        }
        match job.kind {
            QueueKind::Inflate => Progress::Used(self.inflated(job)),
            QueueKind::Deflate => {
                self.deflate(&job.chain);
                Progress::Used(0)
            }
            QueueKind::Stats => self.take_statistics(&job.chain),
            QueueKind::Reporting => Progress::Used(self.reported(job)),
            // Hinting is not offered, so there is no such queue.
            _ => Progress::Used(0),
        }
    }
}
