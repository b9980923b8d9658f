// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why memory cannot be a region.

use std::io;

use thiserror::Error;

/// Why memory cannot be a region of the guest, or not as it was asked for.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A system call that looks at the file failed.
    #[error("cannot look at the descriptor of the region at {guest:#x}: {source}")]
    Stat {
        /// Where the region would begin in the guest.
        guest: u64,
        /// The error of the call.
        source: io::Error,
    },
    /// The file is shorter than the region. Touching its end would be a SIGBUS.
    #[error("the region at {guest:#x} ends at byte {end:#x} of a file that has {size:#x}")]
    PastEnd {
        /// Where the region would begin in the guest.
        guest: u64,
        /// Where it would end in the file.
        end: u64,
        /// The size of the file.
        size: u64,
    },
    /// It passes the end of the address space or of the file's offsets, is empty, or is not made of
    /// (huge) pages.
    #[error("the region at {guest:#x} cannot have {length:#x} bytes from byte {offset:#x} of a file")]
    Extent {
        /// Where the region would begin in the guest.
        guest: u64,
        /// Its length in bytes.
        length: u64,
        /// Where it would begin in the file, or the address of the mapping.
        offset: u64,
    },
    /// The descriptor is no regular file: a pipe, a device, a directory.
    #[error("the region at {guest:#x} is not a regular file (its mode is {mode:#o})")]
    Kind {
        /// Where the region would begin in the guest.
        guest: u64,
        /// The `st_mode` of what it is.
        mode: u32,
    },
    /// A filesystem whose holes are not known to read as zero, or that a server answers for.
    #[error("the region at {guest:#x} is on device {device}, not on tmpfs, hugetlbfs, ext4 or XFS")]
    Filesystem {
        /// Where the region would begin in the guest.
        guest: u64,
        /// The numbers of the filesystem's device, `major:minor`.
        device: String,
    },
    /// Another region has some of the same addresses of the guest.
    #[error("the region at {guest:#x} overlaps another one")]
    Overlap {
        /// Where the region would begin in the guest.
        guest: u64,
    },
    /// It is shared without a file, anonymous with a file, made from a pointer, or has huge pages
    /// of a size that its flags do not have.
    #[error("it is not known how the mapping of the region at {guest:#x} was made")]
    Mapping {
        /// Where the region would begin in the guest.
        guest: u64,
    },
    /// The unit for [`Region::coarsen`](crate::Region::coarsen) is not a power of two.
    #[error("the region at {guest:#x} cannot be discarded in units of {size} bytes: not a power of two")]
    Unit {
        /// Where the region begins in the guest.
        guest: u64,
        /// The unit in bytes.
        size: u64,
    },
}
