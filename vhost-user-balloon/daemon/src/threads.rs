// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The threads beside the one that serves. Each has a row of the table in README: what it may touch, and its own filter of
//! system calls.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};

use rustix::event::EventfdFlags;
use rustix::net::Shutdown;

use crate::sandbox::{self, Row, SandboxError, Seccomp};
use crate::signals;

/// Start a thread in its row of the sandbox, and wait until it runs.
pub fn start(
    name: &str,
    seccomp: Seccomp,
    row: Row,
    work: impl FnOnce() + Send + 'static,
) -> Result<(), SandboxError> {
    let (started, wait) = channel();
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        signals::block_timer();
        let confined = sandbox::seccomp(seccomp, row);
        let runs = confined.is_ok();
        let _ = started.send(confined);
        if runs {
            work();
        }
    });
    thread.and_then(|_| wait.recv().map_err(io::Error::other)).map_err(SandboxError::Thread)?.map(drop)
}

/// Which threads close a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closes {
    /// Files of guest memory. Closing one takes a while (the last descriptor of a memfd frees its pages) and has an
    /// end.
    Memory,
    /// All else that a front end sent. Closing can take for ever: a FUSE file waits for its server, a TCP connection for
    /// its peer, an eventfd in an epoll set for the mutex of that.
    Descriptors,
    /// Connections of front ends, by the same threads: the kernel closes with one what is in flight to it.
    FrontEnds,
    /// Connections to the other sockets.
    Clients,
}

impl Closes {
    const ALL: [Self; 3] = [Self::Memory, Self::FrontEnds, Self::Clients];

    fn name(self) -> &'static str {
        match self {
            Self::Memory => "close-memory",
            Self::Descriptors | Self::FrontEnds => "close-front",
            Self::Clients => "close-clients",
        }
    }

    /// How many peers can make a thread wait before others do.
    fn threads(self) -> usize {
        match self {
            Self::Memory => 1,
            Self::Descriptors | Self::FrontEnds | Self::Clients => 4,
        }
    }

    /// How many descriptors of one peer may wait before no more of it are received.
    fn peer_limit(self) -> usize {
        match self {
            Self::Memory => 256,
            Self::Descriptors | Self::FrontEnds | Self::Clients => 64,
        }
    }

    /// The same of all peers. [`DESCRIPTORS`] and `LimitNOFILE` of the unit have room for all of them.
    fn limit(self) -> usize {
        match self {
            Self::Memory => 768,
            Self::Descriptors => 448,
            Self::FrontEnds => 512,
            Self::Clients => 64,
        }
    }

    fn closer(self) -> Option<&'static Closer> {
        let same = if self == Self::Descriptors { Self::FrontEnds } else { self };
        CLOSERS.get()?.iter().find(|closer| closer.closes == same)
    }

    /// Whether too many descriptors wait to be closed.
    pub fn is_full(self) -> bool {
        self.closer().is_some_and(|closer| closer.total.load(Ordering::SeqCst) >= self.limit())
    }

    /// Whether too many descriptors of this peer wait to be closed.
    pub fn is_full_of(self, peer: Peer) -> bool {
        let waiting = |closer: &Closer| closer.queues().get(&peer).map_or(0, Queue::waiting);
        self.closer().is_some_and(|closer| waiting(closer) >= self.peer_limit())
    }
}

/// How many descriptors this process may need at once: 256 regions, 16 of rings and the channel, 32 clients, 16
/// connections without a message, 32 of half a message, those that wait to be closed (768 + 512 + 64), its own (about
/// 16), and 253 that come with one call.
pub const DESCRIPTORS: u64 = 2048;

/// A connection. One thread at a time closes what came with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer(u64);

impl Peer {
    /// Another one than all before.
    pub fn new() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::SeqCst))
    }
}

/// What waits of one peer.
#[derive(Default)]
struct Queue {
    files: VecDeque<OwnedFd>,
    /// A thread closes one of them.
    is_taken: bool,
}

impl Queue {
    fn waiting(&self) -> usize {
        self.files.len().saturating_add(self.is_taken.into())
    }
}

struct Closer {
    closes: Closes,
    /// Locked for a few instructions, and never while a descriptor is closed.
    queues: Mutex<BTreeMap<Peer, Queue>>,
    more: Condvar,
    /// How many descriptors wait, or keep a thread waiting.
    total: AtomicUsize,
}

static CLOSERS: OnceLock<Vec<Closer>> = OnceLock::new();
/// An event: a thread is no longer full.
static DRAINED: OnceLock<OwnedFd> = OnceLock::new();

impl Closer {
    fn queues(&self) -> std::sync::MutexGuard<'_, BTreeMap<Peer, Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, peer: Peer, file: OwnedFd) {
        self.total.fetch_add(1, Ordering::SeqCst);
        self.queues().entry(peer).or_default().files.push_back(file);
        self.more.notify_one();
    }

    /// The next descriptor, of a peer of which no other thread closes one. The newest peer is the first: what one before
    /// has left does not hold it up.
    fn take(&self) -> (Peer, OwnedFd) {
        let mut queues = self.queues();
        loop {
            let free = queues.iter_mut().rev().find(|(_, queue)| !queue.is_taken);
            if let Some((peer, queue)) = free
                && let Some(file) = queue.files.pop_front()
            {
                queue.is_taken = true;
                return (*peer, file);
            }
            queues = self.more.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn closed(&self, peer: Peer) {
        let mut queues = self.queues();
        let before = queues.get(&peer).map_or(0, Queue::waiting);
        if let Some(queue) = queues.get_mut(&peer) {
            queue.is_taken = false;
            if queue.files.is_empty() {
                queues.remove(&peer);
            }
        }
        drop(queues);
        let total = self.total.fetch_sub(1, Ordering::SeqCst);
        let full = [self.closes.limit(), Closes::Descriptors.limit()];
        if (before == self.closes.peer_limit() || full.contains(&total))
            && let Some(event) = DRAINED.get()
        {
            let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
        }
    }
}

/// Start the threads that close descriptors.
pub fn start_closers(seccomp: Seccomp) -> Result<(), SandboxError> {
    let drained = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|error| SandboxError::Thread(error.into()))?;
    let drained = DRAINED.get_or_init(|| drained);
    let closer = |closes| Closer {
        closes,
        queues: Mutex::default(),
        more: Condvar::new(),
        total: AtomicUsize::new(0),
    };
    for closer in CLOSERS.get_or_init(|| Closes::ALL.map(closer).into()) {
        for _ in 0..closer.closes.threads() {
            start(closer.closes.name(), seccomp, Row::closes(drained.as_fd()), move || {
                loop {
                    let (peer, file) = closer.take();
                    drop(file);
                    closer.closed(peer);
                }
            })?;
        }
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

/// A descriptor that a peer made, or of which it has a copy. A thread closes it.
#[derive(Debug)]
pub struct Foreign<T: Into<OwnedFd>> {
    value: ManuallyDrop<T>,
    closes: Closes,
    peer: Peer,
}

impl<T: Into<OwnedFd>> Foreign<T> {
    pub fn new(value: T, closes: Closes, peer: Peer) -> Self {
        Self { value: ManuallyDrop::new(value), closes, peer }
    }

    /// Whose it is.
    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// The same descriptor as another type, still for the same thread.
    pub fn into<U: Into<OwnedFd> + From<OwnedFd>>(self) -> Foreign<U> {
        let (closes, peer) = (self.closes, self.peer);
        Foreign::new(U::from(self.into_inner().into()), closes, peer)
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
            closer.add(self.peer, file);
        }
    }
}

static CALLS: OnceLock<Sender<Box<dyn FnOnce() + Send>>> = OnceLock::new();
/// How many calls wait for their thread.
static CALLS_WAITING: AtomicUsize = AtomicUsize::new(0);
const MAX_CALLS: usize = 256;

/// Start the thread that sends calls to sockets.
pub fn start_caller(seccomp: Seccomp) -> Result<(), SandboxError> {
    let (sender, calls) = channel::<Box<dyn FnOnce() + Send>>();
    let _ = CALLS.set(sender);
    start("calls", seccomp, Row::calls(), move || {
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
