// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives a guest's memory back to the host, and knows whether it then reads as zero.
//!
//! "The call succeeded" is not "it reads as zero". A hole punched into a file on a filesystem whose
//! holes are known to read as zero does, provided that the guest sees the file and not a private copy
//! of it. `MADV_DONTNEED` does on private anonymous memory only: on a shared or file mapping it drops
//! nothing, or brings the file's content back. So:
//!
//! | what is behind the memory | how it is discarded | claimed to be zero |
//! |---|---|---|
//! | tmpfs, memfd | hole punched with fallocate(2) | if known to be shared |
//! | hugetlbfs, memfd with huge pages | the same, in whole huge pages | if known to be shared |
//! | ext4, XFS | the same | if known to be shared |
//! | any other file | the same, where that works | never |
//! | a file with a name, not known to be shared | not at all: others may use the file | never |
//! | a device | not at all | never |
//! | private anonymous memory of the VMM ([`discard_anonymous`]) | madvise(2) | yes |
//!
//! What cannot be seen from here:
//!
//! - A VMM that serves page faults of the guest itself, with userfaultfd(2), puts what it likes where a
//!   hole was punched. With such a VMM nothing must be claimed at all.
//! - A VMM that has pinned guest memory for long, as it does to pass a device through (VFIO), or whose
//!   memory is registered for RDMA or io_uring. A hole drops the page from the file, while the IOMMU still
//!   maps the old one: the device then reads and writes a page that the guest no longer sees, and the host
//!   does not get it back either. With such a VMM nothing must be discarded at all.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use balloon_protocol::{Backing, Claim, HostPage, Range, Reason};
use rustix::fs::{FallocateFlags, FileType, SealFlags};
use rustix::io::Errno;
use thiserror::Error;

const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;

/// Memory that cannot be a region of the guest.
#[derive(Debug, Error)]
pub enum RegionError {
    /// Nothing is known of the descriptor.
    #[error("cannot look at the descriptor of the region at {guest:#x}: {source}")]
    Stat {
        /// Where the region begins in the guest.
        guest: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// Touching its end would be a SIGBUS.
    #[error("the region at {guest:#x} ends at byte {end:#x} of a file that has {size:#x}")]
    PastEnd {
        /// Where the region begins in the guest.
        guest: u64,
        /// Where it ends in the file.
        end: u64,
        /// The size of the file.
        size: u64,
    },
    /// It passes the end of the address space, of the file's offsets, or is empty.
    #[error("the region at {guest:#x} cannot have {length:#x} bytes from byte {offset:#x} of a file")]
    Extent {
        /// Where the region begins in the guest.
        guest: u64,
        /// Its length.
        length: u64,
        /// Where it begins in the file.
        offset: u64,
    },
    /// No file of bytes and no device that can be mapped.
    #[error("the region at {guest:#x} is neither a file nor a device")]
    Kind {
        /// Where the region begins in the guest.
        guest: u64,
    },
}

/// What became of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Whether all of it reads as zero now.
    pub claim: Claim,
    /// How many bytes went back to the host.
    pub discarded: u64,
    /// What the call that failed said.
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
    device: u64,
    inode: u64,
}

/// A part of guest memory: a part of a file.
#[derive(Debug)]
pub struct Region {
    file: File,
    offset: u64,
    guest: Range,
    id: FileId,
    backing: Option<Backing>,
    is_file: bool,
    has_name: bool,
    cannot_shrink: bool,
    host_page: u64,
    known_shared: bool,
}

impl Region {
    /// Look at `file`, of which the guest sees `length` bytes from `offset` at address `guest`.
    ///
    /// # Errors
    ///
    /// The file does not have that many bytes, or is not a thing that can be memory.
    pub fn new(file: File, offset: u64, guest: u64, length: u64) -> Result<Self, RegionError> {
        let extent = RegionError::Extent { guest, length, offset };
        let stat = |source: Errno| RegionError::Stat { guest, source: source.into() };
        let Some(range) = Range::new(guest, length) else { return Err(extent) };
        let Some(in_file) = Range::new(offset, length).filter(|r| i64::try_from(r.end()).is_ok()) else {
            return Err(extent);
        };
        let about = rustix::fs::fstat(&file).map_err(stat)?;
        let is_file = match FileType::from_raw_mode(about.st_mode) {
            FileType::RegularFile => true,
            FileType::CharacterDevice | FileType::BlockDevice => false,
            _ => return Err(RegionError::Kind { guest }),
        };
        let size = u64::try_from(about.st_size).unwrap_or(0);
        if is_file && in_file.end() > size {
            return Err(RegionError::PastEnd { guest, end: in_file.end(), size });
        }
        let filesystem = rustix::fs::fstatfs(&file).map_err(stat)?;
        // The types of these fields are not the same on every architecture.
        #[allow(clippy::useless_conversion)]
        let (backing, block) = backing_of(
            i64::try_from(filesystem.f_type).unwrap_or(0),
            u64::try_from(filesystem.f_bsize).unwrap_or(0),
        );
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        Ok(Self {
            offset,
            guest: range,
            id: FileId { device: about.st_dev, inode: about.st_ino },
            backing: if is_file { backing } else { None },
            is_file,
            has_name: about.st_nlink != 0,
            cannot_shrink: seals.contains(SealFlags::SHRINK),
            host_page: block.max(u64::try_from(rustix::param::page_size()).unwrap_or(4096)),
            known_shared: false,
            file,
        })
    }

    /// The file itself.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where the region begins in the file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The guest's addresses.
    pub fn guest(&self) -> Range {
        self.guest
    }

    /// Which file it is.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// What is known to be behind it.
    pub fn backing(&self) -> Option<Backing> {
        self.backing
    }

    /// The size of what can be discarded at once, a power of two.
    pub fn host_page(&self) -> u64 {
        self.host_page
    }

    /// Whether the file is sealed against shrinking, so that touching it cannot be a SIGBUS.
    pub fn cannot_shrink(&self) -> bool {
        self.cannot_shrink
    }

    /// Whether the guest is known to see this very file.
    pub fn known_shared(&self) -> bool {
        self.known_shared
    }

    /// Whether the file had a name when it was looked at: then others may use it as well.
    pub fn has_name(&self) -> bool {
        self.has_name
    }

    /// It is known that the guest sees this file itself and not a private copy: whoever runs the VMM
    /// vouches for it, or the file has no name and something that the guest wrote was seen to arrive in it.
    ///
    /// Nothing that a guest does may be taken for proof where the file has a name: it would choose which
    /// of the files of its VMM, templates of other guests among them, are punched.
    pub fn set_known_shared(&mut self) {
        self.known_shared = true;
    }

    /// Discard in units of `size` at least, a power of two: where the host has huge pages in a file on
    /// tmpfs, taking a small page out of one breaks it up.
    pub fn coarsen(&mut self, size: u64) {
        if size.is_power_of_two() {
            self.host_page = self.host_page.max(size);
        }
    }

    /// Whether discarding can do anything at all here, and what the memory reads as afterwards.
    pub fn promise(&self) -> Claim {
        match self.backing {
            None => Claim::Unproven(Reason::UnknownBacking),
            Some(_) if !self.known_shared => Claim::Unproven(Reason::NotKnownShared),
            Some(backing) => Claim::Proven(backing),
        }
    }

    /// The host page that holds the balloon page at guest address `address`, the number of the page in
    /// it, and how many it has. `None` if the address is not in the region or its pages are not those
    /// of the file.
    pub fn host_page_of(&self, region: usize, address: u64) -> Option<(HostPage, u32, u32)> {
        let at = self.offset.checked_add(address.checked_sub(self.guest.start())?)?;
        if address >= self.guest.end() || !at.is_multiple_of(balloon_protocol::PAGE_SIZE) {
            return None;
        }
        let part = u32::try_from(at.checked_rem(self.host_page)? / balloon_protocol::PAGE_SIZE).ok()?;
        let parts = u32::try_from(self.host_page / balloon_protocol::PAGE_SIZE).ok()?;
        Some((HostPage { region, index: at.checked_div(self.host_page)? }, part, parts))
    }

    /// The guest's addresses of a host page, if all of it belongs to the region.
    pub fn range_of(&self, page: HostPage) -> Option<Range> {
        let at = page.index.checked_mul(self.host_page)?.checked_sub(self.offset)?;
        let range = Range::new(self.guest.start().checked_add(at)?, self.host_page)?;
        (range.intersection(self.guest) == Some(range)).then_some(range)
    }

    /// Give `range` of the guest's addresses back to the host, as far as it is made of whole host pages.
    ///
    /// Nothing outside of the region is touched.
    pub fn discard(&self, range: Range) -> Outcome {
        let Some(inside) = range.intersection(self.guest) else {
            return Outcome::kept(Reason::OutsideMemory);
        };
        if !self.is_file {
            return Outcome::kept(Reason::UnknownBacking);
        }
        if self.has_name && !self.known_shared {
            // The VMM may have mapped it privately, as a template of many guests.
            return Outcome::kept(Reason::NotKnownShared);
        }
        let at = inside.start().saturating_sub(self.guest.start()).saturating_add(self.offset);
        let Some(in_file) = Range::new(at, inside.length()) else {
            return Outcome::kept(Reason::OutsideMemory);
        };
        let Some(whole) = in_file.whole_blocks(self.host_page) else {
            return Outcome::kept(Reason::PartOfHostPage);
        };
        if let Err(errno) = punch(&self.file, whole) {
            return Outcome {
                claim: Claim::Unproven(Reason::Failed),
                discarded: 0,
                errno: Some(errno.raw_os_error()),
            };
        }
        let claim = if inside != range {
            Claim::Unproven(Reason::OutsideMemory)
        } else if whole != in_file {
            Claim::Unproven(Reason::PartOfHostPage)
        } else {
            self.promise()
        };
        Outcome { claim, discarded: whole.length(), errno: None }
    }
}

/// The backing by the magic number of its filesystem, and the unit in which it can be discarded.
fn backing_of(magic: i64, block: u64) -> (Option<Backing>, u64) {
    let block = if block.is_power_of_two() { block } else { 1 };
    // Some architectures sign-extend 32 bits.
    match magic & 0xffff_ffff {
        TMPFS => (Some(Backing::Tmpfs), 1),
        HUGETLBFS => (Some(Backing::Hugetlbfs), block),
        EXT4 => (Some(Backing::Ext4), block),
        XFS => (Some(Backing::Xfs), block),
        _ => (None, block),
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

/// Discard private anonymous memory of this process, such as a VMM's that maps its guest that way.
///
/// # Safety
///
/// The `length` bytes at `address` are a private anonymous mapping, and nothing but the guest relies on
/// what they hold.
pub unsafe fn discard_anonymous(address: *mut u8, length: usize) -> Claim {
    // SAFETY: the caller vouches that the mapping exists and that its content may go.
    match unsafe { rustix::mm::madvise(address.cast(), length, rustix::mm::Advice::LinuxDontNeed) } {
        Ok(()) => Claim::Proven(Backing::Anonymous),
        Err(_) => Claim::Unproven(Reason::Failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::io::Write;
    use std::os::unix::fs::{FileExt, MetadataExt};

    const MIB: u64 = 1 << 20;

    fn memfd(size: u64) -> File {
        let file = File::from(
            rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap(),
        );
        file.set_len(size).unwrap();
        file
    }

    fn filled(size: u64) -> File {
        let mut file = memfd(0);
        file.write_all(&vec![0x5a; usize::try_from(size).unwrap()]).unwrap();
        file
    }

    fn byte(file: &File, at: u64) -> u8 {
        let mut one = [0];
        file.read_exact_at(&mut one, at).unwrap();
        one[0]
    }

    fn r(start: u64, length: u64) -> Range {
        Range::new(start, length).unwrap()
    }

    fn shared(file: File, offset: u64, guest: u64, length: u64) -> Region {
        let mut region = Region::new(file, offset, guest, length).unwrap();
        region.set_known_shared();
        region
    }

    #[test]
    fn a_memfd_gives_memory_back_and_reads_as_zero() {
        let file = filled(4 * MIB);
        let blocks = file.metadata().unwrap().blocks();
        let region = shared(file.try_clone().unwrap(), MIB, 16 * MIB, 2 * MIB);
        let outcome = region.discard(r(16 * MIB + 0x1000, MIB));
        assert_eq!(outcome, Outcome { claim: Claim::Proven(Backing::Tmpfs), discarded: MIB, errno: None });
        assert!(file.metadata().unwrap().blocks() < blocks);
        assert_eq!(byte(&file, MIB + 0xfff), 0x5a, "before it");
        assert_eq!(byte(&file, MIB + 0x1000), 0);
        assert_eq!(byte(&file, 2 * MIB + 0xfff), 0);
        assert_eq!(byte(&file, 2 * MIB + 0x1000), 0x5a, "behind it");
    }

    #[test]
    fn nothing_outside_of_the_region_is_touched() {
        let file = filled(4 * MIB);
        let region = shared(file.try_clone().unwrap(), MIB, 0, MIB);
        let outcome = region.discard(r(MIB - 0x1000, 2 * MIB));
        assert_eq!(outcome.claim, Claim::Unproven(Reason::OutsideMemory));
        assert_eq!(outcome.discarded, 0x1000);
        assert_eq!(byte(&file, 2 * MIB), 0x5a);
        assert_eq!(region.discard(r(MIB, MIB)).claim, Claim::Unproven(Reason::OutsideMemory));
        assert_eq!(byte(&file, 2 * MIB), 0x5a);
    }

    #[test]
    fn a_part_of_a_page_is_not_discarded() {
        let file = filled(MIB);
        let region = shared(file.try_clone().unwrap(), 0, 0, MIB);
        assert_eq!(region.discard(r(0x10, 0x100)), Outcome::kept(Reason::PartOfHostPage));
        let outcome = region.discard(r(0x10, 0x2000));
        assert_eq!((outcome.claim, outcome.discarded), (Claim::Unproven(Reason::PartOfHostPage), 0x1000));
        assert_eq!((byte(&file, 0x20), byte(&file, 0x1000), byte(&file, 0x2008)), (0x5a, 0, 0x5a));
    }

    #[test]
    fn without_proof_of_sharing_nothing_is_claimed() {
        let region = Region::new(filled(MIB), 0, 0, MIB).unwrap();
        let outcome = region.discard(r(0, MIB));
        assert_eq!((outcome.claim, outcome.discarded), (Claim::Unproven(Reason::NotKnownShared), MIB));
    }

    #[test]
    fn a_named_file_that_may_be_a_template_is_left_alone() {
        let mut named = tempfile::NamedTempFile::new().unwrap();
        named.write_all(&[0x5a; 8192]).unwrap();
        let mut region = Region::new(named.reopen().unwrap(), 0, 0, 8192).unwrap();
        assert_eq!(region.discard(r(0, 8192)), Outcome::kept(Reason::NotKnownShared));
        assert_eq!(byte(named.as_file(), 0), 0x5a);
        region.set_known_shared();
        let outcome = region.discard(r(0, 8192));
        // Whether it is claimed depends on where temporary files are; it must agree with the content.
        if outcome.claim.is_proven() {
            assert_eq!(byte(named.as_file(), 0), 0);
        } else {
            assert_eq!(region.backing(), None);
        }
    }

    #[test]
    fn a_region_past_the_end_is_refused() {
        let refused = Region::new(memfd(MIB), 0, 0, MIB + 1);
        assert!(matches!(refused, Err(RegionError::PastEnd { size: MIB, .. })), "{refused:?}");
        assert!(matches!(Region::new(memfd(MIB), u64::MAX, 0, MIB), Err(RegionError::Extent { .. })));
        assert!(matches!(Region::new(memfd(MIB), 0, u64::MAX, MIB), Err(RegionError::Extent { .. })));
        assert!(matches!(Region::new(memfd(MIB), 0, 0, 0), Err(RegionError::Extent { .. })));
        assert!(matches!(Region::new(memfd(MIB), 1 << 63, 0, MIB), Err(RegionError::Extent { .. })));
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert!(matches!(Region::new(File::from(pipe), 0, 0, 4096), Err(RegionError::Kind { .. })));
        let folder = File::open("/").unwrap();
        assert!(matches!(Region::new(folder, 0, 0, 4096), Err(RegionError::Kind { .. })));
    }

    #[test]
    fn a_device_is_never_discarded() {
        let mut region = Region::new(File::open("/dev/zero").unwrap(), 0, 0, MIB).unwrap();
        region.set_known_shared();
        assert_eq!(region.discard(r(0, MIB)), Outcome::kept(Reason::UnknownBacking));
    }

    #[test]
    fn a_call_that_fails_is_no_claim() {
        let file = filled(MIB);
        rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
        let outcome = shared(file, 0, 0, MIB).discard(r(0, MIB));
        assert_eq!(outcome.claim, Claim::Unproven(Reason::Failed));
        assert_eq!((outcome.discarded, outcome.errno), (0, Some(Errno::PERM.raw_os_error())));
    }

    #[test]
    fn seals_are_seen() {
        let file = memfd(MIB);
        assert!(!Region::new(file.try_clone().unwrap(), 0, 0, MIB).unwrap().cannot_shrink());
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        assert!(Region::new(file, 0, 0, MIB).unwrap().cannot_shrink());
    }

    #[test]
    fn filesystems() {
        assert_eq!(backing_of(TMPFS, 4096), (Some(Backing::Tmpfs), 1));
        assert_eq!(backing_of(HUGETLBFS, 2 * MIB), (Some(Backing::Hugetlbfs), 2 * MIB));
        assert_eq!(backing_of(HUGETLBFS - (1 << 32), 2 * MIB).0, Some(Backing::Hugetlbfs), "sign-extended");
        assert_eq!(backing_of(EXT4, 1024).0, Some(Backing::Ext4));
        assert_eq!(backing_of(0x6969, 4096).0, None, "NFS");
        assert_eq!(backing_of(0x794c_7630, 4096).0, None, "overlayfs");
    }

    /// Needs no huge pages: only where things are is computed.
    #[test]
    fn host_pages_are_those_of_the_file() {
        let mut region = Region::new(memfd(8 * MIB), MIB, 100 * MIB, 7 * MIB).unwrap();
        region.coarsen(2 * MIB);
        region.coarsen(3);
        region.coarsen(4096);
        // The file's first huge page begins before the region.
        let (page, part, parts) = region.host_page_of(4, 100 * MIB).unwrap();
        assert_eq!((page, part, parts), (HostPage { region: 4, index: 0 }, 256, 512));
        assert_eq!(region.range_of(page), None);
        let (page, part, _) = region.host_page_of(4, 101 * MIB + 0x1fff).map_or_else(
            || region.host_page_of(4, 101 * MIB + 0x1000).unwrap(),
            |_| panic!("no page begins there"),
        );
        assert_eq!((page.index, part), (1, 1));
        assert_eq!(region.range_of(page), Some(r(101 * MIB, 2 * MIB)));
        assert_eq!(region.host_page_of(4, 107 * MIB), None);
        assert_eq!(region.host_page_of(4, 0), None);
        assert_eq!(region.range_of(HostPage { region: 4, index: u64::MAX }), None);
    }

    #[test]
    fn anonymous_memory() {
        let length = 1 << 20;
        // SAFETY: a new mapping, where the kernel chooses.
        let mapped = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                length,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }
        .unwrap()
        .cast::<u8>();
        // SAFETY: within the mapping.
        unsafe { mapped.write(7) };
        // SAFETY: it is private, anonymous, and ours.
        assert_eq!(unsafe { discard_anonymous(mapped, length) }, Claim::Proven(Backing::Anonymous));
        // SAFETY: within the mapping.
        assert_eq!(unsafe { mapped.read() }, 0);
        // SAFETY: nothing refers to it any more.
        unsafe { rustix::mm::munmap(mapped.cast(), length) }.unwrap();
    }
}
