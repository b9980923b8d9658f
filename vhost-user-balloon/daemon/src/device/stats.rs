// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Statistics of the guest.

use std::time::Instant;

use balloon_protocol::{MAX_STATS_BYTES, QueueKind, Statistics};

use super::job::Progress;
use super::state::Device;
use crate::malformed;
use crate::ring::{Chain, Ring};

impl Device {
    /// Ask the driver for new statistics, if it can be asked: it answers one question at a time.
    pub fn ask_for_statistics(&mut self) {
        self.asked = Some(Instant::now());
        let Some(index) = self.queues.index(QueueKind::Stats) else { return };
        if !self.rings.get(index).is_some_and(Ring::is_running) {
            return;
        }
        let Some(head) = self.held_stats.take() else { return };
        match self.push(index, head, 0) {
            Ok(()) => self.rings.get_mut(index).into_iter().for_each(Ring::call),
            Err(error) => {
                malformed!(self, %error, ring = index, "cannot ask for statistics");
            }
        }
    }

    /// When to ask for statistics next.
    pub fn next_question(&self) -> Option<Instant> {
        let interval = self.options.stats_interval?;
        self.held_stats?;
        match self.asked {
            Some(asked) => asked.checked_add(interval),
            None => Some(Instant::now()),
        }
    }

    pub(super) fn take_statistics(&mut self, chain: &Chain) -> Progress {
        let Some(bytes) = self.read(chain, MAX_STATS_BYTES) else { return Progress::Used(0) };
        let statistics = Statistics::parse(&bytes);
        self.metrics.statistics(&statistics);
        self.statistics = Some((statistics, Instant::now()));
        // The device keeps this one until it wants the next; a second one goes back at once.
        if self.held_stats.is_some() {
            return Progress::Used(0);
        }
        self.held_stats = Some(chain.head);
        Progress::Held
    }
}
