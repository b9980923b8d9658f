// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Giving memory back to the host.

use std::time::Instant;

use balloon_discard::{Outcome, Reason, Request};
use balloon_protocol::{QueueKind, Range};

use super::state::Device;
use crate::limited;

impl Device {
    /// Whether this piece of memory is one that a test has kept; xorshift64 is random enough.
    fn leaves_it_alone(&mut self) -> bool {
        let Some(one_in) = self.options.inhibit_one_in else { return false };
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        // The upper bits are the better ones.
        (self.dice >> 32).is_multiple_of(u64::from(one_in.get()))
    }

    /// Give one step of a range back to the host, unless there is a reason not to. How much went back.
    pub(super) fn discard(&mut self, kind: QueueKind, request: Option<&Request>, range: Range) -> u64 {
        let own = if self.leaves_it_alone() {
            Some(Reason::Inhibited)
        } else if kind == QueueKind::Inflate && self.came_back(range) {
            Some(Reason::PartOfHostPage)
        } else {
            None
        };
        #[cfg(feature = "lying")]
        if crate::lying::keeps(self.options.lie) {
            return range.length();
        }
        let done = match own {
            Some(reason) => {
                self.metrics.skipped.add(reason.label(), range.length());
                return 0;
            }
            None => self.give_back(request, range),
        };
        if let Some(errno) = done.errno {
            let error = std::io::Error::from_raw_os_error(errno);
            limited!(self.limiter, %error, start = range.start(), length = range.length(), "cannot discard");
        }
        self.metrics.discarded.add(kind.label(), done.discarded);
        if let Some(reason) = done.doubt {
            self.metrics.unproven.add(reason.label(), done.discarded);
            self.metrics.skipped.add(reason.label(), range.length().saturating_sub(done.discarded));
        }
        done.discarded
    }

    fn give_back(&mut self, request: Option<&Request>, range: Range) -> Outcome {
        let began = Instant::now();
        let done = match request {
            Some(request) => self.memory.regions.discard(request, range),
            None => self.memory.regions.release(self.pages_of, range),
        };
        if done.discarded != 0 || done.errno.is_some() {
            self.metrics.took(began.elapsed());
        }
        done
    }
}
