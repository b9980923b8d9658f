// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The protocol of the virtio memory balloon, without any I/O.
//!
//! For VMM authors: which queue has which number, what may be written to the configuration space,
//! how lists of page frames become ranges, and when a host page that is larger than 4 KiB may go. The crate
//! `balloon-discard` does the discarding, and makes the claims that memory reads as zero.
//! [`runs`] and [`Bitmap`] cost memory in proportion to their list, which the device bounds; a
//! [`PageSet`] takes 40 MiB at most. Nothing panics on what a guest can send.
//!
//! The answer to an inflate request, with a backing whose host pages are 4 KiB:
//!
//! ```
//! use balloon_protocol::{Bitmap, Features, QueueKind, QueueMap, parse_pfns, runs};
//!
//! let features = Features::STATS_VQ | Features::REPORTING | Features::DEVICE_INIT_ON_INFLATE;
//! assert_eq!(QueueMap::new(Features::negotiated(features)).kind(3), Some(QueueKind::Reporting));
//!
//! // Stands for fallocate(2), and for what is known of the backing: here all memory is below 1 GiB.
//! let reads_as_zero = |first: u32| first < 0x40000;
//! // Three pages, in an order of the driver's choosing; the last one is outside.
//! let bytes: Vec<u8> = [7_u32, 6, 0x8000_0000].iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
//! let pfns: Vec<u32> = parse_pfns(&bytes)?.collect();
//! let mut bitmap = Bitmap::new(pfns.len());
//! for run in runs(&pfns).into_iter().filter(|run| reads_as_zero(run.first)) {
//!     pfns.iter().enumerate().filter(|(_, pfn)| run.contains(**pfn)).for_each(|(n, _)| bitmap.set(n));
//! }
//! // Bit N, least significant first, is about the Nth page of the request.
//! assert_eq!(bitmap.as_bytes(), [0b011]);
//! # Ok::<(), balloon_protocol::PfnError>(())
//! ```

#![no_std]
#![forbid(unsafe_code)]
#![warn(clippy::must_use_candidate, clippy::missing_errors_doc)]

extern crate alloc;

/// An enumeration whose variants have names for logs and metrics; for the crates of this workspace.
#[doc(hidden)]
#[macro_export]
macro_rules! labelled {
    ($(#[$doc:meta])* $name:ident $($(#[$variant_doc:meta])* $variant:ident $label:literal;)*) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// All of them, for metrics that exist from the start.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name used in logs and as a metric's label.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)* }
            }
        }
    };
}

mod bitmap;
mod config;
mod features;
mod pageset;
mod pfn;
mod range;
mod stats;

pub use bitmap::Bitmap;
pub use config::{Config, ConfigError};
pub use features::{Features, QueueKind, QueueMap};
pub use pageset::PageSet;
pub use pfn::{MAX_PFNS, PfnError, Run, parse_pfns, runs};
pub use range::Range;
pub use stats::{MAX_STATS_BYTES, Statistics};

/// The balloon's page: 4 KiB, whatever the page size of guest and host.
pub const PAGE_SIZE: u64 = 1 << PAGE_SHIFT;

/// log2 of [`PAGE_SIZE`].
pub const PAGE_SHIFT: u32 = 12;
