// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files that guest memory is in.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use balloon_protocol::Range;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::claim::Backing;

const TMPFS: i64 = 0x0102_1994;
const HUGETLBFS: i64 = 0x9584_58f6;
const EXT4: i64 = 0xef53;
const XFS: i64 = 0x5846_5342;

/// The number of cachestat(2), the same on every architecture that a VMM runs on; a sandbox has to allow it.
pub const SYS_CACHESTAT: libc::c_long = 451;

/// The backing by the magic number of its filesystem, and the unit in which it can be discarded.
pub fn backing_of(magic: i64, block: u64) -> Option<(Backing, u64)> {
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

pub fn punch(file: impl AsFd, range: Range) -> Result<(), Errno> {
    loop {
        // Nothing else is ever asked of fallocate(2); a sandbox can rely on it.
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
///
/// # Errors
///
/// The file cannot be asked, nor read.
pub fn is_empty(file: &File, part: Range) -> io::Result<bool> {
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
///
/// # Errors
///
/// The file cannot be read.
pub fn is_zero(file: &File, part: Range) -> io::Result<bool> {
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

/// Drop the pages of a private mapping.
pub fn drop_private(whole: Range) -> Result<(), Errno> {
    let address = usize::try_from(whole.start()).map_err(|_| Errno::OVERFLOW)?;
    let length = usize::try_from(whole.length()).map_err(|_| Errno::OVERFLOW)?;
    let address = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: whole pages of a private mapping, which exists and whose content may go: the caller of
    // Region::anonymous() or Region::private_file() has promised it, or the region keeps it.
    unsafe { rustix::mm::madvise(address, length, rustix::mm::Advice::LinuxDontNeed) }
}

/// The size of a page of this host.
pub fn page_size() -> u64 {
    // The first call of rustix's page_size() is one of prctl(2), which a VMM's filter may kill.
    // SAFETY: it takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(balloon_protocol::PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u64 = 2 << 20;

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

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memfd_create(2)")]
    fn one_byte_proves_that_a_page_exists() {
        let file = File::from(rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        file.set_len(LENGTH).unwrap();
        let all = Range::new(0, LENGTH).unwrap();
        assert!(is_zero(&file, all).unwrap() && is_empty(&file, all).unwrap());
        file.write_all_at(&[1], LENGTH - 1).unwrap();
        assert!(!is_zero(&file, all).unwrap() && !is_empty(&file, all).unwrap());
        assert!(is_zero(&file, Range::new(0, LENGTH - 1).unwrap()).unwrap());
        assert!(is_zero(&file, Range::new(LENGTH, LENGTH).unwrap()).unwrap(), "behind the end");
        // A page of zeros is not nothing.
        file.write_all_at(&[0], LENGTH - 1).unwrap();
        assert!(is_zero(&file, all).unwrap() && !is_empty(&file, all).unwrap());
    }
}
