// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads beside the one that serves: they close what peers sent, and send calls to sockets.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};

use rustix::event::EventfdFlags;
use rustix::net::Shutdown;

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

/// What a thread closes. There is one thread for each, so that a peer that makes one wait harms only its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closes {
    /// Events and guest memory. Closing them takes a while (the last descriptor of a memfd frees its pages) and
    /// has an end.
    Known,
    /// Descriptors of all other kinds that a front end sent. Closing one can take for ever: a FUSE file waits for
    /// its server, a TCP connection for its peer.
    Unknown,
    /// Connections to the front end's socket. With a connection the kernel closes what is in flight to it.
    FrontEnds,
    /// Connections to the other sockets.
    Clients,
}

impl Closes {
    const ALL: [Self; 4] = [Self::Known, Self::Unknown, Self::FrontEnds, Self::Clients];

    fn name(self) -> &'static str {
        match self {
            Self::Known => "close-known",
            Self::Unknown => "close-unknown",
            Self::FrontEnds => "close-front",
            Self::Clients => "close-clients",
        }
    }

    /// How many descriptors may wait before no more are received. `LimitNOFILE` of the unit and [`DESCRIPTORS`]
    /// have room for all of them.
    fn limit(self) -> usize {
        match self {
            Self::Known => 128,
            Self::Unknown | Self::FrontEnds | Self::Clients => 64,
        }
    }

    fn closer(self) -> Option<&'static Closer> {
        CLOSERS.get()?.iter().find(|closer| closer.closes == self)
    }

    /// Whether too many descriptors of this kind wait to be closed.
    pub fn is_full(self) -> bool {
        self.closer().is_some_and(|closer| closer.waiting.load(Ordering::SeqCst) >= self.limit())
    }
}

/// How many descriptors this process may need at once: 256 regions, 16 of rings and the channel, 32 clients, 16
/// connections without a message, 32 of half a message, those that wait to be closed (128 + 3 * 64), its own
/// (about 16), and 253 that come with one call.
pub const DESCRIPTORS: u64 = 1024;

struct Closer {
    closes: Closes,
    queue: Sender<OwnedFd>,
    /// How many descriptors wait for the thread, or keep it waiting.
    waiting: AtomicUsize,
}

static CLOSERS: OnceLock<Vec<Closer>> = OnceLock::new();
/// An event: a thread is no longer full.
static DRAINED: OnceLock<OwnedFd> = OnceLock::new();

/// Start the threads that close descriptors.
pub fn start_closers() -> io::Result<()> {
    let drained = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let _ = DRAINED.set(drained);
    let mut closers = Vec::new();
    let mut work = Vec::new();
    for closes in Closes::ALL {
        let (queue, unwanted) = channel();
        closers.push(Closer { closes, queue, waiting: AtomicUsize::new(0) });
        work.push((closes, unwanted));
    }
    let _ = CLOSERS.set(closers);
    for (closes, unwanted) in work {
        start(closes.name(), move || {
            for file in unwanted {
                drop(file);
                let before = closes.closer().map(|closer| closer.waiting.fetch_sub(1, Ordering::SeqCst));
                if before == Some(closes.limit())
                    && let Some(event) = DRAINED.get()
                {
                    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
                }
            }
        })?;
    }
    Ok(())
}

/// What becomes readable when one of the threads is no longer full.
pub fn drained() -> Option<BorrowedFd<'static>> {
    DRAINED.get().map(AsFd::as_fd)
}

/// Take what [`drained`] has.
pub fn take_drained() {
    if let Some(event) = DRAINED.get() {
        let _ = rustix::io::read(event, &mut [0; 8]);
    }
}

/// A descriptor that a peer made, or of which it has a copy. Its thread closes it.
#[derive(Debug)]
pub struct Foreign<T: Into<OwnedFd>> {
    value: ManuallyDrop<T>,
    closes: Closes,
}

impl<T: Into<OwnedFd>> Foreign<T> {
    pub fn new(value: T, closes: Closes) -> Self {
        Self { value: ManuallyDrop::new(value), closes }
    }

    /// The same descriptor as another type, still for the same thread.
    pub fn into<U: Into<OwnedFd> + From<OwnedFd>>(self) -> Foreign<U> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped and never used again, so the value is taken once.
        let value = unsafe { ManuallyDrop::take(&mut this.value) };
        Foreign::new(U::from(value.into()), this.closes)
    }

    /// The descriptor itself: from now on its new owner closes it.
    pub fn into_inner(self) -> T {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped and never used again, so the value is taken once.
        unsafe { ManuallyDrop::take(&mut this.value) }
    }
}

impl<T: Into<OwnedFd>> Deref for Foreign<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Into<OwnedFd>> Drop for Foreign<T> {
    fn drop(&mut self) {
        // SAFETY: this is the only place that takes the value of one that is dropped.
        let file: OwnedFd = unsafe { ManuallyDrop::take(&mut self.value) }.into();
        if matches!(self.closes, Closes::FrontEnds | Closes::Clients) {
            // The peer notices now, however long the thread takes. shutdown(2) frees nothing that is in flight.
            let _ = rustix::net::shutdown(&file, Shutdown::Both);
        }
        // Without the threads (the tests of this crate, the fuzzers), it is closed here.
        if let Some(closer) = self.closes.closer() {
            closer.waiting.fetch_add(1, Ordering::SeqCst);
            let _ = closer.queue.send(file);
        }
    }
}

static CALLS: OnceLock<Sender<Box<dyn FnOnce() + Send>>> = OnceLock::new();
/// How many calls wait for their thread.
static CALLS_WAITING: AtomicUsize = AtomicUsize::new(0);
const MAX_CALLS: usize = 256;

/// Start the thread that sends calls to sockets.
pub fn start_caller() -> io::Result<()> {
    let (sender, calls) = channel::<Box<dyn FnOnce() + Send>>();
    let _ = CALLS.set(sender);
    start("calls", move || {
        for call in calls {
            CALLS_WAITING.fetch_sub(1, Ordering::SeqCst);
            call();
        }
    })
}

/// Have the thread do this. `false`: there is none, or it waits for a peer.
pub fn call_elsewhere(call: impl FnOnce() + Send + 'static) -> bool {
    let Some(calls) = CALLS.get() else { return false };
    if CALLS_WAITING.load(Ordering::SeqCst) >= MAX_CALLS {
        return false;
    }
    CALLS_WAITING.fetch_add(1, Ordering::SeqCst);
    calls.send(Box::new(call)).is_ok()
}
