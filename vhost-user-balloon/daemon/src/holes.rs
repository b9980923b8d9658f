// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What it costs to touch guest memory: a hole in its file becomes memory for which this process is charged.

use std::fs::File;
use std::io;
use std::sync::Arc;

use balloon_discard::{Backing, FileId, Region, is_empty, is_zero};
use balloon_protocol::{PAGE_SIZE, Range};
use rustix::fs::{AtFlags, StatxFlags};

/// How much of a huge page is read to see whether it exists: a read of 1 GiB would take too long.
const MAX_READ: u64 = 2 << 20;

/// The part of a file that a region is.
#[derive(Debug)]
pub struct FilePart {
    pub file: Arc<File>,
    pub id: FileId,
    pub in_file: Range,
    guest: Range,
    is_huge: bool,
    /// How much memory a hole takes when one byte of it is touched.
    pub fault_size: u64,
    /// The device that its filesystem is on.
    pub device: (u32, u32),
    /// Its number among the files that are counted, once it is.
    pub counted: Option<u64>,
}

impl FilePart {
    pub fn new(file: Arc<File>, region: &Region) -> io::Result<Self> {
        let missing = || io::Error::from(io::ErrorKind::InvalidInput);
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(&file, c"", flags, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            id: region.id().ok_or_else(missing)?,
            in_file: region.to_host(region.guest()).ok_or_else(missing)?,
            guest: region.guest(),
            is_huge: region.backing() == Some(Backing::Hugetlbfs),
            fault_size: u64::from(about.stx_blksize).max(page_size()),
            device: (about.stx_dev_major, about.stx_dev_minor),
            counted: None,
            file,
        })
    }

    /// Where a range of the guest's addresses is in the file.
    pub fn to_file(&self, range: Range) -> Option<Range> {
        let inside = range.intersection(self.guest)?;
        let at = inside.start().checked_sub(self.guest.start())?;
        Range::new(self.in_file.start().checked_add(at)?, inside.length())
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
        if self.is_huge {
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
}

fn page_size() -> u64 {
    u64::try_from(rustix::param::page_size()).unwrap_or(PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn r(start: u64, length: u64) -> Range {
        Range::new(start, length).unwrap()
    }

    fn part(file: &File, offset: u64, guest: u64, length: u64) -> FilePart {
        let file = Arc::new(file.try_clone().unwrap());
        FilePart::new(file.clone(), &Region::new(file, offset, guest, length).unwrap()).unwrap()
    }

    #[test]
    fn holes_of_a_file() {
        let file = File::from(rustix::fs::memfd_create(c"test", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(&[1], MIB + 0x2000).unwrap();
        let part = part(&file, MIB, 16 * MIB, MIB);
        assert!(part.fault_size >= page_size());
        assert_eq!(part.to_file(r(0, 200 * MIB)), Some(r(MIB, MIB)));
        assert!(!part.has_hole(r(16 * MIB + 0x2000, 0x1000)), "a page");
        assert!(!part.has_hole(r(16 * MIB + 0x2fff, 1)));
        assert!(part.has_hole(r(16 * MIB + 0x1fff, 2)), "before it");
        assert!(part.has_hole(r(16 * MIB + 0x2fff, 2)), "behind it");
        assert!(part.has_hole(r(16 * MIB + 0x1000, 0x3000)), "around it");
        assert!(part.has_hole(r(17 * MIB - 1, 1)), "up to the end of the file");
        assert!(!part.has_hole(r(17 * MIB, 1)), "outside of it");
        file.set_len(0).unwrap();
        assert!(part.has_hole(r(16 * MIB + 0x2000, 1)), "a file that was truncated");
    }

    #[test]
    fn holes_of_huge_pages() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        // Neither the file nor a read of it needs a page.
        let Ok(file) = rustix::fs::memfd_create(c"test", flags).map(File::from) else { return };
        file.set_len(4 * MIB).unwrap();
        let part = part(&file, 0, 0, 4 * MIB);
        assert_eq!(part.fault_size, 2 * MIB);
        assert!(part.has_hole(r(0, 1)) && part.has_hole(r(4 * MIB - 1, 1)));
    }
}
