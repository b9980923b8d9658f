// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory and queues as rust-vmm has them.

#![cfg(all(feature = "vm-memory", feature = "virtio-queue", not(miri)))]
#![allow(clippy::unwrap_used)]

use balloon_discard::{Backing, Reason, RegionError, Regions, rings_of};
use balloon_protocol::{QueueKind, Range};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use virtio_queue::{Queue, QueueT};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

const SIZE: usize = 4 << 20;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_NORESERVE;

fn r(start: u64, length: u64) -> Range {
    Range::new(start, length).unwrap()
}

fn template() -> File {
    let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&vec![0x5a; SIZE], 0).unwrap();
    file
}

fn mapped(file: Option<File>, flags: i32) -> MmapRegion {
    let file = file.map(|file| FileOffset::new(file, 0));
    MmapRegion::build(file, SIZE, libc::PROT_READ | libc::PROT_WRITE, flags).unwrap()
}

fn memory(mapping: MmapRegion) -> GuestMemoryMmap {
    let region = GuestRegionMmap::new(mapping, GuestAddress(0)).unwrap();
    GuestMemoryMmap::from_regions(vec![region]).unwrap()
}

/// Report 8 KiB of memory that the guest has written; what is known, how much went, what is there now.
fn report(memory: &GuestMemoryMmap, regions: &mut Regions) -> (Result<Backing, Reason>, u64, u8) {
    memory.write_slice(&[7; 0x4000], GuestAddress(0x1000)).unwrap();
    let request = regions.begin(QueueKind::Reporting);
    let discarded = regions.discard(&request, r(0x1000, 0x2000)).discarded;
    let known = regions.answer(request, []).claim(r(0x1000, 0x2000)).known();
    let now = memory.read_obj::<u8>(GuestAddress(0x1000)).unwrap();
    assert_eq!(memory.read_obj::<u8>(GuestAddress(0x3000)).unwrap(), 7);
    (known, discarded, now)
}

#[test]
fn each_kind_of_memory() {
    for (mapping, expected) in [
        (mapped(None, PRIVATE | libc::MAP_ANONYMOUS), (Ok(Backing::Anonymous), 0x2000, 0)),
        (mapped(Some(template()), libc::MAP_SHARED), (Ok(Backing::Tmpfs), 0x2000, 0)),
        // The file shows again.
        (mapped(Some(template()), PRIVATE), (Err(Reason::PrivateFile), 0x2000, 0x5a)),
    ] {
        let memory = memory(mapping);
        let mut regions = Regions::new();
        assert!(regions.set_memory(&memory).is_empty());
        assert_eq!(report(&memory, &mut regions), expected);
    }
}

/// A request of the memory before is over, and a mapping stays as long as the regions have it.
#[test]
fn memory_that_is_replaced() {
    let old = memory(mapped(None, PRIVATE | libc::MAP_ANONYMOUS));
    let mut regions = Regions::new();
    assert!(regions.set_memory(&old).is_empty());
    let request = regions.begin(QueueKind::Reporting);
    drop(old);
    assert_eq!(regions.discard(&request, r(0, 0x1000)).discarded, 0x1000);
    let new = memory(mapped(None, PRIVATE | libc::MAP_ANONYMOUS));
    new.write_slice(&[7; 0x1000], GuestAddress(0)).unwrap();
    assert!(regions.set_memory(&new).is_empty());
    assert_eq!(regions.discard(&request, r(0, 0x1000)).doubt, Some(Reason::Ended));
    assert_eq!(new.read_obj::<u8>(GuestAddress(0)).unwrap(), 7);
}

#[test]
fn memory_of_which_nothing_is_known_is_left_out() {
    let shared = mapped(None, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let owner = mapped(Some(template()), libc::MAP_SHARED);
    // SAFETY: the mapping exists until the end of this function.
    let raw = unsafe { MmapRegionBuilder::new(SIZE).with_raw_mmap_pointer(owner.as_ptr()) };
    // Linux ignores the file.
    let anonymous =
        [libc::MAP_SHARED, PRIVATE].map(|flags| mapped(Some(template()), flags | libc::MAP_ANONYMOUS));
    for mapping in [shared, raw.build().unwrap()].into_iter().chain(anonymous) {
        let memory = memory(mapping);
        let mut regions = Regions::new();
        let left_out = regions.set_memory(&memory);
        assert!(matches!(left_out.as_slice(), [RegionError::Mapping { guest: 0 }]), "{left_out:?}");
        assert_eq!(report(&memory, &mut regions), (Err(Reason::OutsideMemory), 0, 7));
    }
}

#[test]
fn rings_of_a_queue() {
    let mut queue = Queue::new(64).unwrap();
    queue.set_size(32);
    queue.try_set_desc_table_address(GuestAddress(0x1000)).unwrap();
    queue.try_set_avail_ring_address(GuestAddress(0x2000)).unwrap();
    queue.try_set_used_ring_address(GuestAddress(0x3000)).unwrap();
    let rings: Vec<Range> = rings_of(&queue).collect();
    assert_eq!(rings, [r(0x1000, 512), r(0x2000, 70), r(0x3000, 262)]);
}
