// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the device does between two turns, which no front end can time.

use std::time::{Duration, Instant};

use balloon_protocol::{Features, PAGE_SHIFT, PAGE_SIZE, QueueKind, QueueMap, Range, Run};

use super::job::{Job, Progress, whole_run};

use super::{Device, LOG_ALL, Options};
use crate::ring::Chain;
use std::fs::File;
use std::os::unix::fs::FileExt;
use vhost::vhost_user::message::VhostUserMemoryRegion;

const UNIT: u64 = 2 << 20;

fn device(discard_unit: u64, size: u64) -> (Device, File) {
    let features = Features::MUST_TELL_HOST;
    let mut device = Device::new(Options {
        features,
        target: 0,
        memory_is_shared: true,
        inhibited: false,
        discard_unit,
        inhibit_one_in: None,
        stats_interval: None,
        turn: Duration::ZERO,
        user_mode_linux: false,
        #[cfg(feature = "lying")]
        lie: None,
    })
    .unwrap();
    device.features = features;
    let file = File::from(rustix::fs::memfd_create(c"ram", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    file.set_len(size).unwrap();
    let region = VhostUserMemoryRegion::new(0, size, 1 << 40, 0);
    let (closes, peer) = (crate::threads::Closes::Memory, crate::threads::Peer::new());
    let foreign = crate::threads::Foreign::new(file.try_clone().unwrap(), closes, peer);
    device.change_memory(|memory| memory.add(region, foreign)).unwrap();
    (device, file)
}

/// Discarding is suspended between two turns of one request.
#[test]
fn the_rest_of_a_list_is_kept() {
    let (mut device, file) = device(PAGE_SIZE, UNIT);
    file.write_all_at(&[1; 0x4000], 0).unwrap();
    let mut job = Job::new(QueueKind::Inflate, Chain::default());
    job.request = Some(device.memory.regions.begin(QueueKind::Inflate));
    job.todo = [0x2000, 0].iter().filter_map(|at| Range::new(*at, PAGE_SIZE)).collect();
    assert!(matches!(device.work(&mut job, Instant::now()), Progress::More));
    device.set_inhibited(true);
    assert!(matches!(device.work(&mut job, Instant::now()), Progress::Used(_)));
    assert_eq!(job.discarded, PAGE_SIZE);
    device.set_inhibited(false);
    while device.run_backlog() {}
    let mut bytes = [0; 0x4000];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let filled: Vec<bool> = bytes.chunks(0x1000).map(|page| page.iter().all(|byte| *byte == 1)).collect();
    assert_eq!(filled, [false, true, false, true]);
}

/// A front end that moves a ring onto a page between its discard and the answer.
#[test]
fn a_page_of_a_ring_is_not_claimed() {
    let (mut device, file) = device(PAGE_SIZE, UNIT);
    device.features = Features::DEVICE_INIT_ON_INFLATE;
    for (moves, bits) in [(false, 0b111), (true, 0b101)] {
        let chain = Chain { writable: vec![(0x8000, 1)], ..Chain::default() };
        let mut job = Job::new(QueueKind::Inflate, chain);
        job.pfns = vec![0xf, 0x10, 0x11];
        job.todo = vec![Range::new(0xf000, 0x2000).unwrap(), Range::new(0x1_1000, 0x1000).unwrap()];
        job.request = Some(device.memory.regions.begin(QueueKind::Inflate));
        assert!(matches!(device.work(&mut job, Instant::now()), Progress::More));
        let last = job.todo.pop().unwrap();
        device.discard(QueueKind::Inflate, job.request.as_ref(), last);
        if moves {
            let ring = device.ring_mut(1).unwrap();
            ring.set_size(64);
            // Of 64 entries a table is 1 KiB.
            ring.set_addresses(0x1_0000, 0x2_0000, 0x3_0000).unwrap();
        }
        assert_eq!(device.inflated(&mut job), 1);
        let mut byte = [0];
        file.read_exact_at(&mut byte, 0x8000).unwrap();
        assert_eq!(byte, [bits]);
    }
}

/// A list of scattered pages of one large host page, of which all but the last page are in the balloon.
#[test]
fn a_large_host_page_is_looked_at_once_for_a_list() {
    let size = 1 << 30;
    let (mut device, file) = device(size, size);
    let pages = u32::try_from(size >> PAGE_SHIFT).unwrap();
    device.in_balloon.insert(Run { first: 0, pages: pages - 1 });
    let list: Vec<u8> = (0..4096_u32).flat_map(|n| (n * 2).to_le_bytes()).collect();
    file.write_all_at(&list, 0).unwrap();
    let readable = vec![(0, u32::try_from(list.len()).unwrap())];
    let mut job = Job::new(QueueKind::Inflate, Chain { readable, ..Chain::default() });
    device.inflate(&mut job);
    assert!(job.todo.is_empty());
    // The last page comes in a list with others: a second look would discard the host page twice.
    file.write_all_at(&(pages - 1).to_le_bytes(), 8).unwrap();
    device.inflate(&mut job);
    let whole = Range::new(0, size).unwrap();
    assert_eq!(job.todo, [whole]);
    // A host page that lacks a page is looked at once as well: a second look would find all of it.
    let last = Run { first: pages - 1, pages: 1 };
    let (mut seen, mut targets) = (None, Vec::new());
    device.in_balloon.remove(last);
    device.targets(Run { first: 0, pages: 1 }, &mut seen, &mut targets);
    device.in_balloon.insert(last);
    device.targets(Run { first: 2, pages: 1 }, &mut seen, &mut targets);
    assert_eq!(targets, []);
    device.targets(Run { first: 2, pages: 1 }, &mut None, &mut targets);
    assert_eq!(targets, [whole]);
}

/// A driver that deflates a page while the host page that it belongs to is about to be discarded.
#[test]
fn a_host_page_that_is_in_use_again_stays() {
    let (mut device, _) = device(UNIT, UNIT);
    let range = Range::new(0, UNIT).unwrap();
    device.in_balloon.insert(whole_run(range).unwrap());
    assert_eq!(device.discard(QueueKind::Inflate, None, range), UNIT);
    device.in_balloon.remove(Run { first: 7, pages: 1 });
    assert_eq!(device.discard(QueueKind::Inflate, None, range), 0);
}

/// An answer is written into a report that is not finished.
#[test]
fn a_report_into_which_the_device_writes_is_no_claim() {
    let (mut device, file) = device(PAGE_SIZE, UNIT);
    device.features = Features::MUST_TELL_HOST | Features::REPORTING | Features::DEVICE_INIT_REPORTED;
    device.queues = QueueMap::new(device.features);
    file.write_all_at(&[1; 0x4000], 0).unwrap();
    for (written, length) in [(0x8000, 0x4000), (0x1000, 0)] {
        let chain = Chain { writable: vec![(0, 0x2000), (0x2000, 0x2000)], ..Chain::default() };
        let mut job = Job::new(QueueKind::Reporting, chain);
        device.report(&mut job);
        job.todo.reverse();
        assert!(matches!(device.work(&mut job, Instant::now()), Progress::More));
        device.memory.regions.wrote([Range::new(written, 16).unwrap()]);
        assert!(matches!(device.work(&mut job, Instant::now()), Progress::Used(used) if used == length));
    }
}

/// The front end begins to log writes between two turns: the log has nothing of what was discarded.
#[test]
fn a_report_over_which_a_log_begins_is_no_claim() {
    let (mut device, file) = device(PAGE_SIZE, UNIT);
    let features = Features::MUST_TELL_HOST | Features::REPORTING | Features::DEVICE_INIT_REPORTED;
    device.accept(features.bits());
    file.write_all_at(&[1; 0x4000], 0).unwrap();
    let chain = Chain { writable: vec![(0, 0x2000), (0x2000, 0x2000)], ..Chain::default() };
    let mut job = Job::new(QueueKind::Reporting, chain);
    device.report(&mut job);
    assert!(matches!(device.work(&mut job, Instant::now()), Progress::More));
    device.accept(features.bits() | LOG_ALL);
    assert!(device.is_suspended() && !device.is_inhibited());
    device.accept(features.bits());
    assert!(matches!(device.work(&mut job, Instant::now()), Progress::Used(0)));
    assert_eq!(job.discarded, 0x4000);
}
