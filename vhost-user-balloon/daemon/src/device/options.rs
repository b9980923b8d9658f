// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a device is set up, and everything that can be offered.

use std::num::NonZeroU32;
use std::time::Duration;

use balloon_protocol::Features;

#[cfg(feature = "lying")]
use crate::lying::Lie;

/// A VMM may stand still until it is answered, and a guest can put chains into a ring faster than they are done.
pub const TURN: Duration = Duration::from_millis(10);

/// The options of the command line that are for the device.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub features: Features,
    pub target: u64,
    pub memory_is_shared: bool,
    pub inhibited: bool,
    pub discard_unit: u64,
    /// Inflated pages that follow each other are one piece of memory, and so is each reported block.
    pub inhibit_one_in: Option<NonZeroU32>,
    pub stats_interval: Option<Duration>,
    /// How long a queue is served before others get their turn: [`TURN`], but for tests.
    pub turn: Duration,
    /// Calls may be sockets.
    pub user_mode_linux: bool,
    #[cfg(feature = "lying")]
    pub lie: Option<Lie>,
}

/// Everything that can be offered, and its name in `status`.
///
/// Free page hinting is not: a hint holds only until the driver takes the page back, which it does without
/// asking when memory is short, so it is good for leaving pages out of a migration (where a later write makes
/// them dirty again) and never for discarding. This device takes no part in migration, so it has no use for
/// hints.
pub const FEATURES: [(Features, &str); 8] = [
    (Features::MUST_TELL_HOST, "must-tell-host"),
    (Features::STATS_VQ, "stats"),
    (Features::DEFLATE_ON_OOM, "deflate-on-oom"),
    (Features::PAGE_POISON, "page-poison"),
    (Features::REPORTING, "free-page-reporting"),
    (Features::DEVICE_INIT_REPORTED, "device-init-reported"),
    (Features::DEVICE_INIT_ON_INFLATE, "device-init-on-inflate"),
    (Features::REPORT_NOW, "report-now"),
];

impl Options {
    /// All bits of [`FEATURES`].
    pub fn all_features() -> Features {
        FEATURES.iter().fold(Features::default(), |all, (bit, _)| all | *bit)
    }
}
