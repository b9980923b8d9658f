// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Feature bits, and the queues that exist because of them.

use core::ops::BitOr;

/// Feature bits of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Features(u64);

impl Features {
    /// Pages may only be used again after a deflate request (bit 0).
    pub const MUST_TELL_HOST: Self = Self(1 << 0);
    /// There is a queue for statistics (bit 1).
    pub const STATS_VQ: Self = Self(1 << 1);
    /// The driver takes pages back by itself when memory is short (bit 2).
    pub const DEFLATE_ON_OOM: Self = Self(1 << 2);
    /// There is a queue for hints about free pages (bit 3).
    pub const FREE_PAGE_HINT: Self = Self(1 << 3);
    /// The driver writes the value with which it poisons free pages into the configuration (bit 4).
    pub const PAGE_POISON: Self = Self(1 << 4);
    /// There is a queue for reports of free pages (bit 5).
    pub const REPORTING: Self = Self(1 << 5);
    /// The used length of a report is the number of bytes that read as zero (bit 6).
    ///
    /// Some private VMM forks use this bit for an extension of their own.
    pub const DEVICE_INIT_REPORTED: Self = Self(1 << 6);
    /// The device returns for each inflated page whether it reads as zero (bit 7).
    pub const DEVICE_INIT_ON_INFLATE: Self = Self(1 << 7);

    /// The device can have all free memory reported now, by two fields of the configuration (bit 16, a provisional
    /// number).
    pub const REPORT_NOW: Self = Self(1 << 16);

    /// Bits as they are on the wire; only the balloon's own are kept.
    #[must_use]
    pub const fn from_bits(bits: u64) -> Self {
        Self(bits & (0xff | Self::REPORT_NOW.0))
    }

    /// The bits as they go over the wire.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether all of `other` is in here.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// What is left without `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// What holds once a driver has accepted these bits: bits 6 and 16 mean nothing without reporting.
    #[must_use]
    pub const fn negotiated(accepted: Self) -> Self {
        if accepted.contains(Self::REPORTING) {
            accepted
        } else {
            accepted.without(Self::DEVICE_INIT_REPORTED).without(Self::REPORT_NOW)
        }
    }
}

impl BitOr for Features {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

labelled! {
    /// The purpose of a queue.
    QueueKind
    /// Pages that go into the balloon.
    Inflate "inflate";
    /// Pages that leave the balloon.
    Deflate "deflate";
    /// Statistics about the guest's memory.
    Stats "stats";
    /// Hints about free pages, for migration.
    Hinting "hinting";
    /// Reports of free pages.
    Reporting "reporting";
}

/// The numbers of the queues: only queues whose feature was negotiated are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueMap {
    kinds: [Option<QueueKind>; Self::MAX],
}

impl QueueMap {
    /// How many queues there can be.
    pub const MAX: usize = 5;

    /// The queues that there are with these negotiated features.
    #[must_use]
    pub fn new(features: Features) -> Self {
        let optional = [
            (Features::STATS_VQ, QueueKind::Stats),
            (Features::FREE_PAGE_HINT, QueueKind::Hinting),
            (Features::REPORTING, QueueKind::Reporting),
        ];
        let present = [QueueKind::Inflate, QueueKind::Deflate]
            .into_iter()
            .chain(optional.into_iter().filter(|(bit, _)| features.contains(*bit)).map(|(_, kind)| kind));
        let mut kinds = [None; Self::MAX];
        for (slot, kind) in kinds.iter_mut().zip(present) {
            *slot = Some(kind);
        }
        Self { kinds }
    }

    /// What queue `index` is for; `None` if there is no such queue.
    #[must_use]
    pub fn kind(&self, index: usize) -> Option<QueueKind> {
        self.kinds.get(index).copied().flatten()
    }

    /// The number of the queue for `kind`, if it was negotiated.
    #[must_use]
    pub fn index(&self, kind: QueueKind) -> Option<usize> {
        self.kinds.iter().position(|k| *k == Some(kind))
    }

    /// How many queues there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.kinds.iter().flatten().count()
    }
}
