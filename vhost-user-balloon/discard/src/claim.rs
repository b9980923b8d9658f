// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether memory reads as zero, and how that is known.

use std::fmt;

balloon_protocol::labelled! {
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

balloon_protocol::labelled! {
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
    /// A private mapping of a file: what is discarded reads as the file.
    PrivateFile "private_file";
    /// The guest sees the memory at a second address, where it may be in use.
    Aliased "aliased";
    /// Not known to be shared with the guest: a private copy would survive the discard.
    NotKnownShared "not_known_shared";
    /// The device writes there itself: a ring, or an answer.
    DeviceMemory "device_memory";
    /// Pinned: a device would go on with the old page.
    Pinned "pinned";
    /// Writes are logged, and the log would not have the discard.
    Logged "logged";
    /// Suspended by the operator, or while memory is copied.
    Inhibited "inhibited";
    /// The call that discards failed.
    Failed "failed";
    /// The request was malformed.
    Malformed "malformed";
    /// The request ended before: memory came or went, or the next request of its queue has begun.
    Ended "request_ended";
}

/// Whether a piece of memory reads as zero, and why.
///
/// Only [`Answer::claim`](crate::Answer::claim) makes one that is proven. Combining claims with [`Claim::and`] keeps
/// the first doubt.
///
/// ```compile_fail
/// // Nobody else can.
/// let claim = balloon_discard::Claim { known: Ok(balloon_discard::Backing::Tmpfs) };
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Claim {
    known: Result<Backing, Reason>,
}

impl Claim {
    /// Discarded by a call that succeeded, on a backing that then reads as zero.
    pub(crate) const fn proven(backing: Backing) -> Self {
        Self { known: Ok(backing) }
    }

    /// Not claimed to be zero.
    pub const fn unproven(reason: Reason) -> Self {
        Self { known: Err(reason) }
    }

    /// Whether the memory is known to read as zero.
    #[must_use]
    pub const fn is_proven(self) -> bool {
        self.known.is_ok()
    }

    /// How it is known, or why it is not.
    ///
    /// # Errors
    ///
    /// The reason for the doubt.
    pub const fn known(self) -> Result<Backing, Reason> {
        self.known
    }

    /// The claim about two pieces taken together.
    pub const fn and(self, other: Self) -> Self {
        if self.is_proven() && !other.is_proven() { other } else { self }
    }

    /// The used length of a reported block of `length` bytes: all of it, or nothing.
    ///
    /// A number in between would not identify the bytes that it counts.
    #[must_use]
    pub const fn used_length(self, length: u32) -> u32 {
        if self.is_proven() { length } else { 0 }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.known {
            Ok(backing) => write!(f, "zero ({})", backing.label()),
            Err(reason) => write!(f, "not claimed to be zero ({})", reason.label()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubt_is_never_lost() {
        let yes = Claim::proven(Backing::Tmpfs);
        let no = Claim::unproven(Reason::Failed);
        assert!(yes.is_proven() && !no.is_proven());
        assert_eq!(yes.and(Claim::proven(Backing::Ext4)), yes);
        assert_eq!(yes.and(no), no);
        assert_eq!(no.and(yes), no);
        assert_eq!(no.and(Claim::unproven(Reason::Poison)), no);
    }

    #[test]
    fn used_length_is_all_or_nothing() {
        assert_eq!(Claim::proven(Backing::Tmpfs).used_length(0x20_0000), 0x20_0000);
        for reason in Reason::ALL {
            assert_eq!(Claim::unproven(*reason).used_length(0x20_0000), 0);
        }
    }
}
