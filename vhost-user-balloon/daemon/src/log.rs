// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The log. Standard error can be a pipe that a front end has as well, and whose lock it holds: a thread of its own writes
//! there.

use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use crate::sandbox::{Row, SandboxError, Seccomp};
use crate::threads;

/// How many lines wait for the thread, and how long one may be: 1 MiB.
const MAX_LINES: usize = 256;
const MAX_LINE: usize = 4096;
/// How long the end of the daemon waits for its last lines.
const WAIT: Duration = Duration::from_millis(500);

enum Entry {
    Line(Vec<u8>),
    /// All before it has been written.
    Mark(SyncSender<()>),
}

static QUEUE: OnceLock<SyncSender<Entry>> = OnceLock::new();
/// Lines that had no room since the last one that was written.
static LOST: AtomicU64 = AtomicU64::new(0);

/// Start the thread. Before that, lines are written where they are made.
pub fn start(seccomp: Seccomp) -> Result<(), SandboxError> {
    let (queue, entries) = sync_channel(MAX_LINES);
    threads::start("log", seccomp, Row::log(), move || {
        for entry in entries {
            match entry {
                Entry::Line(line) => write(&line),
                Entry::Mark(done) => drop(done.try_send(())),
            }
        }
    })?;
    let _ = QUEUE.set(queue);
    Ok(())
}

fn write(line: &[u8]) {
    let lost = LOST.swap(0, Ordering::SeqCst);
    let mut error = io::stderr();
    let _ = error.write_all(line);
    if lost != 0 {
        let _ = writeln!(error, "{lost} lines of the log are lost: standard error was not read");
    }
}

/// Wait until all lines are written, if that is soon.
pub fn finish() {
    let Some(queue) = QUEUE.get() else { return };
    let (done, wait) = sync_channel(1);
    if queue.try_send(Entry::Mark(done)).is_ok() {
        let _ = wait.recv_timeout(WAIT);
    }
}

/// Takes one line with each write.
pub struct Lines;

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let Some(queue) = QUEUE.get() else { return io::stderr().write(line) };
        let kept = line.get(..MAX_LINE).unwrap_or(line);
        if queue.try_send(Entry::Line(kept.to_vec())).is_err() {
            LOST.fetch_add(1, Ordering::SeqCst);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
