// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon beside a bare loop of fallocate(2) that punches the same holes: how much it adds.
//!
//! `cargo bench --bench punch -- --rounds N --mib N` prints one JSON line with MB/s of both, a value for
//! each round. They take turns, on the same file, which is filled before each of them.
//!
//! The front end fills memory on one CPU and both punch on another (if there is one), as it is with a
//! guest. Pages are freed faster where they were used, and that must not be on one side only.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use rustix::fs::FallocateFlags;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vhost::VhostBackend;
use vmm_sys_util::poll::PollContext;

/// How many blocks Linux reports at a time.
const BATCH: usize = 32;
const REPORTING: usize = 3;
/// A round that is thrown away.
const WARM_UPS: u64 = 1;

fn number(name: &str, otherwise: u64) -> u64 {
    let mut arguments = std::env::args().skip_while(|argument| argument != name);
    arguments.next();
    arguments.next().map_or(otherwise, |value| value.parse().expect("a number"))
}

/// Blocks as Linux reports them: of orders 9 and 10, up to `end`.
fn blocks(end: u64) -> Vec<(u64, u32)> {
    let mut found = Vec::new();
    let mut at = PLAY;
    while at < end {
        let size = if found.len() % 2 == 0 { 4 * MIB } else { 2 * MIB };
        let size = size.min(end - at);
        found.push((at, size as u32));
        at += size;
    }
    found
}

fn fill(memory: &File, end: u64) {
    let dirty = vec![0x5a; 4 << 20];
    let mut at = PLAY;
    while at < end {
        let size = (4 * MIB).min(end - at);
        std::os::unix::fs::FileExt::write_all_at(memory, &dirty[..size as usize], at).unwrap();
        at += size;
    }
}

fn bare(memory: &File, blocks: &[(u64, u32)]) {
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for (at, size) in blocks {
        rustix::fs::fallocate(memory, hole, *at, u64::from(*size)).unwrap();
    }
}

/// All blocks through the queue; each must come back as zero.
fn reported(vm: &mut Vm, called: &PollContext<u32>, blocks: &[(u64, u32)]) {
    for batch in blocks.chunks(BATCH) {
        for (at, size) in batch {
            vm.put(REPORTING, &[(*at, *size, true)]);
        }
        let last = vm.used_index(REPORTING).wrapping_add(batch.len() as u16);
        vm.kick(REPORTING);
        while vm.used_index(REPORTING) != last {
            called.wait_timeout(LONG).unwrap();
            let _ = vm.rings[REPORTING].call.read();
        }
        for (_, size) in batch {
            assert_eq!(vm.used(REPORTING).map(|(_, length)| length), Some(*size));
        }
    }
}

fn timed(work: impl FnOnce()) -> Duration {
    let began = Instant::now();
    work();
    began.elapsed()
}

/// The CPU of the front end, and that of the process that punches holes.
fn cpus() -> (usize, usize) {
    let allowed = sched_getaffinity(None).unwrap();
    let mut all = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let first = all.next().expect("a CPU");
    (first, all.next_back().unwrap_or(first))
}

/// Run on one CPU; a process that is started there stays there.
fn on<T: Send>(cpu: usize, work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let pinned = scope.spawn(|| {
            let mut only = CpuSet::new();
            only.set(cpu);
            sched_setaffinity(None, &only).unwrap();
            work()
        });
        pinned.join().unwrap()
    })
}

fn main() {
    let (here, there) = cpus();
    on(here, || measure(there));
}

fn measure(there: usize) {
    let rounds = number("--rounds", 10);
    let bytes = number("--mib", 256) * MIB;
    let end = PLAY + bytes;
    let (ours, theirs) = UnixStream::pair().unwrap();
    // The daemon inherits this one, and ends when the other is closed.
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-user-balloon"));
    command.arg(format!("--fd={}", theirs.as_raw_fd())).stdin(Stdio::null()).stderr(Stdio::null());
    let mut daemon = on(there, || command.spawn().unwrap());
    drop(theirs);
    let folder = tempfile::tempdir().unwrap();
    let mut vm = Vm::with(ours, folder.path().join("control"), folder, None);
    vm.memory = memfd(end);
    vm.negotiate();
    vm.frontend.set_mem_table(&[vm.region(0, end, 0)]).unwrap();
    vm.start_device(ALL & !(1 << 7));

    let called = PollContext::new().unwrap();
    called.add(&vm.rings[REPORTING].call, 0_u32).unwrap();
    let blocks = blocks(end);
    let mut found = [Vec::new(), Vec::new()];
    for round in 0..rounds + WARM_UPS {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            fill(&vm.memory, end);
            let took = if side == 0 {
                on(there, || timed(|| bare(&vm.memory, &blocks)))
            } else {
                timed(|| reported(&mut vm, &called, &blocks))
            };
            let seconds = took.as_secs_f64();
            assert!(vm.resident() <= PLAY + MIB, "{} bytes are still there", vm.resident());
            if round >= WARM_UPS {
                found[side as usize].push(bytes as f64 / seconds / 1e6);
            }
        }
    }
    drop(vm);
    daemon.wait().unwrap();
    let [bare, daemon] = found;
    println!(
        "{}",
        serde_json::json!({ "bytes": bytes, "blocks": blocks.len(), "bare": bare, "daemon": daemon })
    );
}
