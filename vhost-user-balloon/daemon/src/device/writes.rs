// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this process writes to guest memory by itself: its rings.

use balloon_protocol::{Features, Range};

use super::state::Device;
use crate::ring::Ring;

impl Device {
    /// Let memory know where the rings are, and whether pages are poisoned: before anything is discarded, answered or
    /// written.
    pub(super) fn note_state(&mut self) {
        let rings: Vec<Range> = self.rings.iter().flat_map(Ring::areas).collect();
        self.memory.regions.set_rings(rings);
        let poisoned = self.features.contains(Features::PAGE_POISON) && self.config.poison_val != 0;
        self.memory.regions.set_poisoned(poisoned);
    }

    /// Return a chain to the driver.
    pub(super) fn push(&mut self, index: usize, head: u16, length: u32) -> Result<(), virtio_queue::Error> {
        self.note_state();
        let Some(ring) = self.rings.get_mut(index) else { return Ok(()) };
        ring.push(self.memory.map(), head, length)
    }
}
