// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device against drivers and front ends that want to do harm.
//!
//! After each attempt the device still does its work for the rest of the guest, or has ended with an
//! error that says why; never with a panic, and nothing outside of the guest's memory has changed.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::type_complexity)]

mod common;

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use common::*;
use rustix::pipe::PipeFlags;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

const REPORTING: usize = 3;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ENABLE: u32 = 18;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn longs(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|w| w.to_ne_bytes()).collect()
}

fn malformed(vm: &Vm) -> u64 {
    vm.status()["malformed"].as_u64().unwrap()
}

#[test]
fn an_available_index_from_nowhere() {
    let mut vm = Vm::started(ALL, options());
    vm.write(vm.rings[0].available() + 2, &40_000_u16.to_le_bytes());
    for _ in 0..1000 {
        vm.kick(0);
    }
    assert!(eventually(|| vm.status()["queues"][0]["state"] == "broken"));
    assert_eq!(vm.used_index(0), 0);
    // Once, however often it is kicked, and the other queues go on.
    for _ in 0..1000 {
        vm.kick(0);
    }
    assert_eq!(malformed(&vm), 1);
    assert!(vm.is_alive(REPORTING));
    // A driver that begins anew has a queue again.
    vm.frontend.get_vring_base(0).unwrap();
    vm.start_ring(0, 0);
    assert_eq!(vm.pages(0, &[(PLAY >> 12) as u32]), 0);
    vm.end().unwrap();
}

#[test]
fn chains_that_loop_or_end_nowhere() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, MIB);
    let cases: [&[(u16, u16)]; 4] =
        [&[(0, 0)], &[(0, 1), (1, 0)], &[(0, 127), (127, 5), (5, 0)], &[(0, 60_000)]];
    for links in cases {
        for (slot, next) in links {
            vm.descriptor(REPORTING, *slot, PLAY, 0x1000, 1 | 2, *next);
        }
        vm.offer(REPORTING, 0);
        vm.kick(REPORTING);
        assert_eq!(vm.used(REPORTING), Some((0, 0)), "{links:?}");
    }
    assert!(vm.is_filled(PLAY, MIB), "what is no report is not discarded");
    // A head that is none.
    vm.offer(REPORTING, 60_000);
    vm.kick(REPORTING);
    assert!(eventually(|| vm.status()["queues"][3]["state"] == "broken"));
    assert_eq!(vm.pages(0, &[(PLAY >> 12) as u32]), 0);
    vm.end().unwrap();
}

#[test]
fn a_list_that_loops_is_no_list() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, MIB);
    vm.write(0x8000, &((PLAY >> 12) as u32).to_le_bytes());
    vm.descriptor(0, 0, 0x8000, 4, 1, 0);
    vm.offer(0, 0);
    vm.kick(0);
    assert_eq!(vm.used(0), Some((0, 0)));
    assert!(vm.is_filled(PLAY, MIB));
    vm.end().unwrap();
}

#[test]
fn addresses_and_lengths_that_overflow() {
    let mut vm = Vm::started(ALL, options());
    for (address, length) in [
        (u64::MAX, u32::MAX),
        (u64::MAX - 4095, 4096),
        (0, u32::MAX),
        (RAM - 0x1000, u32::MAX - 0xfff),
        (1 << 63, 0x8000_0000),
        (PLAY, 0),
    ] {
        for writable in [true, false] {
            for ring in 0..4 {
                if ring == 2 {
                    vm.put(2, &[(address, length, writable)]);
                    vm.kick(2);
                } else if !(ring == REPORTING && address == 0) {
                    assert_eq!(
                        vm.ask(ring, &[(address, length, writable)]),
                        0,
                        "ring {ring}: {address:#x}+{length:#x}"
                    );
                }
            }
        }
    }
    // Two that are 4 GiB together, and more.
    assert_eq!(vm.ask(0, &[(0x8000, u32::MAX, false), (0x8000, u32::MAX, false)]), 0);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn the_whole_of_memory_in_one_report() {
    let mut vm = Vm::started(ALL, options());
    vm.fill(PLAY, MIB);
    let blocks = vm.resident();
    assert_eq!(vm.ask(REPORTING, &[(0, RAM as u32, true)]), 0, "the rings are in it");
    assert!(vm.is_filled(PLAY, MIB));
    assert!(vm.resident() >= blocks);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn rings_are_not_punched() {
    let mut vm = Vm::started(ALL, options());
    for ring in 0..4 {
        let page = vm.rings[ring].base;
        for at in [page, page + 0x1000, page + 0x2000] {
            assert_eq!(vm.ask(REPORTING, &[(at, 0x1000, true)]), 0);
            let (_, bits) = vm.pages_with_bitmap(&[(at >> 12) as u32], 1);
            assert_eq!(bits[0], 0);
        }
    }
    // The list itself, on the other hand, is the driver's to lose.
    assert_eq!(vm.pages(0, &[8]), 0);
    assert!(vm.is_zero(0x8000, 0x1000));
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn lists_of_any_length() {
    let mut vm = Vm::started(ALL, options());
    let first = (PLAY >> 12) as u32;
    // 4 MiB of page frames, and a little more than is taken at once.
    let list: Vec<u8> = (0..1_u32 << 20).flat_map(|n| (first + n % 64).to_le_bytes()).collect();
    vm.write(32 * MIB, &list);
    vm.fill(PLAY, 0x1000);
    for length in [4 << 20, (1 << 16) + 4] {
        assert_eq!(vm.ask(0, &[(32 * MIB, length, false)]), 0);
        assert!(vm.is_filled(PLAY, 0x1000), "{length}");
    }
    // 64 KiB in several parts: all of it is used.
    let began = Instant::now();
    assert_eq!(vm.ask(0, &[(32 * MIB, 1 << 15, false), (32 * MIB + (1 << 15), 1 << 15, false)]), 0);
    assert!(vm.is_zero(PLAY, 64 * PAGE));
    assert!(began.elapsed() < Duration::from_secs(5));
    for ragged in [1, 2, 3, 5, 1023] {
        vm.fill(PLAY, 0x1000);
        assert_eq!(vm.ask(0, &[(32 * MIB, ragged, false)]), 0);
        assert!(vm.is_filled(PLAY, 0x1000), "{ragged} bytes");
    }
    // Split in the middle of a page frame, it is one list all the same.
    assert_eq!(vm.ask(0, &[(32 * MIB, 2, false), (32 * MIB + 2, 2, false)]), 0);
    assert!(vm.is_zero(PLAY, PAGE));
    vm.end().unwrap();
}

/// The front end does not wait for a guest that always has more to do than can be done.
#[test]
fn a_guest_that_refills_its_ring() {
    use std::os::unix::fs::FileExt;
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut vm = Vm::started(ALL, options());
    // As many holes as a list can have, no two of which touch, and that list in each entry of the ring.
    let first = (PLAY >> 12) as u32;
    let list: Vec<u8> = (0..1_u32 << 14).flat_map(|n| (first + n * 2 % 0x2000).to_le_bytes()).collect();
    vm.write(32 * MIB + PLAY, &list);
    let began = Instant::now();
    assert_eq!(vm.ask(0, &[(32 * MIB + PLAY, list.len() as u32, false)]), 0);
    // What a turn, which ends with a list, and the rest of the one before have room for.
    let room = 2 * (10_000_000 / began.elapsed().as_nanos() + 1) + 1;
    for slot in 0..SIZE {
        vm.descriptor(0, slot, 32 * MIB + PLAY, list.len() as u32, 0, 0);
        vm.write(vm.rings[0].available() + 4 + u64::from(slot) * 2, &slot.to_le_bytes());
    }
    // The list is not among what goes.
    assert!(u64::from(first + 0x2000) << 12 <= 32 * MIB + PLAY);
    let memory = vm.memory.try_clone().unwrap();
    let (used, available) = (vm.rings[0].used() + 2, vm.rings[0].available() + 2);
    let stop = std::sync::Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let guest = std::thread::spawn(move || {
        let mut done = [0; 2];
        while !stopped.load(Ordering::Relaxed) {
            memory.read_exact_at(&mut done, used).unwrap();
            let next = u16::from_le_bytes(done).wrapping_add(SIZE);
            memory.write_all_at(&next.to_le_bytes(), available).unwrap();
        }
        u16::from_le_bytes(done)
    });
    assert!(eventually(|| vm.read(available, 2) == (SIZE + 1).to_le_bytes()));
    vm.kick(0);
    assert!(eventually(|| vm.used_index(0) > 1), "it has begun");
    vm.socket.set_read_timeout(Some(LONG)).unwrap();
    let mut socket = vm.socket.try_clone().unwrap();
    // In lists and not in seconds: how long one takes depends on what else the machine has to do. So does how
    // long this thread has to wait for its own turn, but not each time.
    let mut done = Vec::new();
    let mut answered = |vm: &Vm, request, body: &[u8], reply: usize| {
        let before = vm.used_index(0);
        vm.raw(request, 1, body, &[]);
        socket.read_exact(&mut vec![0; 12 + reply]).expect("an answer");
        done.push(vm.used_index(0).wrapping_sub(before));
    };
    for _ in 0..10 {
        answered(&vm, GET_CONFIG, &[words(&[0, 16, 0]), vec![0; 16]].concat(), 12 + 16);
    }
    let before = vm.used_index(0);
    assert!(eventually(|| vm.used_index(0) != before), "the ring is served all the same");
    answered(&vm, GET_VRING_BASE, &words(&[0, 0]), 8);
    stop.store(true, Ordering::Relaxed);
    guest.join().unwrap();
    done.sort_unstable();
    assert!(
        u128::from(done[done.len() / 2]) <= room,
        "{done:?} lists were done before answers, room for {room}"
    );
    assert!(vm.rings[0].call.read().unwrap() >= 1, "the guest was told of what was done");
    assert_eq!(vm.status()["malformed"], 0);
    vm.end().unwrap();
}

#[test]
fn parts_in_the_wrong_order() {
    let mut vm = Vm::started(ALL, options());
    vm.write(0x8000, &((PLAY >> 12) as u32).to_le_bytes());
    vm.write(0xc000, &[0xff]);
    vm.fill(PLAY, PAGE);
    assert_eq!(vm.ask(0, &[(0xc000, 1, true), (0x8000, 4, false)]), 0);
    assert_eq!(vm.read(0xc000, 1), [0xff]);
    assert!(vm.is_filled(PLAY, PAGE));
    // An answer that would go outside of memory.
    assert_eq!(vm.ask(0, &[(0x8000, 4, false), (RAM * 4, 8, true)]), 0);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn statistics_without_end() {
    let mut vm = Vm::started(ALL, options());
    vm.put(2, &[(RAM * 2, 5, false), (PLAY, 32 << 20, false)]);
    vm.kick(2);
    assert_eq!(vm.used(2).map(|u| u.1), Some(0), "outside of memory");
    vm.put(2, &[(PLAY, 32 << 20, false)]);
    vm.put(2, &[(PLAY, 10, false)]);
    vm.kick(2);
    assert!(vm.used(2).is_some(), "a second one goes back at once");
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn a_bell_that_is_a_full_pipe() {
    let mut vm = Vm::started(ALL, options());
    // Without O_NONBLOCK, and with nobody who reads it.
    let (_reader, writer) = rustix::pipe::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&writer, &[0; 4096]).is_ok() {}
    while rustix::io::write(&writer, &[0; 1]).is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    assert!(vm.raw_accepted(SET_VRING_CALL, &longs(&[REPORTING as u64]), &[writer.as_raw_fd()]));
    for _ in 0..20 {
        assert!(vm.is_alive(REPORTING));
    }
    vm.end().unwrap();
}

#[test]
fn a_bell_nobody_hears() {
    let mut vm = Vm::started(ALL, options());
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).unwrap();
    assert!(vm.raw_accepted(SET_VRING_CALL, &longs(&[REPORTING as u64]), &[writer.as_raw_fd()]));
    drop(reader);
    // No SIGPIPE.
    assert!(vm.is_alive(REPORTING));
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn kicks_that_are_none() {
    let mut vm = Vm::started(ALL, options());
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let file = tempfile::tempfile().unwrap();
    for (what, fd) in
        [("/dev/zero", zero.as_raw_fd()), ("a file", file.as_raw_fd()), ("memory", vm.memory.as_raw_fd())]
    {
        for request in [SET_VRING_KICK, SET_VRING_CALL] {
            assert!(!vm.raw_accepted(request, &longs(&[0]), &[fd]), "{what}");
        }
    }
    // A pipe whose other end is closed is readable for ever; it is looked at once.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    assert!(vm.raw_accepted(SET_VRING_KICK, &longs(&[0]), &[reader.as_raw_fd()]));
    drop((reader, writer));
    assert!(eventually(|| malformed(&vm) >= 1));
    let count = malformed(&vm);
    assert!(vm.is_alive(REPORTING));
    assert_eq!(malformed(&vm), count);
    // So is one with a writing end for reading.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    assert!(vm.raw_accepted(SET_VRING_KICK, &longs(&[1]), &[writer.as_raw_fd()]));
    drop(reader);
    assert!(vm.is_alive(REPORTING));
    // No descriptor at all: the ring is not started by that.
    assert!(vm.raw_accepted(SET_VRING_KICK, &longs(&[1 | 0x100]), &[]));
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

/// Enabling a ring has it looked at: also one that there is no way to look at.
#[test]
fn rings_that_are_enabled_and_not_started() {
    let mut vm = Vm::bare(options());
    vm.negotiate();
    vm.share_memory();
    vm.frontend.set_features(ALL | VERSION_1 | PROTOCOL).unwrap();
    let enable = |vm: &mut Vm| {
        for index in 0..5 {
            assert!(vm.raw_accepted(SET_VRING_ENABLE, &words(&[index, 1]), &[]));
        }
        assert!(!vm.raw_accepted(SET_VRING_ENABLE, &words(&[5, 1]), &[]));
    };
    enable(&mut vm);
    vm.start_device(ALL);
    // One that is no queue; one whose kick is gone; one that is stopped; one that is broken.
    vm.start_ring(4, 0);
    assert!(vm.raw_accepted(SET_VRING_KICK, &longs(&[1 | 0x100]), &[]));
    vm.frontend.get_vring_base(2).unwrap();
    vm.write(vm.rings[0].available() + 2, &40_000_u16.to_le_bytes());
    enable(&mut vm);
    assert!(eventually(|| vm.status()["queues"][0]["state"] == "broken"));
    enable(&mut vm);
    assert_eq!(malformed(&vm), 1);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn memory_that_is_none() {
    let mut vm = Vm::started(ALL, options());
    let table = |guest: u64, size: u64, user: u64, offset: u64| {
        [words(&[1, 0]), longs(&[guest, size, user, offset])].concat()
    };
    let memory = vm.memory.as_raw_fd();
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    let cases = [
        ("past its end", table(0, RAM + 1, USER, 0), memory),
        ("its offset past its end", table(0, RAM, USER, PAGE), memory),
        ("an offset that is none", table(0, RAM, USER, 1), memory),
        ("a pipe", table(0, PAGE, USER, 0), pipe.as_raw_fd()),
    ];
    // What there was is the guest's no longer: it is left alone until there is memory again.
    let is_gone = |vm: &mut Vm, what: &str| {
        assert_eq!(vm.status()["regions"], serde_json::json!([]), "{what}");
        let (used, before) = (vm.used_index(REPORTING), malformed(vm));
        vm.fill(PLAY, MIB);
        vm.put(REPORTING, &[(PLAY, 0x10_0000, true)]);
        vm.kick(REPORTING);
        assert!(eventually(|| malformed(vm) > before), "{what}");
        assert_eq!(vm.status()["queues"][REPORTING]["state"], "broken", "{what}");
        assert_eq!(vm.used_index(REPORTING), used, "{what}");
        assert!(vm.is_filled(PLAY, MIB), "{what}");
        vm.share_memory();
        vm.start_device(ALL);
        assert!(vm.is_alive(REPORTING), "{what}");
    };
    for (what, body, fd) in &cases {
        assert!(!vm.raw_accepted(SET_MEM_TABLE, body, &[*fd]), "{what}");
        is_gone(&mut vm, what);
    }
    // Two that overlap, in the guest or in the front end.
    for second in [[RAM / 2, RAM, USER + RAM, 0], [RAM, RAM, USER, 0]] {
        let body = [words(&[2, 0]), longs(&[0, RAM, USER, 0]), longs(&second)].concat();
        assert!(!vm.raw_accepted(SET_MEM_TABLE, &body, &[memory, memory]));
        is_gone(&mut vm, "overlapping");
    }
    // One region more or less: what is refused changes nothing.
    assert!(vm.frontend.add_mem_region(&vm.region(RAM / 2, MIB, 0)).is_err());
    assert!(vm.frontend.remove_mem_region(&vm.region(0, MIB, 0)).is_err());
    assert!(vm.is_alive(REPORTING));
    assert_eq!(vm.status()["regions"].as_array().unwrap().len(), 1);
    vm.end().unwrap();
}

#[test]
fn memory_is_taken_away_while_rings_are_in_it() {
    let mut vm = Vm::started(ALL, options());
    vm.frontend.remove_mem_region(&vm.region(0, RAM, 0)).unwrap();
    vm.put(REPORTING, &[(PLAY, 0x1000, true)]);
    vm.kick(REPORTING);
    vm.kick(0);
    assert!(eventually(|| vm.status()["queues"][3]["state"] == "broken"));
    vm.share_memory();
    vm.start_device(ALL);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn rings_that_are_none() {
    let mut vm = Vm::started(ALL, options());
    for (index, size) in [(0, 0), (0, 3), (0, 2048), (0, 65_536), (0, u32::MAX), (5, 128), (u32::MAX, 128)] {
        assert!(
            !vm.raw_accepted(SET_VRING_NUM, &words(&[index, size]), &[]),
            "{size} entries for ring {index}"
        );
    }
    assert!(!vm.raw_accepted(SET_VRING_BASE, &words(&[0, 65_536]), &[]));
    assert!(!vm.raw_accepted(SET_VRING_BASE, &words(&[9, 0]), &[]));
    let address = |index: u32, descriptors: u64, used: u64, available: u64| {
        [words(&[index, 0]), longs(&[descriptors, used, available, 0])].concat()
    };
    for body in [
        address(5, USER, USER, USER),
        address(0, 0, 0, 0),
        address(0, USER + RAM, USER, USER),
        address(0, USER, USER + RAM, USER + 0x1000),
        address(0, !15, USER, USER),
    ] {
        assert!(!vm.raw_accepted(SET_VRING_ADDR, &body, &[]), "{body:?}");
    }
    // The driver's pages are where the end of the ring would be: found when it is used.
    let end = address(0, USER + RAM - 16, USER + 0x9000, USER + RAM - 64);
    assert!(vm.raw_accepted(SET_VRING_ADDR, &end, &[]));
    vm.kick(0);
    assert!(vm.frontend.set_vring_enable(7, true).is_err());
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn features_that_were_not_offered() {
    let mut vm = Vm::started(ALL, options());
    for bits in [1_u64 << 3, 1 << 8, 1 << 28, 1 << 29, 1 << 34, u64::MAX] {
        assert!(!vm.raw_accepted(SET_FEATURES, &longs(&[bits]), &[]), "{bits:#x}");
    }
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn a_base_of_no_ring_ends_it_with_a_word() {
    let vm = Vm::started(ALL, options());
    vm.raw(GET_VRING_BASE, 1, &words(&[77, 0]), &[]);
    let thread = vm.server;
    let ended = thread.unwrap().join().expect("no panic");
    assert!(ended.unwrap_err().to_string().contains("protocol"));
}

#[test]
fn channels_that_are_none() {
    let mut vm = Vm::started(ALL, options());
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert!(!vm.raw_accepted(SET_BACKEND_REQ_FD, &[], &[]));
    assert!(!vm.raw_accepted(SET_BACKEND_REQ_FD, &[], &[pipe.as_raw_fd()]));
    let (one, two) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(!vm.raw_accepted(SET_BACKEND_REQ_FD, &[], &[one.as_raw_fd(), two.as_raw_fd()]));
    assert!(vm.raw_accepted(SET_BACKEND_REQ_FD, &[1, 2, 3], &[one.as_raw_fd()]), "a body is of no interest");
    // Nobody reads it: it fills up, and nothing waits for it. Then the other end goes.
    for n in 0..20_000_u64 {
        vm.control(&format!("{{\"command\":\"target\",\"bytes\":{}}}", (n % 100) * PAGE));
        if n == 200 {
            break;
        }
    }
    drop((one, two));
    vm.control(r#"{"command":"target","bytes":4096}"#);
    vm.control(r#"{"command":"target","bytes":8192}"#);
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn messages_that_are_none() {
    let cases: [(&str, Vec<u8>); 7] = [
        ("nothing", vec![]),
        ("a part of a header", vec![1, 0, 0]),
        ("no request", words(&[0, 1, 0])),
        ("an unknown request", words(&[200, 1, 0])),
        ("another version", words(&[1, 2, 0])),
        ("a body without end", words(&[SET_FEATURES, 1, u32::MAX])),
        ("a body of the wrong size", [words(&[SET_FEATURES, 1, 4]), vec![1, 2, 3, 4]].concat()),
    ];
    for (what, bytes) in cases {
        let mut vm = Vm::started(ALL, options());
        vm.socket.write_all(&bytes).unwrap();
        vm.socket.shutdown(std::net::Shutdown::Write).unwrap();
        let ended = vm.server.take().unwrap().join().expect("no panic");
        assert_eq!(ended.is_ok(), what == "nothing", "{what}: {ended:?}");
    }
}

#[test]
fn a_message_that_stops_in_the_middle() {
    let mut vm = Vm::started(ALL, options());
    let began = Instant::now();
    vm.socket.write_all(&words(&[SET_FEATURES, 1, 8])).unwrap();
    let ended = vm.server.take().unwrap().join().expect("no panic");
    assert!(ended.is_err());
    assert!(began.elapsed() < Duration::from_secs(8), "it is not waited for");
}

#[test]
fn more_descriptors_than_there_can_be() {
    let mut vm = Vm::started(ALL, options());
    let many: Vec<i32> = (0..40).map(|_| vm.memory.as_raw_fd()).collect();
    vm.raw(SET_MEM_TABLE, 1 | 8, &words(&[40, 0]), &many);
    let mut rest = Vec::new();
    vm.socket.set_read_timeout(Some(LONG)).unwrap();
    let _ = vm.socket.read_to_end(&mut rest);
    // Refused or hung up on; in no case a panic.
    drop(vm.socket.shutdown(std::net::Shutdown::Both));
    let _ = vm.server.take().unwrap().join().expect("no panic");
}

#[test]
fn configuration_out_of_bounds() {
    let mut vm = Vm::started(ALL, options());
    let flags = VhostUserConfigFlags::WRITABLE;
    assert!(vm.frontend.set_config(4090, flags, &[0; 4]).is_err());
    let (_, read) = vm.frontend.get_config(12, 200, flags, &[0; 200]).unwrap();
    assert!(read[4..].iter().all(|b| *b == 0));
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}

#[test]
fn control_clients_that_are_none() {
    let mut vm = Vm::started(ALL, options());
    let path = vm.control.clone();
    let connect = || std::os::unix::net::UnixStream::connect(&path).unwrap();
    // One that never reads, one that never ends its line, one that sends no JSON, and too many of them.
    let mut deaf = connect();
    deaf.set_nonblocking(true).unwrap();
    for _ in 0..20_000 {
        if deaf.write_all(b"{\"command\":\"metrics\"}\n").is_err() {
            break;
        }
    }
    let mut endless = connect();
    endless.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    for _ in 0..100 {
        if endless.write_all(&[b'x'; 1000]).is_err() {
            break;
        }
    }
    let crowd: Vec<_> = (0..100).map(|_| connect()).collect();
    assert!(vm.is_alive(REPORTING));
    drop((deaf, endless, crowd));
    assert!(eventually(|| {
        let mut stream = connect();
        stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut answer = [0; 400];
        stream.write_all(b"\xff\xfe\n{\"command\":\"status\"\n").is_ok()
            && stream
                .read(&mut answer)
                .is_ok_and(|got| answer[..got].starts_with(b"{\"error\":\"not a request"))
    }));
    assert_eq!(vm.status()["ok"], true);
    vm.end().unwrap();
}

/// Anything at all in the rings, again and again.
#[test]
fn rings_full_of_noise() {
    let mut vm = Vm::started(ALL, options());
    let guard = 0x5a;
    let outside = memfd(MIB);
    std::os::unix::fs::FileExt::write_all_at(&outside, &vec![guard; MIB as usize], 0).unwrap();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..300 {
        for ring in 0..4 {
            let base = vm.rings[ring].base;
            let noise: Vec<u8> = (0..u64::from(SIZE) * 2).flat_map(|_| random().to_le_bytes()).collect();
            vm.write(base, &noise);
            // Addresses that mostly exist make for more than errors.
            for slot in 0..u64::from(SIZE) {
                vm.write(base + slot * 16, &(random() % (RAM * 2)).to_le_bytes());
                vm.write(base + slot * 16 + 8, &((random() % 0x20_0000) as u32).to_le_bytes());
                vm.write(base + slot * 16 + 12, &((random() % 4) as u16).to_le_bytes());
                vm.write(base + slot * 16 + 14, &((random() % 130) as u16).to_le_bytes());
            }
            let heads: Vec<u8> = (0..SIZE).flat_map(|_| ((random() % 130) as u16).to_le_bytes()).collect();
            vm.write(base + 0x1004, &heads);
            let used = vm.used_index(ring);
            vm.write(base + 0x1002, &used.wrapping_add((random() % 129) as u16).to_le_bytes());
            vm.kick(ring);
        }
        if vm.status()["queues"].to_string().contains("broken") {
            for ring in 0..4 {
                vm.frontend.get_vring_base(ring).unwrap();
                vm.start_ring(ring, 0);
            }
        }
    }
    for ring in 0..4 {
        vm.frontend.get_vring_base(ring).unwrap();
        vm.start_ring(ring, 0);
    }
    assert!(vm.is_alive(REPORTING));
    vm.end().unwrap();
}
