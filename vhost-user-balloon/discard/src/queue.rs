// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queues as rust-vmm's `virtio-queue` has them.

use balloon_protocol::Range;
use virtio_queue::QueueT;

/// Where the rings of a queue are, for [`Regions::set_rings`](crate::Regions::set_rings).
pub fn rings_of<Q: QueueT>(queue: &Q) -> impl Iterator<Item = Range> + use<Q> {
    let size = u64::from(queue.size());
    let rings = [
        (queue.desc_table(), size.saturating_mul(16)),
        (queue.avail_ring(), size.saturating_mul(2).saturating_add(6)),
        (queue.used_ring(), size.saturating_mul(8).saturating_add(6)),
    ];
    rings.into_iter().filter_map(|(start, length)| Range::new(start, length))
}
