// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether memory reads as zero, and how that is known.

use core::fmt;

/// What is behind guest memory whose discarded parts are known to read as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Backing {
    /// A file on tmpfs; a memfd is one as well.
    Tmpfs,
    /// A file of huge pages, on hugetlbfs or from `memfd_create(MFD_HUGETLB)`.
    Hugetlbfs,
    /// A file on ext4.
    Ext4,
    /// A file on XFS.
    Xfs,
    /// Private anonymous memory of the VMM itself, discarded with `MADV_DONTNEED`.
    Anonymous,
}

impl Backing {
    /// The name used in logs and as a metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tmpfs => "tmpfs",
            Self::Hugetlbfs => "hugetlbfs",
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Anonymous => "anonymous",
        }
    }
}

/// Why memory is not said to read as zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// Not (only) memory of the guest.
    OutsideMemory,
    /// Not made of whole pages.
    Misaligned,
    /// Only a part of a host page: discarding would take the neighbours along.
    PartOfHostPage,
    /// The driver poisons pages, and the device would have to fill them with its value.
    Poison,
    /// The guest sees the memory at a second address, where it may be in use.
    Aliased,
    /// Not known to be shared with the guest: a private copy would survive the discard.
    NotKnownShared,
    /// The call that discards failed.
    Failed,
    /// The request was malformed.
    Malformed,
    /// Inhibited by whoever runs the device.
    Inhibited,
}

impl Reason {
    /// Every reason, for metrics that shall exist from the start.
    pub const ALL: [Self; 9] = [
        Self::OutsideMemory,
        Self::Misaligned,
        Self::PartOfHostPage,
        Self::Poison,
        Self::Aliased,
        Self::NotKnownShared,
        Self::Failed,
        Self::Malformed,
        Self::Inhibited,
    ];

    /// The name used in logs and as a metric's label.
    pub const fn label(self) -> &'static str {
        match self {
            Self::OutsideMemory => "outside_memory",
            Self::Misaligned => "misaligned",
            Self::PartOfHostPage => "part_of_host_page",
            Self::Poison => "poison",
            Self::Aliased => "aliased",
            Self::NotKnownShared => "not_known_shared",
            Self::Failed => "failed",
            Self::Malformed => "malformed",
            Self::Inhibited => "inhibited",
        }
    }
}

/// The truth about a piece of memory: it reads as zero and this is why, or no such thing is said.
///
/// There is no way to make a [`Claim::Proven`] out of a [`Claim::Unproven`]: combining claims with
/// [`Claim::and`] keeps the first doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// Discarded by a call that succeeded, on a backing that then reads as zero.
    Proven(Backing),
    /// Not said to be zero.
    Unproven(Reason),
}

impl Claim {
    /// Whether the memory is known to read as zero.
    pub const fn is_proven(self) -> bool {
        matches!(self, Self::Proven(_))
    }

    /// The claim about two pieces taken together.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unproven(reason), _) => Self::Unproven(reason),
            (_, Self::Unproven(reason)) => Self::Unproven(reason),
            (proven, Self::Proven(_)) => proven,
        }
    }

    /// The used length of a reported block of `length` bytes: all of it, or nothing.
    ///
    /// A number in between could not say which bytes it counts.
    pub const fn used_length(self, length: u32) -> u32 {
        match self {
            Self::Proven(_) => length,
            Self::Unproven(_) => 0,
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Proven(backing) => write!(f, "zero ({})", backing.label()),
            Self::Unproven(reason) => write!(f, "not said to be zero ({})", reason.label()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubt_is_never_lost() {
        let yes = Claim::Proven(Backing::Tmpfs);
        let no = Claim::Unproven(Reason::Failed);
        assert_eq!(yes.and(Claim::Proven(Backing::Ext4)), yes);
        assert_eq!(yes.and(no), no);
        assert_eq!(no.and(yes), no);
        assert_eq!(no.and(Claim::Unproven(Reason::Poison)), no);
    }

    #[test]
    fn used_length_is_all_or_nothing() {
        assert_eq!(Claim::Proven(Backing::Tmpfs).used_length(0x20_0000), 0x20_0000);
        for reason in Reason::ALL {
            assert_eq!(Claim::Unproven(reason).used_length(0x20_0000), 0);
        }
    }
}
