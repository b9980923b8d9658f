// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives a guest's memory back to the host, and knows whether it then reads as zero.
//!
//! "The call succeeded" is not "it reads as zero". A hole in a file of a filesystem in the table below
//! reads as zero, if the guest sees the file and not a private copy of it. `MADV_DONTNEED` makes zeros of
//! private anonymous memory only: on a shared or file mapping it drops nothing, or brings the file's
//! content back.
//!
//! | backing | discarded by | claimed to be zero |
//! |---|---|---|
//! | tmpfs, memfd | a hole, fallocate(2) | if known to be shared, and no page or swap is left |
//! | hugetlbfs, memfd with huge pages | the same, in whole huge pages | if known to be shared |
//! | ext4, XFS | the same | if known to be shared |
//! | any other file, a device | refused as a region: a server (FUSE, NFS) could stop the process | never |
//! | a file not known to be shared, with a name or without | not discarded: others may use the file | never |
//! | a part of a file that the guest sees twice | not discarded | never |
//! | private anonymous memory of the VMM ([`Region::anonymous`]) | madvise(2) | yes |
//! | a private mapping of a file, as of a snapshot ([`Region::private_file`]) | madvise(2) | never: the file shows |
//!
//! [`Regions`] is all of guest memory, and makes the only [`Claim`]s that are proven. It also keeps what makes a claim
//! false between the discard and the answer:
//!
//! | | |
//! |---|---|
//! | memory that the guest sees at two addresses | found by itself |
//! | a range that spans regions, or ends outside of memory | split by itself |
//! | a region that goes or comes while a request is worked on | ends the request by itself: nothing more is discarded |
//! | rings and answers, which the device writes itself | [`Regions::set_rings`], [`Regions::answer`] |
//! | pages that the driver poisons | [`Regions::set_poisoned`] |
//! | memory that is pinned (VFIO, RDMA, io_uring) | [`Regions::set_pinned`], [`Hold::Pinned`] |
//! | a log of writes, for migration | [`Hold::Logged`], or enter what [`Outcome::discarded`] counts |
//! | a snapshot, postcopy, an operator | [`Hold::Suspended`], which ends the claims of requests that are not answered |
//!
//! It cannot see a VMM that serves page faults of the guest with userfaultfd(2), which decides what a hole reads as.
//! With such a VMM claim nothing.
//!
//! Features, both off by default:
//!
//! - `vm-memory`: `Regions::set_memory` takes a `GuestMemoryMmap` of rust-vmm, without unsafe code of yours;
//! - `virtio-queue`: `rings_of` has the places of a queue for [`Regions::set_rings`].
//!
//! A VMM with a seccomp filter has to allow these system calls: `statx`, `fcntl` with `F_GET_SEALS` and `fstatfs` in the
//! thread that makes a [`Region`]; `fallocate`, `madvise`, `cachestat` ([`SYS_CACHESTAT`]) and `pread64` in the thread
//! that discards. A thread inherits the filter of the thread that starts it, and all filters of a thread have to allow a
//! call: add them to both.
//!
//! ```
//! use balloon_discard::{Backing, Region, Regions};
//! use balloon_protocol::{QueueKind, Range};
//! use std::os::unix::fs::FileExt;
//!
//! let memory = std::fs::File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?);
//! memory.set_len(4 << 20)?;
//! memory.write_all_at(&[7; 8192], 0)?;
//! // The guest sees the file's 4 MiB from address 1 GiB on.
//! let mut region = Region::new(memory.try_clone()?, 0, 1 << 30, 4 << 20)?;
//! // This VMM has mapped it shared.
//! region.set_known_shared();
//! let mut regions = Regions::new();
//! regions.insert(region)?;
//! let report = Range::new(1 << 30, 8192).expect("it is not empty");
//! let request = regions.begin(QueueKind::Reporting);
//! regions.discard(&request, report);
//! // No answer but the used length.
//! let claim = regions.answer(request, []).claim(report);
//! assert_eq!((claim.known(), claim.used_length(8192)), (Ok(Backing::Tmpfs), 8192));
//! # let mut first = [1];
//! # memory.read_exact_at(&mut first, 0)?;
//! # assert_eq!(first, [0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(clippy::must_use_candidate, clippy::missing_errors_doc)]

mod claim;
mod error;
mod file;
#[cfg(feature = "vm-memory")]
mod guest_memory;
#[cfg(feature = "virtio-queue")]
mod queue;
mod region;
mod regions;
mod zeros;

pub use claim::{Backing, Claim, Reason};
pub use error::RegionError;
pub use file::{SYS_CACHESTAT, is_empty, is_zero};
#[cfg(feature = "virtio-queue")]
pub use queue::rings_of;
pub use region::{FileId, Region};
pub use regions::{Answer, Hold, Outcome, Regions, Request, Table};
