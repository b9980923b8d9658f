// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Regions and what discarding makes of them.

// Miri has no memfd_create(2).
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use balloon_discard::{Backing, Reason, Region, RegionError, Regions};
use balloon_protocol::{QueueKind, Range};
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

/// What comes of a report: whether all of it is zero, how much was discarded, an error.
type Done = (Result<Backing, Reason>, u64, Option<i32>);

fn discard(region: Region, range: Range) -> Done {
    let mut regions = Regions::new();
    regions.insert(region).unwrap();
    report(&mut regions, range)
}

fn report(regions: &mut Regions, range: Range) -> Done {
    let request = regions.begin(QueueKind::Reporting);
    let outcome = regions.discard(&request, range);
    let claim = regions.answer(request, []).claim(range);
    assert_eq!(claim.known().err(), outcome.doubt);
    (claim.known(), outcome.discarded, outcome.errno)
}

fn kept(reason: Reason) -> Done {
    (Err(reason), 0, None)
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
    assert_eq!(discard(region, r(16 * MIB + 0x1000, MIB)), (Ok(Backing::Tmpfs), MIB, None));
    assert!(file.metadata().unwrap().blocks() < blocks);
    assert_eq!(byte(&file, MIB + 0xfff), 0x5a, "before it");
    assert_eq!(byte(&file, MIB + 0x1000), 0);
    assert_eq!(byte(&file, 2 * MIB + 0xfff), 0);
    assert_eq!(byte(&file, 2 * MIB + 0x1000), 0x5a, "behind it");
}

#[test]
fn nothing_outside_of_the_region_is_touched() {
    let file = filled(4 * MIB);
    let region = || shared(file.try_clone().unwrap(), MIB, 0, MIB);
    let done = discard(region(), r(MIB - 0x1000, 2 * MIB));
    assert_eq!(done, (Err(Reason::OutsideMemory), 0x1000, None));
    assert_eq!(byte(&file, 2 * MIB), 0x5a);
    assert_eq!(discard(region(), r(MIB, MIB)), kept(Reason::OutsideMemory));
    assert_eq!(byte(&file, 2 * MIB), 0x5a);
}

#[test]
fn a_part_of_a_page_is_not_discarded() {
    let file = filled(MIB);
    let region = || shared(file.try_clone().unwrap(), 0, 0, MIB);
    assert_eq!(discard(region(), r(0x10, 0x100)), kept(Reason::PartOfHostPage));
    assert_eq!(discard(region(), r(0x10, 0x2000)), (Err(Reason::PartOfHostPage), 0x1000, None));
    assert_eq!((byte(&file, 0x20), byte(&file, 0x1000), byte(&file, 0x2008)), (0x5a, 0, 0x5a));
}

#[test]
fn without_proof_of_sharing_nothing_is_discarded() {
    let file = filled(MIB);
    let region = Region::new(file.try_clone().unwrap(), 0, 0, MIB).unwrap();
    assert!(!region.has_name() && !region.known_shared());
    assert_eq!(region.promise(), Err(Reason::NotKnownShared));
    assert_eq!(discard(region, r(0, MIB)), kept(Reason::NotKnownShared));
    assert_eq!(byte(&file, 0), 0x5a);
}

#[test]
fn a_named_file_that_may_be_a_template_is_left_alone() {
    let mut named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    named.write_all(&[0x5a; 8192]).unwrap();
    let mut region = Region::new(named.reopen().unwrap(), 0, 0, 8192).unwrap();
    assert!(region.has_name() && !region.known_shared());
    let mut regions = Regions::new();
    regions.insert(region).unwrap();
    assert_eq!(regions.seen_to_share(0), None, "others may write there, too");
    assert_eq!(report(&mut regions, r(0, 8192)), kept(Reason::NotKnownShared));
    assert_eq!(byte(named.as_file(), 0), 0x5a);
    // The operator states it.
    region = regions.remove(r(0, 8192)).unwrap();
    region.set_known_shared();
    regions.insert(region).unwrap();
    assert_eq!(report(&mut regions, r(0, 8192)).0, Ok(Backing::Tmpfs));
    assert_eq!(byte(named.as_file(), 0), 0);
}

#[test]
fn a_file_without_a_name_is_shared_once_the_guest_writes_there() {
    let file = filled(MIB);
    let mut regions = Regions::new();
    for (offset, guest) in [(0, 0), (MIB / 2, 8 * MIB)] {
        let region = Region::new(file.try_clone().unwrap(), offset, guest, MIB / 2).unwrap();
        regions.insert(region).unwrap();
    }
    let other = Region::new(filled(MIB), 0, 16 * MIB, MIB).unwrap();
    regions.insert(other).unwrap();
    assert_eq!(regions.seen_to_share(4 * MIB), None, "no memory");
    let id = regions.at(0).unwrap().id();
    assert_eq!(regions.seen_to_share(8 * MIB + 5), id);
    assert_eq!(regions.seen_to_share(0), None, "no news");
    let known: Vec<bool> = regions.iter().map(Region::known_shared).collect();
    assert_eq!(known, [true, true, false]);
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
fn a_call_that_fails_is_no_claim() {
    let file = filled(MIB);
    rustix::fs::fcntl_add_seals(&file, SealFlags::WRITE).unwrap();
    let done = discard(shared(file, 0, 0, MIB), r(0, MIB));
    assert_eq!(done, (Err(Reason::Failed), 0, Some(Errno::PERM.raw_os_error())));
}

/// Needs no huge pages: only where things are is computed.
#[test]
fn host_pages_are_those_of_the_file() {
    let mut region = Region::new(memfd(8 * MIB), MIB, 100 * MIB, 7 * MIB).unwrap();
    // A small page of the machine.
    let page = u64::try_from(rustix::param::page_size()).unwrap();
    assert_eq!(region.host_page(), page);
    region.coarsen(2 * MIB).unwrap();
    region.coarsen(4096).unwrap();
    for wrong in [0, 3, 3 * MIB] {
        assert!(matches!(region.coarsen(wrong), Err(RegionError::Unit { size, .. }) if size == wrong));
    }
    assert_eq!(region.host_page(), 2 * MIB);
    // The file's first huge page begins before the region.
    assert_eq!(region.touched_pages(r(100 * MIB, 4096)), None);
    assert_eq!(region.touched_pages(r(100 * MIB, 2 * MIB)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(101 * MIB + 4096, 4096)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(104 * MIB, 4096)), Some(r(103 * MIB, 2 * MIB)));
    assert_eq!(region.touched_pages(r(107 * MIB, 4096)), None);
    assert_eq!(region.whole_pages(r(100 * MIB, 4 * MIB)), Some(r(101 * MIB, 2 * MIB)));
    assert_eq!(region.whole_pages(r(101 * MIB, 2 * MIB - 1)), None);
    assert_eq!(region.to_host(r(0, 200 * MIB)), Some(r(MIB, 7 * MIB)));
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
    let last = mapped.wrapping_add(length - 1);
    for byte in [mapped, last] {
        // SAFETY: within the mapping.
        unsafe { byte.write(7) };
    }
    let page = u64::try_from(rustix::param::page_size()).unwrap();
    // SAFETY: it is private, anonymous, and ours.
    let made = |address, length, page| unsafe { Region::anonymous(address, length, MIB, page) };
    let refused =
        [(mapped.wrapping_add(1), MIB, page), (mapped, MIB - 1, page), (mapped, MIB, 3), (mapped, 0, page)];
    for (address, length, page) in refused {
        assert!(matches!(made(address, length, page), Err(RegionError::Extent { .. })));
    }
    let mut regions = Regions::new();
    let region = made(mapped, MIB, page).unwrap();
    assert_eq!((region.id(), region.promise()), (None, Ok(Backing::Anonymous)));
    regions.insert(region).unwrap();
    assert_eq!(report(&mut regions, r(MIB, 0x10)), kept(Reason::PartOfHostPage));
    // SAFETY: within the mapping.
    assert_eq!(unsafe { mapped.read() }, 7);
    assert_eq!(report(&mut regions, r(MIB, MIB / 2)), (Ok(Backing::Anonymous), MIB / 2, None));
    // SAFETY: within the mapping.
    assert_eq!(unsafe { mapped.read() }, 0);
    // SAFETY: within the mapping.
    assert_eq!(unsafe { last.read() }, 7);
    // The guest sees the same addresses of this process twice.
    // SAFETY: it is private, anonymous, and ours.
    let again = unsafe { Region::anonymous(mapped, MIB, 8 * MIB, page) }.unwrap();
    regions.insert(again).unwrap();
    assert_eq!(report(&mut regions, r(MIB, MIB)), kept(Reason::Aliased));
    drop(regions);
    // SAFETY: nothing refers to it any more.
    unsafe { rustix::mm::munmap(mapped.cast(), length) }.unwrap();
}
