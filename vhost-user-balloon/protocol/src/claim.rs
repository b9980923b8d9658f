// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether memory reads as zero, and how that is known.

use core::fmt;

labelled! {
    /// A backing of guest memory whose discarded parts read as zero.
    Backing
    /// A file on tmpfs; a memfd is one as well.
    Tmpfs "tmpfs";
    /// A file of huge pages, on hugetlbfs or from `memfd_create(MFD_HUGETLB)`.
    Hugetlbfs "hugetlbfs";
    /// A file on ext4.
    Ext4 "ext4";
    /// A file on XFS.
    Xfs "xfs";
    /// Private anonymous memory of the VMM itself, discarded with `MADV_DONTNEED`.
    Anonymous "anonymous";
}

labelled! {
    /// Why memory is not claimed to read as zero.
    Reason
    /// Not (only) memory of the guest.
    OutsideMemory "outside_memory";
    /// Not made of whole pages.
    Misaligned "misaligned";
    /// Only a part of a host page: discarding would take the neighbours along.
    PartOfHostPage "part_of_host_page";
    /// The driver poisons pages, and the device would have to fill them with its value.
    Poison "poison";
    /// The guest sees the memory at a second address, where it may be in use.
    Aliased "aliased";
    /// Not known to be shared with the guest: a private copy would survive the discard.
    NotKnownShared "not_known_shared";
    /// The call that discards failed.
    Failed "failed";
    /// The request was malformed.
    Malformed "malformed";
    /// Inhibited by the operator.
    Inhibited "inhibited";
}

/// Whether a piece of memory reads as zero, and why.
///
/// There is no way to make a [`Claim::Proven`] out of a [`Claim::Unproven`]: combining claims with
/// [`Claim::and`] keeps the first doubt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Claim {
    /// Discarded by a call that succeeded, on a backing that then reads as zero.
    Proven(Backing),
    /// Not claimed to be zero.
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
    /// A number in between would not identify the bytes that it counts.
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
            Self::Unproven(reason) => write!(f, "not claimed to be zero ({})", reason.label()),
        }
    }
}
