// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Regions and what discarding makes of them.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use balloon_discard::{Outcome, Region, RegionError, discard_anonymous};
use balloon_protocol::{Backing, Claim, Range, Reason};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::fs::File;
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

fn kept(reason: Reason) -> Outcome {
    Outcome { claim: Claim::Unproven(reason), discarded: 0, errno: None }
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
    assert_eq!(region.discard(r(0x10, 0x100)), kept(Reason::PartOfHostPage));
    let outcome = region.discard(r(0x10, 0x2000));
    assert_eq!((outcome.claim, outcome.discarded), (Claim::Unproven(Reason::PartOfHostPage), 0x1000));
    assert_eq!((byte(&file, 0x20), byte(&file, 0x1000), byte(&file, 0x2008)), (0x5a, 0, 0x5a));
}

#[test]
fn without_proof_of_sharing_nothing_is_discarded() {
    let file = filled(MIB);
    let region = Region::new(file.try_clone().unwrap(), 0, 0, MIB).unwrap();
    assert!(!region.has_name() && !region.known_shared());
    assert_eq!(region.discard(r(0, MIB)), kept(Reason::NotKnownShared));
    assert_eq!(byte(&file, 0), 0x5a);
}

#[test]
fn a_named_file_that_may_be_a_template_is_left_alone() {
    let mut named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    named.write_all(&[0x5a; 8192]).unwrap();
    let mut region = Region::new(named.reopen().unwrap(), 0, 0, 8192).unwrap();
    assert!(region.has_name() && !region.known_shared());
    assert_eq!(region.discard(r(0, 8192)), kept(Reason::NotKnownShared));
    assert_eq!(byte(named.as_file(), 0), 0x5a);
    region.set_known_shared();
    assert!(region.known_shared());
    let outcome = region.discard(r(0, 8192));
    assert_eq!((outcome.claim, byte(named.as_file(), 0)), (Claim::Proven(Backing::Tmpfs), 0));
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
    for (path, file) in [("/", false), ("/dev/zero", false), ("/proc/version", true)] {
        let refused = Region::new(File::open(path).unwrap(), 0, 0, 4096);
        assert_eq!(matches!(refused, Err(RegionError::Kind { .. })), !file, "{path}: {refused:?}");
        assert_eq!(matches!(refused, Err(RegionError::Filesystem { .. })), file, "{path}: {refused:?}");
    }
    assert!(matches!(Region::new(memfd(MIB), 0, 1, 4096), Err(RegionError::Extent { .. })));
}

#[test]
fn what_is_seen_twice_is_kept() {
    let file = filled(4 * MIB);
    let mut one = shared(file.try_clone().unwrap(), 0, 0, 2 * MIB);
    let two = shared(file.try_clone().unwrap(), 2 * MIB - 4096, 8 * MIB, MIB);
    let three = shared(file.try_clone().unwrap(), 2 * MIB, 16 * MIB, MIB);
    assert!(one.is_alias_of(&two) && two.is_alias_of(&one));
    assert!(!one.is_alias_of(&three) && !one.is_alias_of(&shared(filled(MIB), 0, 0, MIB)));
    one.set_aliased(true);
    assert_eq!(one.discard(r(0, MIB)), kept(Reason::Aliased));
    assert_eq!(byte(&file, 0), 0x5a);
    one.set_aliased(false);
    assert!(one.discard(r(0, MIB)).claim.is_proven());
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
fn holes_of_a_file() {
    let file = memfd(4 * MIB);
    file.write_all_at(&[1], MIB + 0x2000).unwrap();
    let region = Region::new(file.try_clone().unwrap(), MIB, 16 * MIB, MIB).unwrap();
    assert!(!region.has_hole(r(16 * MIB + 0x2000, 0x1000)), "a page");
    assert!(!region.has_hole(r(16 * MIB + 0x2fff, 1)));
    assert!(region.has_hole(r(16 * MIB + 0x1fff, 2)), "before it");
    assert!(region.has_hole(r(16 * MIB + 0x2fff, 2)), "behind it");
    assert!(region.has_hole(r(16 * MIB + 0x1000, 0x3000)), "around it");
    assert!(region.has_hole(r(17 * MIB - 1, 1)), "up to the end of the file");
    assert!(!region.has_hole(r(17 * MIB, 1)), "outside of it");
    file.set_len(0).unwrap();
    assert!(region.has_hole(r(16 * MIB + 0x2000, 1)), "a file that was truncated");
}

#[test]
fn holes_of_huge_pages() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    // Neither the file nor a read of it needs a page.
    let Ok(file) = rustix::fs::memfd_create("test", flags).map(File::from) else { return };
    file.set_len(4 * MIB).unwrap();
    let region = Region::new(file, 0, 0, 4 * MIB).unwrap();
    assert_eq!(region.fault_size(), 2 * MIB);
    assert!(region.has_hole(r(0, 1)) && region.has_hole(r(4 * MIB - 1, 1)));
}

/// Needs no huge pages: only where things are is computed.
#[test]
fn host_pages_are_those_of_the_file() {
    let mut region = Region::new(memfd(8 * MIB), MIB, 100 * MIB, 7 * MIB).unwrap();
    // A small page of the machine; what a touched hole takes is no smaller.
    let page = u64::try_from(rustix::param::page_size()).unwrap();
    assert!(region.host_page() == page && region.fault_size() >= page);
    region.coarsen(2 * MIB);
    region.coarsen(3);
    region.coarsen(4096);
    assert_eq!(region.host_page(), 2 * MIB);
    // The file's first huge page begins before the region.
    assert_eq!(region.touched_pages(r(100 * MIB, 4096)), None);
    assert_eq!(region.touched_pages(r(100 * MIB, 2 * MIB)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(101 * MIB + 4096, 4096)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(104 * MIB, 4096)), Some(r(103 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(107 * MIB, 4096)), None);
    assert_eq!(region.whole_pages(r(100 * MIB, 4 * MIB)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.whole_pages(r(101 * MIB, 2 * MIB - 1)), None);
    assert_eq!(region.to_file(r(0, 200 * MIB)), Some(r(MIB, 7 * MIB)));
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
    let last = mapped.wrapping_add(length - 1);
    // SAFETY: within the mapping.
    unsafe { last.write(7) };
    for part in [1, length / 2, length - 1] {
        // SAFETY: it is private, anonymous, and ours.
        let claim = unsafe { discard_anonymous(mapped, part, length) };
        assert_eq!(claim, Claim::Unproven(Reason::PartOfHostPage), "{part} bytes of a page of {length}");
    }
    // SAFETY: as above.
    let claim = unsafe { discard_anonymous(mapped.wrapping_add(1), length, length) };
    assert_eq!(claim, Claim::Unproven(Reason::PartOfHostPage), "an address within a page");
    for byte in [mapped, last] {
        // SAFETY: within the mapping.
        assert_eq!(unsafe { byte.read() }, 7);
    }
    // SAFETY: it is private, anonymous, and ours.
    let claim = unsafe { discard_anonymous(mapped, length, rustix::param::page_size()) };
    assert_eq!(claim, Claim::Proven(Backing::Anonymous));
    // SAFETY: within the mapping.
    assert_eq!(unsafe { mapped.read() }, 0);
    // SAFETY: nothing refers to it any more.
    unsafe { rustix::mm::munmap(mapped.cast(), length) }.unwrap();
}
