// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One mapping of guest memory.

use std::any::Any;
use std::fs::File;
use std::sync::Arc;

use balloon_protocol::{PAGE_SIZE, Range};
use rustix::fs::{AtFlags, FileType, StatxFlags};
use rustix::io::Errno;

use crate::claim::{Backing, Reason};
use crate::error::RegionError;
use crate::file::{backing_of, drop_private, is_empty, page_size, punch};

/// Identifies a file, whatever descriptor it came by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    device: (u32, u32),
    inode: u64,
}

#[derive(Debug)]
enum Source {
    File {
        file: Arc<File>,
        id: FileId,
        has_name: bool,
    },
    /// A private mapping of this process, and what keeps it, if that is known.
    Mapping(#[allow(dead_code, reason = "it is dropped")] Option<Arc<dyn Any + Send + Sync>>),
}

/// A part of guest memory: a part of a file, or a private mapping.
#[derive(Debug)]
pub struct Region {
    source: Source,
    guest: Range,
    /// The bytes of the file, or the addresses of the mapping.
    host: Range,
    /// What it reads as when it was discarded.
    reads_as: Result<Backing, Reason>,
    host_page: u64,
    known_shared: bool,
    aliased: bool,
}

/// What became of a piece of a region.
pub struct Discarded {
    pub bytes: u64,
    pub known: Result<Backing, Reason>,
    pub errno: Option<i32>,
}

impl Discarded {
    const fn kept(reason: Reason) -> Self {
        Self { bytes: 0, known: Err(reason), errno: None }
    }
}

impl Region {
    /// Look at `file`, of which the guest sees `length` bytes from `offset` at address `guest`.
    ///
    /// Never waits for a server behind a filesystem without a block device, such as one of FUSE.
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
        let Some(host) = Range::new(offset, length).filter(|r| i64::try_from(r.end()).is_ok()) else {
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
        // Only memory has seals, and only a filesystem on a block device has a major number.
        // statfs(2) can wait for the server of any other. It can also wait for one of FUSE on a
        // block device (fuseblk), which only root can mount.
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
        if backing == Backing::Hugetlbfs && !host.is_aligned(block) {
            return Err(extent);
        }
        if host.end() > about.stx_size {
            return Err(RegionError::PastEnd { guest, end: host.end(), size: about.stx_size });
        }
        let id = FileId { device: (about.stx_dev_major, about.stx_dev_minor), inode: about.stx_ino };
        let source = Source::File { file, id, has_name: about.stx_nlink != 0 };
        let host_page = block.max(page_size());
        let reads_as = Ok(backing);
        Ok(Self { source, guest: range, host, reads_as, host_page, known_shared: false, aliased: false })
    }

    /// A private anonymous mapping of this process: `length` bytes at `address`, which the guest sees at `guest`.
    ///
    /// `page_size` is that of the mapping: 2 MiB, for example, with `MAP_HUGETLB`.
    ///
    /// # Safety
    ///
    /// As long as a [`Regions`](crate::Regions) has the region, these bytes are a private anonymous mapping with pages
    /// of this size, and only the guest relies on what they hold.
    ///
    /// # Errors
    ///
    /// The mapping is empty or not made of such pages.
    pub unsafe fn anonymous(
        address: *mut u8,
        length: u64,
        guest: u64,
        page_size: u64,
    ) -> Result<Self, RegionError> {
        Self::mapping(address, length, guest, page_size, Ok(Backing::Anonymous), None)
    }

    /// A private mapping of a file, as of a snapshot that is restored: what is discarded reads as the file again, so
    /// nothing is claimed of it. The parameters are those of [`Region::anonymous`].
    ///
    /// # Safety
    ///
    /// As long as a [`Regions`](crate::Regions) has the region, these bytes are a private mapping with pages of this
    /// size, and only the guest relies on what they hold.
    ///
    /// # Errors
    ///
    /// The mapping is empty or not made of such pages.
    pub unsafe fn private_file(
        address: *mut u8,
        length: u64,
        guest: u64,
        page_size: u64,
    ) -> Result<Self, RegionError> {
        Self::mapping(address, length, guest, page_size, Err(Reason::PrivateFile), None)
    }

    /// A private mapping of this process, which exists as long as the region does.
    pub(crate) fn mapping(
        address: *mut u8,
        length: u64,
        guest: u64,
        page_size: u64,
        reads_as: Result<Backing, Reason>,
        keeps: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, RegionError> {
        let offset = u64::try_from(address.expose_provenance()).unwrap_or(u64::MAX);
        let extent = RegionError::Extent { guest, length, offset };
        let host =
            Range::new(offset, length).filter(|r| page_size.is_power_of_two() && r.is_aligned(page_size));
        let range = Range::new(guest, length).filter(|r| r.start().is_multiple_of(PAGE_SIZE));
        let (Some(host), Some(guest)) = (host, range) else { return Err(extent) };
        Ok(Self {
            source: Source::Mapping(keeps),
            guest,
            host,
            reads_as,
            host_page: page_size,
            known_shared: true,
            aliased: false,
        })
    }

    /// The guest's addresses.
    #[must_use]
    pub fn guest(&self) -> Range {
        self.guest
    }

    /// Which file it is, if it is one.
    #[must_use]
    pub fn id(&self) -> Option<FileId> {
        match &self.source {
            Source::File { id, .. } => Some(*id),
            Source::Mapping(_) => None,
        }
    }

    /// What it is made of, if that reads as zero when it was discarded.
    #[must_use]
    pub fn backing(&self) -> Option<Backing> {
        self.reads_as.ok()
    }

    /// The size of what can be discarded at once, a power of two.
    #[must_use]
    pub fn host_page(&self) -> u64 {
        self.host_page
    }

    /// Whether the guest is known to see this very file.
    #[must_use]
    pub fn known_shared(&self) -> bool {
        self.known_shared
    }

    /// Whether the file had a name when it was looked at: then others may use it as well.
    #[must_use]
    pub fn has_name(&self) -> bool {
        matches!(self.source, Source::File { has_name: true, .. })
    }

    /// The guest is known to see this file itself and not a private copy: the operator states it, or the file
    /// has no name and something that the guest wrote was seen to arrive in it.
    ///
    /// Nothing that a guest does may be taken for proof where the file has a name: it would choose which
    /// of the files of its VMM, templates of other guests among them, are punched.
    /// [`Regions::seen_to_share`](crate::Regions::seen_to_share) keeps to that.
    pub fn set_known_shared(&mut self) {
        self.known_shared = true;
    }

    /// Whether the guest sees a byte of the host's memory in both regions.
    pub(crate) fn is_alias_of(&self, other: &Self) -> bool {
        self.id() == other.id() && self.host.overlaps(other.host)
    }

    pub(crate) fn set_aliased(&mut self, aliased: bool) {
        self.aliased = aliased;
    }

    /// Discard in units of `size` at least: where the host has huge pages in a file on tmpfs,
    /// taking a small page out of one breaks it up.
    ///
    /// # Errors
    ///
    /// `size` is not a power of two; nothing has changed.
    pub fn coarsen(&mut self, size: u64) -> Result<(), RegionError> {
        if !size.is_power_of_two() {
            return Err(RegionError::Unit { guest: self.guest.start(), size });
        }
        self.host_page = self.host_page.max(size);
        Ok(())
    }

    /// What the region's memory would read as if it were discarded.
    ///
    /// # Errors
    ///
    /// The reason why nothing is claimed of it.
    pub fn promise(&self) -> Result<Backing, Reason> {
        self.kept().map_or(self.reads_as, Err)
    }

    /// Why it is never discarded, if so.
    fn kept(&self) -> Option<Reason> {
        if self.aliased {
            Some(Reason::Aliased)
        } else if self.known_shared {
            None
        } else {
            Some(Reason::NotKnownShared)
        }
    }

    /// The guest's addresses of a range of the host's.
    fn to_guest(&self, host: Range) -> Option<Range> {
        let at = host.start().checked_sub(self.host.start())?;
        let range = Range::new(self.guest.start().checked_add(at)?, host.length())?;
        (range.intersection(self.guest) == Some(range)).then_some(range)
    }

    /// Where a range of the guest's addresses is in the host's file or mapping.
    #[must_use]
    pub fn to_host(&self, range: Range) -> Option<Range> {
        let inside = range.intersection(self.guest)?;
        let at = inside.start().checked_sub(self.guest.start())?;
        Range::new(self.host.start().checked_add(at)?, inside.length())
    }

    /// The part of a range of the guest's addresses that consists of whole host pages.
    #[must_use]
    pub fn whole_pages(&self, range: Range) -> Option<Range> {
        self.to_guest(self.to_host(range)?.whole_blocks(self.host_page)?)
    }

    /// The host pages that a range of the guest's addresses touches; those that belong to the region
    /// entirely.
    #[must_use]
    pub fn touched_pages(&self, range: Range) -> Option<Range> {
        let touched = self.to_host(range)?;
        let mask = self.host_page.checked_sub(1)?;
        let start = touched.start() & !mask;
        let end = touched.end().checked_add(mask)? & !mask;
        let inside = Range::new(start, end.checked_sub(start)?)?.intersection(self.host)?;
        self.to_guest(inside.whole_blocks(self.host_page)?)
    }

    /// Give a piece of the region back to the host, as far as it is made of whole host pages.
    pub(crate) fn discard(&self, piece: Range) -> Discarded {
        self.discard_by(piece, |whole| match &self.source {
            Source::File { file, .. } => punch(file, whole),
            Source::Mapping(_) => drop_private(whole),
        })
    }

    fn discard_by(&self, piece: Range, give: impl Fn(Range) -> Result<(), Errno>) -> Discarded {
        if let Some(reason) = self.kept() {
            // The VMM may have mapped the file privately, as a template of many guests; others may use it, by a name
            // or by a descriptor.
            return Discarded::kept(reason);
        }
        let Some(inside) = self.to_host(piece) else { return Discarded::kept(Reason::OutsideMemory) };
        let Some(whole) = inside.whole_blocks(self.host_page) else {
            return Discarded::kept(Reason::PartOfHostPage);
        };
        if let Err(errno) = give(whole) {
            let errno = Some(errno.raw_os_error());
            return Discarded { bytes: 0, known: Err(Reason::Failed), errno };
        }
        let known = if whole.length() != inside.length() {
            Err(Reason::PartOfHostPage)
        } else if !self.is_gone(whole) {
            // The call succeeds and leaves a part where shmem_undo_range() of Linux cannot swap a page in.
            Err(Reason::Failed)
        } else {
            self.promise()
        };
        Discarded { bytes: whole.length(), known, errno: None }
    }

    /// Whether a successful call has left nothing.
    fn is_gone(&self, whole: Range) -> bool {
        match &self.source {
            Source::File { file, .. } if self.reads_as == Ok(Backing::Tmpfs) => {
                is_empty(file, whole).unwrap_or(false)
            }
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Four pages of shared memory, each written.
    fn written_pages() -> (File, Region) {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create(c"test", flags).unwrap());
        file.write_all_at(&[1; 0x4000], 0).unwrap();
        let mut region = Region::new(file.try_clone().unwrap(), 0, 0, 0x4000).unwrap();
        region.set_known_shared();
        (file, region)
    }

    /// As the kernel does where a page that is swapped out begins before the hole and cannot be read
    /// back.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create(2)")]
    fn a_hole_with_data_in_it_is_no_claim() {
        let (file, region) = written_pages();
        let range = Range::new(0, 0x3000).unwrap();
        let first = Range::new(0, 0x2000).unwrap();
        let done = region.discard_by(range, |_| punch(&file, first));
        assert_eq!((done.bytes, done.known, done.errno), (0x3000, Err(Reason::Failed), None));
        assert_eq!(region.discard(range).known, Ok(Backing::Tmpfs), "another page follows");
    }

    /// A read of the hole puts a page of zeros into the cache of a disk.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create(2)")]
    fn a_page_in_the_cache_of_a_disk_is_no_doubt() {
        let (file, mut region) = written_pages();
        let range = Range::new(0, 0x3000).unwrap();
        let punch_and_read = |whole| {
            punch(&file, whole)?;
            file.write_all_at(&[0], 0).map_err(|_| Errno::IO)
        };
        let in_memory = region.discard_by(range, punch_and_read);
        assert_eq!(in_memory.known, Err(Reason::Failed));
        region.reads_as = Ok(Backing::Ext4);
        let on_disk = region.discard_by(range, punch_and_read);
        assert_eq!(on_disk.known, Ok(Backing::Ext4));
    }
}
