// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The protocol of the virtio memory balloon, without any I/O.
//!
//! For VMM authors: which queue has which number, what may be written to the configuration space,
//! how lists of page frames become ranges, when a host page that is larger than 4 KiB may go, and one
//! type, [`Claim`], that carries the truth about discarded memory to the used length the guest sees.
//! Nothing here allocates more than the guest's memory size allows, and nothing panics on what a guest
//! can send.
//!
//! The device side of one inflate request, with a backing whose host pages are 4 KiB:
//!
//! ```
//! use balloon_protocol::{Backing, Bitmap, Claim, Features, Reason, QueueKind, QueueMap, parse_pfns, runs};
//!
//! // What the driver accepted decides which queues there are.
//! let features = Features::negotiated(
//!     Features::STATS_VQ | Features::REPORTING | Features::DEVICE_INIT_ON_INFLATE,
//! );
//! let queues = QueueMap::new(features);
//! assert_eq!(queues.kind(0), Some(QueueKind::Inflate));
//! assert_eq!(queues.kind(3), Some(QueueKind::Reporting));
//!
//! // Three pages, in an order of the driver's choosing; the last one is outside of its memory.
//! let bytes: Vec<u8> = [7_u32, 6, 0x8000_0000].iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
//! let pfns: Vec<u32> = parse_pfns(&bytes)?.collect();
//!
//! // Stands for a call such as fallocate(2), and for knowing what the memory then reads as.
//! let discard = |first: u32, pages: u32| -> Claim {
//!     if u64::from(first) + u64::from(pages) <= 0x40000 {
//!         Claim::Proven(Backing::Tmpfs)
//!     } else {
//!         Claim::Unproven(Reason::OutsideMemory)
//!     }
//! };
//! let mut bitmap = Bitmap::new(pfns.len());
//! for run in runs(&pfns) {
//!     let claim = discard(run.first, run.pages);
//!     for (n, pfn) in pfns.iter().enumerate() {
//!         if run.contains(*pfn) && claim.is_proven() {
//!             bitmap.set(n);
//!         }
//!     }
//! }
//! // Bit N, least significant first, speaks of the Nth page of the request.
//! assert_eq!(bitmap.as_bytes(), [0b011]);
//! # Ok::<(), balloon_protocol::PfnError>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod bitmap;
mod claim;
mod config;
mod features;
mod pageset;
mod pfn;
mod range;
mod stats;

pub use bitmap::Bitmap;
pub use claim::{Backing, Claim, Reason};
pub use config::{Config, ConfigError, ConfigWrite};
pub use features::{Features, QueueKind, QueueMap};
pub use pageset::PageSet;
pub use pfn::{MAX_PFNS, PfnError, Run, parse_pfns, runs};
pub use range::{Piece, Range, clip};
pub use stats::{MAX_STATS_BYTES, Statistics};

/// The balloon's page: 4 KiB, whatever the page size of guest and host.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
