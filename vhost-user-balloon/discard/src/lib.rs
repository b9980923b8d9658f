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
//! | private anonymous memory of the VMM ([`discard_anonymous`]) | madvise(2) | yes |
//!
//! This crate cannot see two things:
//!
//! - A VMM that serves page faults of the guest with userfaultfd(2) decides what a hole reads as. With such
//!   a VMM claim nothing.
//! - A VMM that pins guest memory (VFIO, RDMA, io_uring) keeps the old page mapped for the device. The
//!   guest no longer sees that page, and the host does not get it back. With such a VMM discard nothing.
//!
//! ```
//! use balloon_discard::Region;
//! use balloon_protocol::{Backing, Claim, Range};
//! use std::os::unix::fs::FileExt;
//!
//! let memory = std::fs::File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?);
//! memory.set_len(4 << 20)?;
//! memory.write_all_at(&[7; 8192], 0)?;
//! // The guest sees the file's 4 MiB from address 1 GiB on.
//! let mut region = Region::new(memory.try_clone()?, 0, 1 << 30, 4 << 20)?;
//! // This VMM has mapped it shared.
//! region.set_known_shared();
//! let report = Range::new(1 << 30, 8192).expect("it is not empty");
//! assert_eq!(region.discard(report).claim, Claim::Proven(Backing::Tmpfs));
//! # let mut first = [1];
//! # memory.read_exact_at(&mut first, 0)?;
//! # assert_eq!(first, [0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use balloon_protocol::{Backing, Claim, PAGE_SIZE, Range, Reason};
use rustix::fs::{AtFlags, FallocateFlags, FileType, StatxFlags};
use rustix::io::Errno;
use thiserror::Error;

const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;

/// The number of cachestat(2), the same on every architecture that a VMM runs on; a sandbox has to allow it.
pub const SYS_CACHESTAT: libc::c_long = 451;

/// How much of a huge page is read to see whether it exists: a read of 1 GiB would take too long.
const MAX_READ: u64 = 2 << 20;

/// Why memory cannot be a region of the guest; `guest` is where it would begin there.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum RegionError {
    #[error("cannot look at the descriptor of the region at {guest:#x}: {source}")]
    Stat { guest: u64, source: io::Error },
    /// Touching its end would be a SIGBUS.
    #[error("the region at {guest:#x} ends at byte {end:#x} of a file that has {size:#x}")]
    PastEnd { guest: u64, end: u64, size: u64 },
    /// It passes the end of the address space or of the file's offsets, is empty, or is not made of (huge) pages.
    #[error("the region at {guest:#x} cannot have {length:#x} bytes from byte {offset:#x} of a file")]
    Extent { guest: u64, length: u64, offset: u64 },
    #[error("the region at {guest:#x} is not a regular file (its mode is {mode:#o})")]
    Kind { guest: u64, mode: u32 },
    /// A filesystem whose holes are not known to read as zero, or that a server answers for.
    #[error("the region at {guest:#x} is on device {device}, not on tmpfs, hugetlbfs, ext4 or XFS")]
    Filesystem { guest: u64, device: String },
}

/// What became of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether all of it reads as zero now.
    pub claim: Claim,
    /// How many bytes went back to the host.
    pub discarded: u64,
    /// The error of the call that failed.
    pub errno: Option<i32>,
}

impl Outcome {
    fn kept(reason: Reason) -> Self {
        Self { claim: Claim::Unproven(reason), discarded: 0, errno: None }
    }
}

/// Identifies a file, whatever descriptor it came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
}

/// A part of guest memory: a part of a file.
#[derive(Debug)]
pub struct Region {
    file: Arc<File>,
    in_file: Range,
    guest: Range,
    id: FileId,
    backing: Backing,
    has_name: bool,
    host_page: u64,
    fault_size: u64,
    known_shared: bool,
    aliased: bool,
}

impl Region {
    /// Look at `file`, of which the guest sees `length` bytes from `offset` at address `guest`.
    ///
    /// Never waits for a server behind the filesystem, such as one of FUSE.
    ///
    /// # Errors
    ///
    /// The file does not have that many bytes, or is not on a filesystem of the table.
    pub fn new(
        file: impl Into<Arc<File>>,
        offset: u64,
        guest: u64,
        length: u64,
    ) -> Result<Self, RegionError> {
        let file = file.into();
        let extent = RegionError::Extent { guest, length, offset };
        let stat = |source: Errno| RegionError::Stat { guest, source: source.into() };
        let Some(range) = Range::new(guest, length).filter(|r| r.start().is_multiple_of(PAGE_SIZE)) else {
            return Err(extent);
        };
        let Some(in_file) = Range::new(offset, length).filter(|r| i64::try_from(r.end()).is_ok()) else {
            return Err(extent);
        };
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(&file, c"", flags, StatxFlags::BASIC_STATS).map_err(stat)?;
        if FileType::from_raw_mode(about.stx_mode.into()) != FileType::RegularFile {
            return Err(RegionError::Kind { guest, mode: about.stx_mode.into() });
        }
        let filesystem = || RegionError::Filesystem {
            guest,
            device: format!("{}:{}", about.stx_dev_major, about.stx_dev_minor),
        };
        // Only memory has seals, and only disks have a major number: statfs(2) would wait for anything else.
        let in_memory = rustix::fs::fcntl_get_seals(&file).is_ok();
        if !in_memory && about.stx_dev_major == 0 {
            return Err(filesystem());
        }
        let statfs = rustix::fs::fstatfs(&file).map_err(stat)?;
        // The types of these fields are not the same on every architecture.
        #[allow(clippy::useless_conversion)]
        let (backing, block) =
            backing_of(i64::try_from(statfs.f_type).unwrap_or(0), u64::try_from(statfs.f_bsize).unwrap_or(0))
                .ok_or_else(filesystem)?;
        // A mapping of a part of a huge page cannot be unmapped.
        if backing == Backing::Hugetlbfs && !in_file.is_aligned(block) {
            return Err(extent);
        }
        if in_file.end() > about.stx_size {
            return Err(RegionError::PastEnd { guest, end: in_file.end(), size: about.stx_size });
        }
        let page = page_size();
        Ok(Self {
            in_file,
            guest: range,
            id: FileId { device: (about.stx_dev_major, about.stx_dev_minor), inode: about.stx_ino },
            backing,
            has_name: about.stx_nlink != 0,
            host_page: block.max(page),
            fault_size: u64::from(about.stx_blksize).max(page),
            known_shared: false,
            aliased: false,
            file,
        })
    }

    /// The file itself.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The bytes of the file that the guest sees.
    pub fn in_file(&self) -> Range {
        self.in_file
    }

    /// The guest's addresses.
    pub fn guest(&self) -> Range {
        self.guest
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// The filesystem it is on.
    pub fn backing(&self) -> Backing {
        self.backing
    }

    /// The size of what can be discarded at once, a power of two.
    pub fn host_page(&self) -> u64 {
        self.host_page
    }

    /// How much memory a hole takes when one byte of it is touched.
    pub fn fault_size(&self) -> u64 {
        self.fault_size
    }

    /// Whether the guest is known to see this very file.
    pub fn known_shared(&self) -> bool {
        self.known_shared
    }

    /// Whether the file had a name when it was looked at: then others may use it as well.
    pub fn has_name(&self) -> bool {
        self.has_name
    }

    /// The guest is known to see this file itself and not a private copy: the operator states it, or the file
    /// has no name and something that the guest wrote was seen to arrive in it.
    ///
    /// Nothing that a guest does may be taken for proof where the file has a name: it would choose which
    /// of the files of its VMM, templates of other guests among them, are punched.
    pub fn set_known_shared(&mut self) {
        self.known_shared = true;
    }

    /// Whether the guest sees a byte of the file in both regions.
    pub fn is_alias_of(&self, other: &Self) -> bool {
        self.id == other.id && self.in_file.overlaps(other.in_file)
    }

    /// The guest sees a part of this region at another address, too: discard nothing. The other address may
    /// be in use, by a ring of the device for example.
    pub fn set_aliased(&mut self, aliased: bool) {
        self.aliased = aliased;
    }

    /// Discard in units of `size` at least, a power of two: where the host has huge pages in a file on
    /// tmpfs, taking a small page out of one breaks it up.
    pub fn coarsen(&mut self, size: u64) {
        if size.is_power_of_two() {
            self.host_page = self.host_page.max(size);
        }
    }

    /// Whether touching a range of the guest's addresses takes memory from the host.
    ///
    /// In doubt it does: where the file cannot be asked, and for a page of zeros that is huge, or before Linux
    /// 6.5.
    pub fn has_hole(&self, range: Range) -> bool {
        let Some(part) = self.to_file(range) else { return false };
        let block = |size: u64| {
            let before = part.start().checked_rem(size).unwrap_or(0);
            Range::new(part.start().saturating_sub(before), size)
        };
        if self.backing == Backing::Hugetlbfs {
            // No call finds its holes, but a byte that is not zero proves that the page exists.
            let read = block(self.fault_size.min(MAX_READ));
            return !read.is_some_and(|read| is_zero(&self.file, read).is_ok_and(|zero| !zero));
        }
        let mut next = block(page_size());
        while let Some(page) = next.filter(|page| page.start() < part.end()) {
            if is_empty(&self.file, page).unwrap_or(true) {
                return true;
            }
            next = Range::new(page.end(), page.length());
        }
        false
    }

    /// What the region's memory reads as when it was discarded.
    pub fn promise(&self) -> Claim {
        if self.aliased {
            Claim::Unproven(Reason::Aliased)
        } else if self.known_shared {
            Claim::Proven(self.backing)
        } else {
            Claim::Unproven(Reason::NotKnownShared)
        }
    }

    /// The guest's addresses of a range of the file.
    fn to_guest(&self, in_file: Range) -> Option<Range> {
        let at = in_file.start().checked_sub(self.in_file.start())?;
        let range = Range::new(self.guest.start().checked_add(at)?, in_file.length())?;
        (range.intersection(self.guest) == Some(range)).then_some(range)
    }

    /// Where a range of the guest's addresses is in the file.
    pub fn to_file(&self, range: Range) -> Option<Range> {
        let inside = range.intersection(self.guest)?;
        let at = inside.start().checked_sub(self.guest.start())?;
        Range::new(self.in_file.start().checked_add(at)?, inside.length())
    }

    /// The part of a range of the guest's addresses that consists of whole host pages.
    pub fn whole_pages(&self, range: Range) -> Option<Range> {
        self.to_guest(self.to_file(range)?.whole_blocks(self.host_page)?)
    }

    /// The host pages that a range of the guest's addresses touches; those that belong to the region
    /// entirely.
    pub fn touched_pages(&self, range: Range) -> Option<Range> {
        let touched = self.to_file(range)?;
        let mask = self.host_page.checked_sub(1)?;
        let start = touched.start() & !mask;
        let end = touched.end().checked_add(mask)? & !mask;
        let inside = Range::new(start, end.checked_sub(start)?)?.intersection(self.in_file)?;
        self.to_guest(inside.whole_blocks(self.host_page)?)
    }

    /// Give `range` of the guest's addresses back to the host, as far as it is made of whole host pages.
    ///
    /// Nothing outside of the region is touched.
    pub fn discard(&self, range: Range) -> Outcome {
        self.discard_by(range, |whole| punch(&self.file, whole))
    }

    fn discard_by(&self, range: Range, punch: impl Fn(Range) -> Result<(), Errno>) -> Outcome {
        if let Claim::Unproven(reason) = self.promise() {
            // The VMM may have mapped the file privately, as a template of many guests; others may use it, by a name
            // or by a descriptor.
            return Outcome::kept(reason);
        }
        let Some(inside) = range.intersection(self.guest) else {
            return Outcome::kept(Reason::OutsideMemory);
        };
        let Some(whole) = self.to_file(inside).and_then(|range| range.whole_blocks(self.host_page)) else {
            return Outcome::kept(Reason::PartOfHostPage);
        };
        if let Err(errno) = punch(whole) {
            let errno = Some(errno.raw_os_error());
            return Outcome { claim: Claim::Unproven(Reason::Failed), discarded: 0, errno };
        }
        let claim = if inside != range {
            Claim::Unproven(Reason::OutsideMemory)
        } else if whole.length() != inside.length() {
            Claim::Unproven(Reason::PartOfHostPage)
        } else if self.backing == Backing::Tmpfs && !is_empty(&self.file, whole).unwrap_or(false) {
            // The call succeeds and leaves a part where shmem_undo_range() of Linux cannot swap a page in.
            Claim::Unproven(Reason::Failed)
        } else {
            self.promise()
        };
        Outcome { claim, discarded: whole.length(), errno: None }
    }
}

/// The backing by the magic number of its filesystem, and the unit in which it can be discarded.
fn backing_of(magic: i64, block: u64) -> Option<(Backing, u64)> {
    let block = if block.is_power_of_two() { block } else { 1 };
    // Some architectures sign-extend 32 bits.
    match magic & 0xffff_ffff {
        TMPFS => Some((Backing::Tmpfs, 1)),
        HUGETLBFS => Some((Backing::Hugetlbfs, block)),
        EXT4 => Some((Backing::Ext4, block)),
        XFS => Some((Backing::Xfs, block)),
        _ => None,
    }
}

fn punch(file: impl AsFd, range: Range) -> Result<(), Errno> {
    loop {
        // Nothing else is ever asked of fallocate(2); the sandbox relies on it.
        let done = rustix::fs::fallocate(
            &file,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            range.start(),
            range.length(),
        );
        if done != Err(Errno::INTR) {
            return done;
        }
    }
}

/// Whether the host has neither a page nor swap for a part of a file, or, if it cannot say that, only zeros.
fn is_empty(file: &File, part: Range) -> io::Result<bool> {
    let range = [part.start(), part.length()];
    let mut found = [0_u64; 5];
    // SAFETY: the call reads a struct cachestat_range, which is two numbers, and writes a struct cachestat,
    // which is five.
    let done =
        unsafe { libc::syscall(SYS_CACHESTAT, file.as_raw_fd(), range.as_ptr(), found.as_mut_ptr(), 0_u32) };
    if done == 0 {
        let [cached, _, _, evicted, _] = found;
        return Ok(cached == 0 && evicted == 0);
    }
    // Before Linux 6.5, and where a filter does not know the other call. lseek(2) can wait without an end for
    // locks of the file, which a front end can hold.
    is_zero(file, part)
}

/// Whether a part of a file reads as zero. On hugetlbfs the read of a hole allocates no page.
fn is_zero(file: &File, part: Range) -> io::Result<bool> {
    let mut bytes = [0; 1 << 14];
    let mut at = part.start();
    while at < part.end() {
        let left = usize::try_from(part.end() - at).unwrap_or(usize::MAX).min(bytes.len());
        let read = file.read_at(bytes.get_mut(..left).unwrap_or_default(), at)?;
        if bytes.iter().take(read).any(|byte| *byte != 0) {
            return Ok(false);
        }
        if read == 0 {
            break;
        }
        at = at.saturating_add(u64::try_from(read).unwrap_or(u64::MAX));
    }
    Ok(true)
}

fn page_size() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(PAGE_SIZE)
}

/// Discard private anonymous memory of this process, such as a VMM's that maps its guest that way.
///
/// `page_size` is that of the mapping: 2 MiB, for example, with `MAP_HUGETLB`. Nothing is discarded that is
/// not whole pages: madvise(2) would leave a part of a huge page as it is, and drop all of another page.
///
/// # Safety
///
/// The `length` bytes at `address` are a private anonymous mapping with pages of this size, and only the
/// guest relies on what they hold.
pub unsafe fn discard_anonymous(address: *mut u8, length: usize, page_size: usize) -> Claim {
    if !address.addr().is_multiple_of(page_size) || !length.is_multiple_of(page_size) {
        return Claim::Unproven(Reason::PartOfHostPage);
    }
    // SAFETY: the caller ensures that the mapping exists and that its content may go.
    match unsafe { rustix::mm::madvise(address.cast(), length, rustix::mm::Advice::LinuxDontNeed) } {
        Ok(()) => Claim::Proven(Backing::Anonymous),
        Err(_) => Claim::Unproven(Reason::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filesystems() {
        assert_eq!(backing_of(TMPFS, 4096), Some((Backing::Tmpfs, 1)));
        assert_eq!(backing_of(HUGETLBFS, 2 << 20), Some((Backing::Hugetlbfs, 2 << 20)));
        assert!(backing_of(HUGETLBFS - (1 << 32), 2 << 20).is_some(), "sign-extended");
        assert_eq!(backing_of(EXT4, 1024), Some((Backing::Ext4, 1024)));
        assert_eq!(backing_of(XFS, 4096), Some((Backing::Xfs, 4096)));
        assert_eq!(backing_of(0x6969, 4096), None, "NFS");
        assert_eq!(backing_of(0x794c_7630, 4096), None, "overlayfs");
    }

    /// As the kernel does where a page that is swapped out begins before the hole and cannot be read back.
    #[test]
    fn a_hole_with_data_in_it_is_no_claim() {
        let file = File::from(rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(&[1; 0x4000], 0).unwrap();
        let mut region = Region::new(file, 0, 0, 0x4000).unwrap();
        region.set_known_shared();
        let range = Range::new(0, 0x3000).unwrap();
        let first = Range::new(0, 0x2000).unwrap();
        let outcome = region.discard_by(range, |_| punch(&region.file, first));
        let claim = Claim::Unproven(Reason::Failed);
        assert_eq!(outcome, Outcome { claim, discarded: 0x3000, errno: None });
        assert_eq!(region.discard(range).claim, Claim::Proven(Backing::Tmpfs), "another page follows");
    }

    #[test]
    fn one_byte_proves_that_a_page_exists() {
        let file = File::from(rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(MAX_READ).unwrap();
        let all = Range::new(0, MAX_READ).unwrap();
        assert!(is_zero(&file, all).unwrap());
        file.write_all_at(&[1], MAX_READ - 1).unwrap();
        assert!(!is_zero(&file, all).unwrap());
        assert!(is_zero(&file, Range::new(0, MAX_READ - 1).unwrap()).unwrap());
        assert!(is_zero(&file, Range::new(MAX_READ, MAX_READ).unwrap()).unwrap(), "behind the end");
    }
}
