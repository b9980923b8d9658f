// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads beside the one that serves.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use crate::signals;

/// Start a thread and wait until it runs: the sandbox forbids what a thread does when it starts.
pub fn start(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let (started, wait) = channel();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        signals::block_timer();
        let _ = started.send(());
        work();
    })?;
    wait.recv().map_err(io::Error::other)
}

static CLOSER: OnceLock<Sender<OwnedFd>> = OnceLock::new();
/// How many descriptors wait for the thread, or keep it waiting.
static WAITING: AtomicUsize = AtomicUsize::new(0);

/// Start the thread that closes what a front end should not have sent.
pub fn start_closer() -> io::Result<()> {
    let (sender, unwanted) = channel();
    let _ = CLOSER.set(sender);
    start("closer", move || {
        for file in unwanted {
            drop(file);
            WAITING.fetch_sub(1, Ordering::SeqCst);
        }
    })
}

/// Close a descriptor of an unknown kind. close(2) can wait for ever: for the server of a FUSE file, or for
/// the peer of a TCP connection.
pub fn close_elsewhere(unwanted: OwnedFd) {
    if let Some(closer) = CLOSER.get() {
        WAITING.fetch_add(1, Ordering::SeqCst);
        // Without the thread, this is closed here.
        let _ = closer.send(unwanted);
    }
}

/// How many descriptors are still to be closed.
pub fn waiting() -> usize {
    WAITING.load(Ordering::SeqCst)
}
