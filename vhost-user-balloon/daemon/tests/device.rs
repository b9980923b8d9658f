// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device against a front end that keeps to the protocol.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::type_complexity)]

mod common;

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use common::*;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const REPORTING: usize = 3;

#[test]
fn what_is_offered() {
    let mut vm = Vm::bare(options());
    vm.frontend.set_owner().unwrap();
    let features = vm.frontend.get_features().unwrap();
    assert_eq!(features, ALL | 1 << 16 | VERSION_1 | PROTOCOL);
    // Neither indirect descriptors nor event indexes nor hinting.
    assert_eq!(features & (1 << 28 | 1 << 29 | 1 << 3), 0);
    let protocol = vm.frontend.get_protocol_features().unwrap();
    for wanted in [
        VhostUserProtocolFeatures::MQ,
        VhostUserProtocolFeatures::CONFIG,
        VhostUserProtocolFeatures::REPLY_ACK,
        VhostUserProtocolFeatures::BACKEND_REQ,
        VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS,
        VhostUserProtocolFeatures::RESET_DEVICE,
    ] {
        assert!(protocol.contains(wanted), "{wanted:?}");
    }
    vm.frontend.set_protocol_features(protocol).unwrap();
    assert_eq!(vm.frontend.get_queue_num().unwrap(), 5);
    assert!(vm.frontend.get_max_mem_slots().unwrap() >= 32);
    vm.end().unwrap();
}

#[test]
fn inflating_gives_memory_back() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, 32 * MIB);
    let before = vm.resident();
    // In an order and with repetitions no driver has, over several requests.
    let pfns: Vec<u32> = (0..8192_u32).map(|n| (PLAY >> 12) as u32 + (n * 4099) % 8192).collect();
    for part in pfns.chunks(250) {
        assert_eq!(vm.pages(0, part), 0, "no bitmap was asked for");
    }
    assert!(vm.resident() + 32 * MIB <= before + MIB);
    assert!(vm.is_zero(PLAY, 32 * MIB));
    assert_eq!(vm.pages(1, &pfns[..256]), 0);
    let status = vm.status();
    assert_eq!(status["inflated"], 32 * MIB);
    assert_eq!(status["discarded"], 32 * MIB);
    vm.end().unwrap();
}

#[test]
fn reports_tell_how_much_is_zero() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, 8 * MIB);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x40_0000, true)]), 0x40_0000);
    assert!(vm.is_zero(PLAY, 4 * MIB));
    assert!(vm.is_filled(PLAY + 4 * MIB, 4 * MIB));
    // More than one part: the answer is for all of them.
    assert_eq!(vm.ask(REPORTING, &[(PLAY + 4 * MIB, 0x1000, true), (PLAY + 6 * MIB, 0x3000, true)]), 0x4000);
    assert!(vm.is_filled(PLAY + 4 * MIB + 0x1000, 0x1000));
    // More than one call can discard.
    assert_eq!(vm.ask(REPORTING, &[(RAM / 2, (RAM / 2) as u32, true)]), (RAM / 2) as u32);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, (RAM / 2) as u32, true)]), (RAM / 2) as u32);
    let status = vm.status();
    assert_eq!(status["proven_zero"], 4 * MIB + 0x4000 + RAM);
    assert_eq!(status["working"], true);
    assert_eq!(status["problems"], serde_json::json!([]));
    vm.end().unwrap();
}

#[test]
fn without_bit_6_nothing_is_claimed() {
    let mut vm = Vm::started(ALL & !(1 << 6), options());
    vm.fill(PLAY, MIB);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0);
    assert!(vm.is_zero(PLAY, MIB));
    vm.end().unwrap();
}

#[test]
fn queues_are_numbered_by_what_was_negotiated() {
    let mut vm = Vm::started(1 << 5 | 1 << 6, options());
    vm.fill(PLAY, MIB);
    assert_eq!(vm.ask(2, &[(PLAY, 0x10_0000, true)]), 0x10_0000);
    vm.end().unwrap();

    // Bit 6 without reports means nothing, and queue 3 does not exist.
    let mut vm = Vm::started(1 << 1 | 1 << 6, options());
    vm.start_ring(3, 0);
    vm.fill(PLAY, MIB);
    vm.put(3, &[(PLAY, 0x10_0000, true)]);
    vm.kick(3);
    assert_eq!(vm.pages(0, &[5000]), 0);
    assert!(vm.is_filled(PLAY, MIB));
    assert_eq!(vm.used_index(3), 0);
    vm.end().unwrap();
}

#[test]
fn what_cannot_be_claimed_is_not() {
    let mut vm = Vm::started(ALL, options());
    let table: [(&str, &[(u64, u32, bool)], &str); 8] = [
        ("past the end", &[(RAM - 0x1000, 0x2000, true)], "outside_memory"),
        ("outside", &[(RAM * 2, 0x1000, true)], "outside_memory"),
        ("at the end of the world", &[(u64::MAX - 0xfff, 0x1000, true)], "outside_memory"),
        ("not aligned", &[(PLAY + 8, 0x2000, true)], "misaligned"),
        ("not whole pages", &[(PLAY, 0x1800, true)], "misaligned"),
        ("something to read", &[(PLAY, 0x1000, false), (PLAY + 0x1000, 0x1000, true)], "malformed"),
        ("a part of a page twice", &[(PLAY, 0x2000, true), (PLAY + 8, 0x800, true)], "misaligned"),
        ("one good, one bad", &[(PLAY, 0x1000, true), (RAM * 2, 0x1000, true)], "outside_memory"),
    ];
    for (what, parts, reason) in table {
        vm.fill(PLAY, 0x4000);
        let count = |vm: &Vm| {
            let status = vm.status();
            status["skipped"][reason].as_u64().unwrap_or(0) + status["unproven"][reason].as_u64().unwrap_or(0)
        };
        let before = count(&vm);
        assert_eq!(vm.ask(REPORTING, parts), 0, "{what}");
        assert!(count(&vm) > before, "{what}: {}", vm.status());
    }
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn poisoned_pages_are_left_alone() {
    let mut vm = Vm::started(ALL, options());
    let flags = VhostUserConfigFlags::WRITABLE;
    vm.frontend.set_config(12, flags, &0xaaaa_aaaa_u32.to_le_bytes()).unwrap();
    vm.fill(PLAY, MIB);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0);
    assert!(vm.is_filled(PLAY, MIB));
    let (length, bits) = vm.pages_with_bitmap(&[(PLAY >> 12) as u32], 1);
    assert_eq!((length, bits[0]), (1, 0), "discarded, and not claimed");
    assert_eq!(vm.status()["skipped"]["poison"], 0x1000);
    vm.frontend.set_config(12, flags, &[0; 4]).unwrap();
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);

    // A driver that has not negotiated it: an old value means nothing.
    vm.frontend.set_config(12, flags, &[0xaa; 4]).unwrap();
    vm.start_device(ALL & !(1 << 4));
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    vm.end().unwrap();
}

#[test]
fn the_bitmap_of_an_inflate_request() {
    let mut vm = Vm::started(ALL, options());
    let first = (PLAY >> 12) as u32;
    vm.fill(PLAY, MIB);
    // Any order; one twice; one outside; nine of them, so two bytes.
    let pfns = [first + 8, first, first + 3, first, u32::MAX, first + 1, first + 2, first + 9, first + 20];
    let (length, bits) = vm.pages_with_bitmap(&pfns, 16);
    assert_eq!(length, 2);
    assert_eq!(&bits[..3], &[0b1110_1111, 0b0000_0001, 0xff], "no further than it is long");
    assert!(vm.is_zero(PLAY, 4 * PAGE));
    assert!(vm.is_filled(PLAY + 4 * PAGE, 4 * PAGE));

    let many: Vec<u32> = (0..256).map(|n| first + n).collect();
    assert_eq!(vm.pages_with_bitmap(&many, 32), (32, [vec![0xff; 32], vec![0xff; 32]].concat()));
    let (length, _) = vm.pages_with_bitmap(&(0..257).map(|n| first + n).collect::<Vec<_>>(), 64);
    assert_eq!(length, 0, "more than a request can have");
    assert_eq!(vm.pages_with_bitmap(&many, 31).0, 0, "no room for the answer");
    assert_eq!(vm.pages_with_bitmap(&[], 8).0, 0, "no question");
    vm.end().unwrap();
}

#[test]
fn the_answer_is_not_written_into_a_page_called_zero() {
    let mut vm = Vm::started(ALL, options());
    let pfn = (PLAY >> 12) as u32;
    vm.write(0x8000, &[pfn.to_le_bytes(), (pfn + 1).to_le_bytes()].concat());
    vm.fill(PLAY, 0x2000);
    assert_eq!(vm.ask(0, &[(0x8000, 8, false), (PLAY + 0x10, 1, true)]), 1);
    assert_eq!(vm.read(PLAY + 0x10, 1), [0b10]);
    vm.end().unwrap();
}

#[test]
fn without_bit_7_there_is_no_bitmap() {
    let mut vm = Vm::started(ALL & !(1 << 7), options());
    assert_eq!(vm.pages_with_bitmap(&[(PLAY >> 12) as u32], 8), (0, vec![0xff; 64]));
    vm.end().unwrap();
}

#[test]
fn what_a_file_with_a_name_may_be_is_unknown() {
    let mut vm = Vm::started(ALL, options());
    // A second file, as a second NUMA node has: nothing has been seen there.
    let other = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    other.as_file().set_len(8 * MIB).unwrap();
    let mut region = vm.region(1 << 32, 8 * MIB, 0);
    region.mmap_handle = other.as_file().as_raw_fd();
    vm.frontend.add_mem_region(&region).unwrap();
    std::os::unix::fs::FileExt::write_all_at(other.as_file(), &[7; 4096], 0).unwrap();
    assert_eq!(vm.ask(REPORTING, &[(1 << 32, 0x10_0000, true)]), 0);
    let mut byte = [0];
    std::os::unix::fs::FileExt::read_exact_at(other.as_file(), &mut byte, 0).unwrap();
    assert_eq!(byte, [7], "it may be a template of other guests");
    assert_eq!(vm.status()["skipped"]["not_known_shared"], MIB);
    // A block that spans both is not claimed either.
    vm.frontend.remove_mem_region(&region).unwrap();
    assert_eq!(vm.ask(REPORTING, &[(1 << 32, 0x10_0000, true)]), 0);
    vm.end().unwrap();

    let mut shared =
        Vm::started(ALL, vhost_user_balloon::device::Options { memory_is_shared: true, ..options() });
    shared.frontend.add_mem_region(&region).unwrap();
    assert_eq!(shared.ask(REPORTING, &[(1 << 32, 0x10_0000, true)]), 0x10_0000);
    shared.end().unwrap();
}

fn bytes_at(file: &std::fs::File, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, at).unwrap();
    bytes
}

/// What a report of all but the first page of `other` at 4 GiB returns, when the used ring of the reports
/// is in that first page and the rest of the guest in its usual memory.
fn report_with_the_used_ring_in(other: &std::fs::File) -> u32 {
    let mut vm = Vm::started(ALL, options());
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000, "the other file is known to be shared");
    let size = other.metadata().unwrap().len();
    let mut region = vm.region(1 << 32, size, 0);
    region.mmap_handle = other.as_raw_fd();
    vm.frontend.add_mem_region(&region).unwrap();
    let base = vm.frontend.get_vring_base(REPORTING).unwrap();
    let ring = &vm.rings[REPORTING];
    let config = vhost::VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER + ring.descriptors(),
        used_ring_addr: USER + (1 << 32),
        avail_ring_addr: USER + ring.available(),
        log_addr: None,
    };
    vm.frontend.set_vring_base(REPORTING, base as u16).unwrap();
    vm.frontend.set_vring_addr(REPORTING, &config).unwrap();
    vm.frontend.set_vring_kick(REPORTING, &ring.kick).unwrap();
    vm.frontend.set_vring_enable(REPORTING, true).unwrap();
    let mut returned = 0;
    for n in 1..=3_u16 {
        vm.put(REPORTING, &[((1 << 32) + 0x1000, size as u32 - 0x1000, true)]);
        vm.kick(REPORTING);
        assert!(eventually(|| bytes_at(other, 2, 2) == n.to_le_bytes()));
        let length = bytes_at(other, 4 + (u64::from(n) - 1) * 8 + 4, 4);
        returned += u32::from_le_bytes(length.try_into().unwrap());
    }
    vm.end().unwrap();
    returned
}

/// What the device writes itself, into a used ring, proves nothing of the file that is in.
#[test]
fn a_used_ring_proves_nothing() {
    let size = 8 * MIB;
    let content = [vec![0; 0x1000], vec![7; size as usize - 0x1000]].concat();
    let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
    std::os::unix::fs::FileExt::write_all_at(named.as_file(), &content, 0).unwrap();
    assert_eq!(report_with_the_used_ring_in(named.as_file()), 0);
    assert!(
        bytes_at(named.as_file(), 0x1000, size as usize - 0x1000).iter().all(|byte| *byte == 7),
        "a template of other guests has a hole"
    );
    let unnamed = memfd(size);
    std::os::unix::fs::FileExt::write_all_at(&unnamed, &content, 0).unwrap();
    assert_eq!(report_with_the_used_ring_in(&unnamed), 0, "a private copy of it would not be zero");
}

/// A file with a name is not known to be shared by what a guest does, be all of its rings in there.
#[test]
fn rings_in_a_file_with_a_name() {
    for shared in [false, true] {
        let named = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        named.as_file().set_len(RAM).unwrap();
        let mut vm = Vm::bare(vhost_user_balloon::device::Options { memory_is_shared: shared, ..options() });
        vm.memory = named.reopen().unwrap();
        vm.start(ALL);
        vm.fill(PLAY, MIB);
        for _ in 0..3 {
            let returned = vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]);
            assert_eq!(returned, if shared { 0x10_0000 } else { 0 });
        }
        assert_eq!(vm.is_zero(PLAY, MIB), shared);
        assert_eq!(vm.is_filled(PLAY, MIB), !shared);
        let status = vm.status();
        assert_eq!(status["working"], shared);
        assert_eq!(status["problems"].to_string().contains("its file has a name"), !shared, "{status}");
        vm.end().unwrap();
    }
}

/// What was in the ring before it was started may come from anywhere; what comes later, from the guest.
#[test]
fn only_an_index_that_changes_proves_something() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    vm.share_memory();
    vm.start_device(ALL);
    vm.frontend.get_vring_base(REPORTING).unwrap();
    // A private copy of a snapshot, with a report that no device has seen yet.
    vm.put(REPORTING, &[(PLAY, 0x1000, true)]);
    vm.fill(PLAY, 0x1000);
    let ring = &vm.rings[REPORTING];
    vm.frontend.set_vring_base(REPORTING, 0).unwrap();
    vm.frontend.set_vring_kick(REPORTING, &ring.kick).unwrap();
    vm.kick(REPORTING);
    assert_eq!(vm.used(REPORTING).unwrap().1, 0);
    assert!(vm.is_filled(PLAY, 0x1000), "others may have a descriptor of it");
    // Other memory at the same place, where the same index is another one: nothing is known of that.
    let other = memfd(RAM);
    std::os::unix::fs::FileExt::write_all_at(&other, &vm.read(0, PLAY as usize), 0).unwrap();
    let old = std::mem::replace(&mut vm.memory, other);
    vm.put(REPORTING, &[(PLAY, 0x1000, true)]);
    vm.share_memory();
    vm.kick(REPORTING);
    assert_eq!(vm.used(REPORTING).unwrap().1, 0);
    drop(old);
    // And now there is.
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    vm.end().unwrap();
}

#[test]
fn memory_that_is_plugged_and_unplugged() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    // A guest with a hole, as on a PC with more than 3 GiB: one file, two regions.
    vm.frontend.set_mem_table(&[vm.region(0, RAM / 2, 0), vm.region(1 << 32, RAM / 4, RAM / 2)]).unwrap();
    vm.start_device(ALL);
    vm.fill(RAM / 2, MIB);
    assert_eq!(vm.ask(REPORTING, &[(1 << 32, 0x10_0000, true)]), 0x10_0000);
    assert!(vm.is_zero(RAM / 2, MIB));
    // Before the region there is no memory: what is inside goes, and nothing is claimed.
    vm.fill(RAM / 2, 0x2000);
    assert_eq!(vm.ask(REPORTING, &[((1 << 32) - 0x1000, 0x2000, true)]), 0);
    assert!(vm.is_zero(RAM / 2, 0x1000) && vm.is_filled(RAM / 2 + 0x1000, 0x1000));
    // The region behind it: the end of the one before is cut at the border, and both together are whole.
    let behind = (1 << 32) + RAM / 4;
    assert_eq!(vm.ask(REPORTING, &[(behind - 0x1000, 0x2000, true)]), 0);
    vm.frontend.add_mem_region(&vm.region(behind, RAM / 4, RAM * 3 / 4)).unwrap();
    vm.fill(RAM * 3 / 4 - 0x1000, 0x2000);
    assert_eq!(vm.ask(REPORTING, &[(behind - 0x1000, 0x2000, true)]), 0x2000);
    assert!(vm.is_zero(RAM * 3 / 4 - 0x1000, 0x2000));
    assert_eq!(vm.status()["regions"].as_array().unwrap().len(), 3);
    vm.frontend.remove_mem_region(&vm.region(behind, RAM / 4, RAM * 3 / 4)).unwrap();
    vm.fill(RAM * 3 / 4, 0x1000);
    assert_eq!(vm.ask(REPORTING, &[(behind, 0x1000, true)]), 0);
    assert!(vm.is_filled(RAM * 3 / 4, 0x1000), "no longer the guest's");
    vm.end().unwrap();
}

/// One file is known to be shared by what the guest writes; another one, as of a second NUMA node, is not.
#[test]
fn each_file_has_to_be_seen() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    let other = memfd(8 * MIB);
    let mut second = vm.region(1 << 32, 8 * MIB, 0);
    second.mmap_handle = other.as_raw_fd();
    vm.frontend.set_mem_table(&[vm.region(0, RAM, 0), second]).unwrap();
    vm.start_device(ALL);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    std::os::unix::fs::FileExt::write_all_at(&other, &[7; 4096], 0).unwrap();
    assert_eq!(vm.ask(REPORTING, &[(1 << 32, 0x1000, true)]), 0, "it may be a private copy");
    assert_eq!(bytes_at(&other, 0, 4096), [7; 4096]);
    vm.end().unwrap();
}

/// A ring, or a page in use, may be at the other address.
#[test]
fn memory_that_the_guest_sees_twice() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, MIB);
    let again = vm.region(1 << 32, MIB, PLAY);
    vm.frontend.add_mem_region(&again).unwrap();
    for address in [PLAY, 1 << 32] {
        assert_eq!(vm.ask(REPORTING, &[(address, 0x1000, true)]), 0);
    }
    assert!(vm.is_filled(PLAY, MIB));
    assert_eq!(vm.status()["skipped"]["aliased"], 0x2000);
    vm.frontend.remove_mem_region(&again).unwrap();
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    vm.end().unwrap();
}

/// In the front end, the second region follows the first; in the guest, it is elsewhere.
#[test]
fn a_ring_at_the_start_of_a_region() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    let (low, mut high) = (vm.region(0, RAM / 2, 0), vm.region(1 << 32, RAM / 2, RAM / 2));
    high.userspace_addr = USER + RAM / 2;
    vm.frontend.set_mem_table(&[low, high]).unwrap();
    vm.rings[REPORTING].base = RAM / 2;
    vm.start_device(ALL);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    vm.end().unwrap();
}

/// Regions that overlap are refused and change nothing; a whole table that is refused leaves no memory.
#[test]
fn memory_that_is_refused() {
    let mut vm = Vm::started(ALL, options());
    let (mut guest, mut user) = (vm.region(RAM - MIB, 2 * MIB, 0), vm.region(1 << 32, MIB, 0));
    guest.userspace_addr = USER + (1 << 32);
    user.userspace_addr = USER + RAM - 4096;
    for overlapping in [guest, user] {
        assert!(vm.frontend.add_mem_region(&overlapping).is_err());
        assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    }
    vm.fill(PLAY, MIB);
    vm.put(REPORTING, &[(PLAY, 0x10_0000, true)]);
    assert!(vm.frontend.set_mem_table(&[vm.region(0, RAM, 4096)]).is_err());
    vm.kick(REPORTING);
    assert_eq!(vm.status()["regions"], serde_json::json!([]));
    assert!(vm.is_filled(PLAY, MIB), "no longer the guest's");
    vm.end().unwrap();
}

fn stats_bytes() -> Vec<u8> {
    [(4_u16, 123_u64 << 20), (5, 1 << 30)]
        .iter()
        .flat_map(|(tag, value)| [tag.to_le_bytes().to_vec(), value.to_le_bytes().to_vec()].concat())
        .collect()
}

#[test]
fn as_many_descriptors_as_a_message_can_have() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    let size = RAM / 32;
    let regions: Vec<_> = (0..32).map(|n| vm.region(n * size, size, n * size)).collect();
    vm.frontend.set_mem_table(&regions).unwrap();
    assert_eq!(vm.status()["regions"].as_array().unwrap().len(), 32);
    vm.end().unwrap();
}

#[test]
fn statistics_when_a_client_asks() {
    let mut vm = Vm::started(ALL, options());
    vm.write(0xa000, &stats_bytes());
    vm.put(2, &[(0xa000, 20, false)]);
    vm.kick(2);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(vm.used_index(2), 0, "the device keeps the buffer until it asks");
    let control = vm.control.clone();
    let asker = std::thread::spawn(move || {
        use std::io::Write;
        let mut stream = UnixStream::connect(control).unwrap();
        stream.write_all(b"{\"command\":\"stats\"}\n").unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut answer = [0; 4096];
        let got = stream.read(&mut answer).unwrap();
        String::from_utf8(answer[..got].to_vec()).unwrap()
    });
    assert_eq!(vm.used(2).unwrap().1, 0);
    vm.put(2, &[(0xa000, 20, false)]);
    vm.kick(2);
    let answer = asker.join().unwrap();
    assert!(answer.contains(&format!("\"free_memory\":{}", 123_u64 << 20)), "{answer}");
    let text = vm.metrics();
    assert!(text.contains("vhost_user_balloon_guest{stat=\"total_memory\"} 1073741824"), "{text}");
    vm.end().unwrap();
}

#[test]
fn a_guest_that_does_not_answer() {
    let vm = Vm::started(ALL, options());
    let answer = vm.control(r#"{"command":"stats"}"#);
    assert_eq!(answer["ok"], false);
    vm.end().unwrap();
}

#[test]
fn statistics_that_were_held_are_dropped_when_the_ring_stops() {
    let mut vm = Vm::started(ALL, options());
    vm.write(0xa000, &stats_bytes());
    vm.put(2, &[(0xa000, 20, false)]);
    vm.kick(2);
    assert!(eventually(|| vm.metrics().contains("free_memory")));
    vm.frontend.set_vring_enable(2, false).unwrap();
    // The memory of the ring belongs to another file now.
    vm.fill(vm.rings[2].used(), 0x1000);
    vm.control(r#"{"command":"stats"}"#);
    assert!(vm.is_filled(vm.rings[2].used(), 0x1000));
    vm.end().unwrap();
}

#[test]
fn a_paused_guest_keeps_its_statistics_buffer() {
    let mut vm = Vm::started(ALL, options());
    vm.write(0xa000, &stats_bytes());
    vm.put(2, &[(0xa000, 20, false)]);
    vm.kick(2);
    assert!(eventually(|| vm.metrics().contains("free_memory")));
    assert_eq!(vm.frontend.get_vring_base(1).unwrap(), 0, "the buffer belongs to another ring");
    let base = vm.frontend.get_vring_base(2).unwrap();
    assert_eq!(base, 0, "what was not given back is still to be taken");
    vm.start_ring(2, 0);
    vm.end().unwrap();
}

/// The driver waits for the device, so it does not kick.
#[test]
fn statistics_can_be_asked_for_when_the_ring_goes_on() {
    let mut vm = Vm::started(ALL, options());
    vm.write(0xa000, &stats_bytes());
    let restarts: [(&str, fn(&mut Vm)); 2] = [
        ("enabled", |vm| {
            vm.frontend.set_vring_enable(2, false).unwrap();
            vm.frontend.set_vring_enable(2, true).unwrap();
        }),
        ("started", |vm| {
            let base = vm.frontend.get_vring_base(2).unwrap();
            vm.frontend.set_vring_base(2, base as u16).unwrap();
            vm.frontend.set_vring_kick(2, &vm.rings[2].kick).unwrap();
        }),
    ];
    for (n, (what, restart)) in restarts.into_iter().enumerate() {
        let head = vm.put(2, &[(0xa000, 20, false)]);
        vm.kick(2);
        // Each restart takes it once more.
        let taken = format!("vhost_user_balloon_requests_total{{queue=\"stats\"}} {}\n", 2 * n + 1);
        assert!(eventually(|| vm.metrics().contains(&taken)));
        restart(&mut vm);
        let mut asker = UnixStream::connect(&vm.control).unwrap();
        std::io::Write::write_all(&mut asker, b"{\"command\":\"stats\"}\n").unwrap();
        assert_eq!(vm.used(2), Some((head, 0)), "{what}");
    }
    vm.end().unwrap();
}

#[test]
fn a_target_is_pushed_and_read() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    vm.share_memory();
    let (mut channel, theirs) = UnixStream::pair().unwrap();
    vm.frontend.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);
    channel.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut message = [0; 12];

    // Before the driver has started no driver can be notified.
    assert_eq!(vm.control(r#"{"command":"target","bytes":8388608}"#)["target"], 8 * MIB);
    assert!(channel.read_exact(&mut message).is_err());
    vm.start_device(ALL);
    channel.set_read_timeout(Some(LONG)).unwrap();
    channel.read_exact(&mut message).unwrap();
    let words: Vec<u32> = message.chunks(4).map(|w| u32::from_ne_bytes(w.try_into().unwrap())).collect();
    assert_eq!(words, [2, 1, 0], "CONFIG_CHANGE_MSG, version 1, no reply wanted");
    let (_, config) = vm.frontend.get_config(0, 16, VhostUserConfigFlags::WRITABLE, &[0; 16]).unwrap();
    assert_eq!(config[..4], 2048_u32.to_le_bytes());

    // No more than the guest has.
    assert_eq!(vm.control(r#"{"command":"target","bytes":1099511627776}"#)["target"], RAM);
    channel.read_exact(&mut message).unwrap();
    // The same target again is no change.
    vm.control(r#"{"command":"target","bytes":1099511627776}"#);
    channel.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(channel.read_exact(&mut message).is_err());
    vm.end().unwrap();
}

#[test]
fn a_driver_that_had_another_daemon_gets_the_target() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    vm.share_memory();
    let (mut channel, theirs) = UnixStream::pair().unwrap();
    vm.frontend.set_backend_request_fd(&theirs).unwrap();
    vm.frontend.set_config(4, VhostUserConfigFlags::WRITABLE, &512_u32.to_le_bytes()).unwrap();
    vm.start_device(ALL);
    channel.set_read_timeout(Some(LONG)).unwrap();
    let mut message = [0; 12];
    channel.read_exact(&mut message).unwrap();
    // Once, not for each ring.
    channel.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(channel.read_exact(&mut message).is_err());
    vm.end().unwrap();
}

#[test]
fn configuration_writes() {
    let mut vm = Vm::started(ALL, options());
    vm.control(r#"{"command":"target","bytes":8388608}"#);
    let flags = VhostUserConfigFlags::WRITABLE;
    // All of it, with an old target, as one front end does.
    let mut whole = [0; 16];
    whole[4..8].copy_from_slice(&512_u32.to_le_bytes());
    vm.frontend.set_config(0, flags, &whole).unwrap();
    let answer = vm.control(r#"{"command":"target"}"#);
    assert_eq!((answer["target"].as_u64(), answer["actual"].as_u64()), (Some(8 * MIB), Some(2 * MIB)));
    // One field, as another does; more than there is.
    vm.frontend.set_config(4, flags, &u32::MAX.to_le_bytes()).unwrap();
    assert_eq!(vm.control(r#"{"command":"target"}"#)["actual"], RAM);
    for (offset, bytes) in [(0, 1), (5, 4), (4, 2), (24, 4), (22, 4), (0xffc, 4)] {
        assert!(vm.frontend.set_config(offset, flags, &vec![0; bytes]).is_err(), "{bytes} bytes at {offset}");
    }
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn a_driver_that_is_bound_again() {
    let mut vm = Vm::started(ALL, options());
    for round in 0..3 {
        vm.fill(PLAY, MIB);
        assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0x10_0000, "{round}");
        vm.pages(0, &[(PLAY >> 12) as u32]);
        for index in 0..4 {
            vm.frontend.get_vring_base(index).unwrap();
        }
        if round == 1 {
            vm.frontend.reset_device().unwrap();
        }
        // With other features the queues have other numbers.
        vm.start_device(1 << 5);
        vm.fill(PLAY, MIB);
        assert_eq!(vm.ask(2, &[(PLAY, 0x10_0000, true)]), 0);
        assert!(vm.is_zero(PLAY, MIB));
        vm.start_device(ALL);
    }
    vm.end().unwrap();
}

#[test]
fn a_ring_that_has_stopped_is_not_looked_at() {
    let mut vm = Vm::started(ALL, options());
    assert!(vm.is_alive(REPORTING));
    let base = vm.frontend.get_vring_base(REPORTING).unwrap();
    assert_eq!(base, 1);
    vm.fill(PLAY, MIB);
    vm.put(REPORTING, &[(PLAY, 0x10_0000, true)]);
    vm.kick(REPORTING);
    // Another queue answers: the kick above would have been seen by now.
    vm.pages(1, &[1]);
    assert!(vm.is_filled(PLAY, MIB));
    vm.start_ring(REPORTING, 1);
    vm.kick(REPORTING);
    assert!(eventually(|| vm.is_zero(PLAY, MIB)));
    vm.end().unwrap();
}

#[test]
fn a_disabled_ring_is_not_looked_at_and_goes_on_later() {
    let mut vm = Vm::started(ALL, options());
    vm.frontend.set_vring_enable(REPORTING, false).unwrap();
    vm.fill(PLAY, MIB);
    vm.put(REPORTING, &[(PLAY, 0x10_0000, true)]);
    vm.kick(REPORTING);
    vm.pages(1, &[1]);
    assert!(vm.is_filled(PLAY, MIB));
    vm.frontend.set_vring_enable(REPORTING, true).unwrap();
    assert_eq!(vm.used(REPORTING).unwrap().1, 0x10_0000);
    vm.end().unwrap();
}

/// A chain that leaves the table, then an index that no driver writes: the ring is left alone until it is set up anew.
#[test]
fn a_ring_that_makes_no_sense() {
    let mut vm = Vm::started(ALL, options());
    let state = |vm: &Vm| vm.status()["queues"][REPORTING]["state"].as_str().unwrap().to_owned();
    let error = EventFd::new(EFD_NONBLOCK).unwrap();
    vm.frontend.set_vring_err(REPORTING, &error).unwrap();
    vm.fill(PLAY, MIB);
    vm.descriptor(REPORTING, 0, PLAY, 0x1000, 3, SIZE);
    vm.descriptor(REPORTING, SIZE, PLAY + 0x1000, 0x1000, 2, 0);
    vm.offer(REPORTING, 0);
    vm.kick(REPORTING);
    assert_eq!(vm.used(REPORTING), Some((0, 0)));
    assert_eq!(state(&vm), "running");
    let index = vm.rings[REPORTING].available() + 2;
    vm.write(index, &(SIZE + 2).to_le_bytes());
    vm.kick(REPORTING);
    assert!(eventually(|| error.read().is_ok()));
    assert_eq!(state(&vm), "broken");
    assert!(vm.status()["problems"].to_string().contains("1 queue(s) made no sense"));
    vm.put(REPORTING, &[(PLAY, 0x1000, true)]);
    vm.kick(REPORTING);
    vm.pages(1, &[1]);
    assert!(vm.is_filled(PLAY, MIB));
    vm.frontend.get_vring_base(REPORTING).unwrap();
    assert_eq!(state(&vm), "stopped");
    vm.start_ring(REPORTING, 0);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    vm.frontend.set_vring_enable(REPORTING, false).unwrap();
    assert_eq!(state(&vm), "disabled");
    vm.end().unwrap();
}

/// One kick for more than a turn has room for, and a pause in the middle.
#[test]
fn a_ring_that_is_enabled_again_goes_on_without_a_kick() {
    let mut vm = Vm::started(ALL, options());
    // Lists that take long: as many holes as one can have, no two of which touch.
    let first = (PLAY >> 12) as u32;
    let list: Vec<u8> = (0..1_u32 << 12).flat_map(|n| (first + n * 2).to_le_bytes()).collect();
    vm.write(48 * MIB, &list);
    for _ in 0..SIZE {
        vm.put(0, &[(48 * MIB, list.len() as u32, false)]);
    }
    vm.kick(0);
    assert!(eventually(|| vm.used_index(0) != 0));
    vm.frontend.set_vring_enable(0, false).unwrap();
    // An answer: the turn in which the ring was disabled is over.
    vm.pages(1, &[first]);
    let done = vm.used_index(0);
    assert!(done < SIZE, "the pause came too late for this test");
    // The others need not take as long.
    for slot in 0..SIZE {
        vm.descriptor(0, slot, 48 * MIB, 4, 0, 0);
    }
    vm.frontend.set_vring_enable(0, true).unwrap();
    assert!(eventually(|| vm.used_index(0) == SIZE), "{} of {SIZE}, {done} before", vm.used_index(0));
    vm.end().unwrap();
}

/// What was put into a ring before the device had it.
#[test]
fn a_ring_that_is_started_is_looked_at_without_a_kick() {
    let mut vm = Vm::started(ALL, options());
    assert_eq!(vm.frontend.get_vring_base(REPORTING).unwrap(), 0);
    vm.put(REPORTING, &[(PLAY, 0x1000, true)]);
    vm.frontend.set_vring_base(REPORTING, 0).unwrap();
    vm.frontend.set_vring_kick(REPORTING, &vm.rings[REPORTING].kick).unwrap();
    assert!(vm.used(REPORTING).is_some());
    vm.end().unwrap();
}

#[test]
fn discarding_can_be_suspended() {
    let mut vm = Vm::started(ALL, options());
    vm.control(r#"{"command":"discard","enabled":false}"#);
    vm.fill(PLAY, MIB);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0);
    assert_eq!(vm.pages_with_bitmap(&[(PLAY >> 12) as u32], 1).1[0], 0);
    assert!(vm.is_filled(PLAY, MIB));
    let status = vm.status();
    assert_eq!(status["working"], false);
    assert_eq!(status["skipped"]["inhibited"], MIB + PAGE);
    vm.control(r#"{"command":"discard","enabled":true}"#);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0x10_0000);
    vm.end().unwrap();
}

/// For a VMM that pins guest memory: nothing is discarded before the command, with any front end.
#[test]
fn discarding_can_begin_suspended() {
    let mut vm = Vm::started(ALL, vhost_user_balloon::device::Options { inhibited: true, ..options() });
    vm.fill(PLAY, MIB);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0);
    assert_eq!(vm.pages_with_bitmap(&[(PLAY >> 12) as u32], 1).1[0], 0);
    assert!(vm.is_filled(PLAY, MIB));
    // A guest that is reset changes nothing about it.
    vm.frontend.reset_device().unwrap();
    vm.start_device(ALL);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0);
    assert!(vm.is_filled(PLAY, MIB));
    let status = vm.status();
    assert_eq!(status["working"], false);
    assert!(status["problems"].to_string().contains("--discard off"), "{status}");
    vm.control(r#"{"command":"discard","enabled":true}"#);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x10_0000, true)]), 0x10_0000);
    assert!(vm.is_zero(PLAY, MIB));
    vm.end().unwrap();
}

/// Pages that were inflated meanwhile are discarded later, except those that the driver took back.
#[test]
fn what_was_inflated_while_suspended() {
    let suspended = vhost_user_balloon::device::Options { inhibited: true, ..options() };
    let mut vm = Vm::started(ALL, suspended);
    let pages: Vec<u32> = ((PLAY >> 12) as u32..).take(4096).collect();
    vm.fill(PLAY, 16 * MIB);
    for part in pages.chunks(256) {
        vm.pages(0, part);
    }
    vm.pages(1, &pages[5..6]);
    assert!(vm.is_filled(PLAY, 16 * MIB));
    vm.control(r#"{"command":"discard","enabled":true}"#);
    let rest = PLAY + 6 * PAGE;
    assert!(eventually(|| vm.is_zero(PLAY, 5 * PAGE) && vm.is_zero(rest, 16 * MIB - 6 * PAGE)));
    assert!(vm.is_filled(PLAY + 5 * PAGE, PAGE), "a page in use was discarded");
    assert_eq!(vm.status()["discarded"], 16 * MIB - PAGE);
    vm.end().unwrap();
    // Without such pages it ends, and the server sleeps.
    assert!(!vhost_user_balloon::device::Device::new(options()).unwrap().run_backlog());
}

#[test]
fn some_of_it_can_be_left_alone_for_tests_of_drivers() {
    let one_in = std::num::NonZeroU32::new(3);
    let reluctant = vhost_user_balloon::device::Options { inhibit_one_in: one_in, ..options() };
    let mut vm = Vm::started(ALL, reluctant);
    vm.fill(PLAY, 16 * MIB);
    let mut kept = 0;
    for piece in 0..128 {
        let at = PLAY + piece * 0x2_0000;
        let returned = vm.ask(REPORTING, &[(at, 0x2_0000, true)]);
        if returned == 0 {
            kept += 1;
            assert!(vm.is_filled(at, 0x2_0000), "what is not claimed has kept its content");
        } else {
            assert_eq!(returned, 0x2_0000);
            assert!(vm.is_zero(at, 0x2_0000));
        }
    }
    assert!((20..70).contains(&kept), "{kept} of 128");
    assert_eq!(vm.status()["skipped"]["inhibited"], kept * 0x2_0000);
    vm.end().unwrap();
}

/// Host pages of 2 MiB: whatever the order and the requests, one goes when all of it is in the balloon.
#[test]
fn large_host_pages() {
    let large = vhost_user_balloon::device::Options { discard_unit: 2 * MIB, ..options() };
    let mut vm = Vm::started(ALL, large);
    let first = ((8 * MIB) >> 12) as u32;
    vm.fill(8 * MIB, 4 * MIB);
    let pages: Vec<u32> = (0..512).rev().map(|n| first + (n * 77) % 512).collect();
    assert_eq!(vm.pages_with_bitmap(&pages[..256], 32).1[..32], [0; 32]);
    assert_eq!(vm.pages_with_bitmap(&pages[256..511], 32).1[..32], [0; 32]);
    assert!(vm.is_filled(8 * MIB, 4 * MIB));
    // One leaves again and comes back; then the last one.
    vm.pages(1, &[pages[7]]);
    assert_eq!(vm.pages_with_bitmap(&[pages[511]], 1).1[0], 0);
    assert!(vm.is_filled(8 * MIB, 4 * MIB));
    assert_eq!(vm.pages_with_bitmap(&[first + 600, pages[7]], 1).1[0], 0b10, "of this request");
    assert!(vm.is_zero(8 * MIB, 2 * MIB));
    assert!(vm.is_filled(10 * MIB, 2 * MIB));
    // A part comes back without having left: all of it goes once more.
    vm.fill(8 * MIB, 4096);
    assert_eq!(vm.pages_with_bitmap(&[first], 1).1[0], 1);
    assert!(vm.is_zero(8 * MIB, 2 * MIB));
    // Reports: whole host pages only.
    assert_eq!(vm.ask(REPORTING, &[(10 * MIB, 0x10_0000, true)]), 0);
    assert!(vm.is_filled(10 * MIB, 2 * MIB));
    assert_eq!(vm.ask(REPORTING, &[(10 * MIB, 0x20_0000, true)]), 0x20_0000);
    // In the middle of two: what is whole goes, and nothing is claimed.
    vm.fill(16 * MIB, 6 * MIB);
    assert_eq!(vm.ask(REPORTING, &[(17 * MIB, 0x40_0000, true)]), 0);
    assert!(vm.is_filled(17 * MIB, MIB) && vm.is_zero(18 * MIB, 2 * MIB) && vm.is_filled(20 * MIB, MIB));
    vm.end().unwrap();
}

/// A driver that need not tell before it uses a page again may be using one by now.
#[test]
fn large_host_pages_of_a_driver_that_does_not_tell() {
    let large = vhost_user_balloon::device::Options { discard_unit: 0x8000, ..options() };
    let mut vm = Vm::started(ALL & !1, large);
    let first = ((8 * MIB) >> 12) as u32;
    let pages: Vec<u32> = (first..first + 8).collect();
    vm.fill(8 * MIB, 0x8000);
    vm.pages(0, &pages[..4]);
    vm.pages(0, &pages[4..]);
    assert!(vm.is_filled(8 * MIB, 0x8000));
    assert_eq!(vm.pages_with_bitmap(&pages, 1).1[0], 0xff, "all in one request");
    assert!(vm.is_zero(8 * MIB, 0x8000));
    vm.end().unwrap();
}

/// What a driver had in its balloon is forgotten with the driver.
#[test]
fn large_host_pages_and_a_reset() {
    let large = vhost_user_balloon::device::Options { discard_unit: 0x2000, ..options() };
    let mut vm = Vm::started(ALL, large);
    let first = ((8 * MIB) >> 12) as u32;
    vm.fill(8 * MIB, 0x2000);
    vm.pages(0, &[first]);
    vm.frontend.get_vring_base(0).unwrap();
    vm.start_ring(0, 0);
    vm.pages(0, &[first + 1]);
    assert!(vm.is_filled(8 * MIB, 0x2000));
    // A driver with other features, whose rings were never stopped.
    vm.frontend.set_features(ALL & !(1 << 7) | VERSION_1 | PROTOCOL).unwrap();
    vm.pages(0, &[first]);
    assert!(vm.is_filled(8 * MIB, 0x2000));
    vm.end().unwrap();
}

#[test]
fn a_reset_ends_every_ring() {
    let mut vm = Vm::started(ALL, options());
    vm.frontend.set_config(4, VhostUserConfigFlags::WRITABLE, &512_u32.to_le_bytes()).unwrap();
    vm.frontend.reset_device().unwrap();
    vm.fill(PLAY, MIB);
    vm.write(0x8000, &((PLAY >> 12) as u32).to_le_bytes());
    vm.put(0, &[(0x8000, 4, false)]);
    vm.kick(0);
    let status = vm.status();
    assert_eq!((&status["features"], &status["actual"]), (&serde_json::json!([]), &serde_json::json!(0)));
    assert!(vm.is_filled(PLAY, MIB));
    assert_eq!(vm.used_index(0), 0);
    for size in [0, 100, 2048] {
        assert!(vm.frontend.set_vring_num(0, size).is_err(), "{size}");
    }
    vm.end().unwrap();
}

/// Whatever cannot be read of a deflate request, the driver may use any page again once it is answered.
#[test]
fn large_host_pages_and_a_list_that_is_none() {
    let large = vhost_user_balloon::device::Options { discard_unit: 0x2000, ..options() };
    let mut vm = Vm::started(ALL, large);
    let first = ((8 * MIB) >> 12) as u32;
    let list: Vec<u8> = first.to_le_bytes().repeat((1 << 14) + 1);
    vm.write(32 * MIB, &list);
    let cases: [(&str, &[(u64, u32, bool)]); 5] = [
        ("too long", &[(32 * MIB, list.len() as u32, false)]),
        ("too long in parts", &[(32 * MIB, 1 << 16, false), (32 * MIB, 4, false)]),
        ("not whole page frames", &[(32 * MIB, 6, false)]),
        ("outside of memory", &[(32 * MIB, 4, false), (RAM * 2, 4, false)]),
        ("in the wrong order", &[(0xc000, 1, true), (32 * MIB, 4, false)]),
    ];
    // One of two parts is in the balloon.
    let begin = |vm: &mut Vm| {
        vm.pages(1, &[first, first + 1]);
        vm.fill(8 * MIB, 0x2000);
        vm.pages(0, &[first]);
    };
    for (what, parts) in cases {
        begin(&mut vm);
        assert_eq!(vm.ask(1, parts), 0, "{what}");
        vm.pages(0, &[first + 1]);
        assert!(vm.is_filled(8 * MIB, 0x2000), "{what}: a page in use was discarded");
        vm.pages(0, &[first]);
        assert!(vm.is_zero(8 * MIB, 0x2000), "{what}: both are in the balloon");
    }
    // Without an end: more parts than a list can have.
    begin(&mut vm);
    vm.descriptor(1, 0, 32 * MIB, 4, 1, 0);
    vm.offer(1, 0);
    vm.kick(1);
    assert_eq!(vm.used(1), Some((0, 0)));
    vm.pages(0, &[first + 1]);
    assert!(vm.is_filled(8 * MIB, 0x2000), "a page in use was discarded");
    // A request to inflate that cannot be read takes nothing out of the balloon.
    begin(&mut vm);
    for (what, parts) in cases {
        assert_eq!(vm.ask(0, parts), 0, "{what}");
    }
    assert!(vm.is_filled(8 * MIB, 0x2000));
    vm.pages(0, &[first + 1]);
    assert!(vm.is_zero(8 * MIB, 0x2000));
    vm.end().unwrap();
}

#[test]
fn many_reports_at_once() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, 48 * MIB);
    for round in 0..6_u64 {
        for n in 0..SIZE {
            vm.put(
                REPORTING,
                &[(PLAY + (round * u64::from(SIZE) + u64::from(n)) * 0x1_0000, 0x1_0000, true)],
            );
        }
        vm.kick(REPORTING);
        for _ in 0..SIZE {
            assert_eq!(vm.used(REPORTING).unwrap().1, 0x1_0000);
        }
    }
    assert!(vm.is_zero(PLAY, 48 * MIB));
    assert!(vm.rings[REPORTING].call.read().unwrap() >= 1);
    vm.end().unwrap();
}

#[test]
fn status_says_why_it_does_not_work() {
    let vm = Vm::bare(options());
    assert_eq!(vm.status()["problems"][0], "no front end is connected");
    vm.end().unwrap();
    let mut vm = Vm::bare(options());
    vm.negotiate();
    vm.share_memory();
    let status = vm.status();
    assert_eq!(status["working"], false);
    assert_eq!(status["problems"][0], "the guest's driver has not started (or has stopped)");
    vm.start_device(1 << 1);
    assert_eq!(
        vm.status()["problems"][0],
        "the driver does not report free pages: only inflating gives memory back"
    );
    assert_eq!(vm.status()["working"], true);
    vm.end().unwrap();
}

/// One problem at a time, and what is claimed of each region.
#[test]
fn status_has_each_problem_once() {
    let mut vm = Vm::started(ALL, options());
    let problems = |vm: &Vm| {
        let found = vm.status()["problems"].clone();
        serde_json::from_value::<Vec<String>>(found).unwrap()
    };
    assert_eq!(problems(&vm), [""; 0]);
    assert_eq!(vm.ask(REPORTING, &[(PLAY, 0x1000, true)]), 0x1000);
    // The guest has written to nothing of this file.
    let other = memfd(8 * MIB);
    let mut region = vm.region(1 << 32, 8 * MIB, 0);
    region.mmap_handle = other.as_raw_fd();
    vm.frontend.add_mem_region(&region).unwrap();
    let promises: Vec<_> = (0..2).map(|n| vm.status()["regions"][n]["promise"].clone()).collect();
    assert_eq!(promises, ["zero (tmpfs)", "not claimed to be zero (not_known_shared)"]);
    let found = problems(&vm);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("memory at 0x100000000 is not given back: the guest was not seen"),
        "{found:?}"
    );
    vm.frontend.remove_mem_region(&region).unwrap();
    let bits = ALL | VERSION_1 | PROTOCOL;
    vm.frontend.set_features(bits | 1 << 26).unwrap();
    assert_eq!(problems(&vm), ["giving memory back is suspended while the front end logs writes"]);
    vm.frontend.set_features(bits).unwrap();
    vm.control(r#"{"command":"discard","enabled":false}"#);
    let switched_off = "giving memory back is suspended (subcommand discard, or --discard off)";
    assert_eq!(problems(&vm), [switched_off]);
    vm.end().unwrap();
}

#[test]
fn reporting_alone_works_without_poison() {
    let mut vm = Vm::started(ALL, options());
    vm.frontend.get_vring_base(0).unwrap();
    assert_eq!(vm.status()["working"], true);
    vm.frontend.set_config(12, VhostUserConfigFlags::WRITABLE, &[0xaa; 4]).unwrap();
    assert_eq!(vm.status()["working"], false);
    vm.end().unwrap();
}
