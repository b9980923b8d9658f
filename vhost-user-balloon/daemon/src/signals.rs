// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals: the orderly end, guest memory that cannot be touched, and system calls that take too long.
//! Besides, what has to be known of a mapping's pages.

use std::io;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vm_memory::GuestRegionMmap;

/// Exit status: the front end has truncated guest memory, and there is no other front end to serve.
pub const MEMORY_LOST: i32 = 4;

/// How long a system call of the serving thread may wait before it is interrupted.
const CALL_MICROSECONDS: i64 = 200_000;

/// Sockets to remove at the end: path, device, inode.
static SOCKETS: OnceLock<Vec<(PathBuf, u64, u64)>> = OnceLock::new();

/// Remove these sockets at the end. Only the first call counts.
pub fn remove_at_the_end(paths: &[&Path]) {
    let about = |path: &&Path| {
        let about = rustix::fs::lstat(*path).ok()?;
        Some((path.to_path_buf(), about.st_dev, about.st_ino))
    };
    let _ = SOCKETS.set(paths.iter().filter_map(about).collect());
}

/// Remove the sockets, unless a successor has replaced them.
pub fn remove_sockets() {
    for (path, device, inode) in SOCKETS.get().into_iter().flatten() {
        if rustix::fs::lstat(path).is_ok_and(|now| (now.st_dev, now.st_ino) == (*device, *inode)) {
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// Start and length of each mapping of guest memory; a length of 0 is a free entry.
static MAPPINGS: [(AtomicUsize, AtomicUsize); 512] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 512];
static LOST: AtomicBool = AtomicBool::new(false);

/// As long as it exists, touching a page of this mapping that the host does not have is no end of the
/// process.
#[derive(Debug)]
pub struct Guard(&'static (AtomicUsize, AtomicUsize));

impl Guard {
    /// Watch `length` bytes from `start`, which are a mapping of guest memory.
    pub fn new(start: usize, length: usize) -> Option<Self> {
        let take = |entry: &&'static (AtomicUsize, AtomicUsize)| {
            entry.1.compare_exchange(0, length, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        };
        let entry = MAPPINGS.iter().find(take)?;
        entry.0.store(start, Ordering::SeqCst);
        Some(Self(entry))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.0.store(0, Ordering::SeqCst);
        self.0.1.store(0, Ordering::SeqCst);
    }
}

/// Whether [`memory_was_lost`] is about to return true.
pub fn is_memory_lost() -> bool {
    LOST.load(Ordering::SeqCst)
}

/// Whether guest memory could not be touched since this was asked last.
pub fn memory_was_lost() -> bool {
    LOST.swap(false, Ordering::SeqCst)
}

extern "C" fn bus_error(_signal: libc::c_int, about: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo_t to a handler with SA_SIGINFO.
    let about = unsafe { &*about };
    // SAFETY: of a SIGBUS it has an address.
    let address = unsafe { about.si_addr() }.addr();
    for (start, length) in &MAPPINGS {
        let (start, length) = (start.load(Ordering::SeqCst), length.load(Ordering::SeqCst));
        if start != 0 && address.checked_sub(start).is_some_and(|at| at < length) {
            let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: it replaces a mapping of guest memory, which nothing but rings and answers is read
            // from, by zeros of the same length; its owner unmaps these as it would have unmapped the other.
            // mmap(2) is a system call and nothing else.
            let mapped = unsafe {
                libc::mmap(
                    std::ptr::without_provenance_mut(start),
                    length,
                    libc::PROT_READ | libc::PROT_WRITE,
                    flags,
                    -1,
                    0,
                )
            };
            if mapped != libc::MAP_FAILED {
                LOST.store(true, Ordering::SeqCst);
                return;
            }
        }
    }
    // SAFETY: ends the process without running anything else; allowed in signal handlers.
    unsafe { libc::_exit(MEMORY_LOST) };
}

extern "C" fn interrupt(_signal: libc::c_int, _about: *mut libc::siginfo_t, _context: *mut libc::c_void) {}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

fn handle(signal: libc::c_int, handler: Handler) -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zeros is a valid sigaction: no flags, nothing masked, the default handler.
    let action = unsafe { action.assume_init_mut() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // Without SA_RESTART: a call that is interrupted fails.
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: both handlers make only system calls, which are allowed in one, or none.
    let done = unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

static ALARMS: AtomicBool = AtomicBool::new(false);

/// Survive guest memory that is truncated, and interrupt calls that wait.
pub fn install() -> io::Result<()> {
    handle(libc::SIGBUS, bus_error)?;
    handle(libc::SIGALRM, interrupt)?;
    ALARMS.store(true, Ordering::SeqCst);
    Ok(())
}

/// From now on interrupt calls of this thread that wait for 0.2 s, or no longer.
///
/// No call is meant to wait. A front end can still make a descriptor wait that it shares with this process,
/// by taking away its O_NONBLOCK.
pub fn interrupt_calls(on: bool) {
    if ALARMS.load(Ordering::Relaxed) {
        let every = libc::timeval { tv_sec: 0, tv_usec: if on { CALL_MICROSECONDS } else { 0 } };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        // SAFETY: both pointers are to what the call wants or null.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    }
}

fn ending_signals() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: initialises the set it is given.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    for signal in [libc::SIGTERM, libc::SIGINT] {
        // SAFETY: the set is initialised, the number one of a signal.
        unsafe { libc::sigaddset(set.as_mut_ptr(), signal) };
    }
    // SAFETY: sigemptyset has initialised it.
    unsafe { set.assume_init() }
}

/// Leave all signals to the thread that serves.
pub fn block_all() {
    let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
    // SAFETY: initialises the set it is given.
    unsafe { libc::sigfillset(set.as_mut_ptr()) };
    // SAFETY: the set was initialised above and is only read.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()) };
}

/// SIGTERM and SIGINT, kept from the thread that made this and from those that it starts.
#[derive(Debug)]
pub struct Ending {
    set: libc::sigset_t,
}

/// From now on SIGTERM and SIGINT wait for [`Ending::end_when_told`].
///
/// To be called before any other thread exists.
pub fn block() -> io::Result<Ending> {
    let set = ending_signals();
    // SAFETY: the set is initialised and only read.
    let done = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if done == 0 { Ok(Ending { set }) } else { Err(io::Error::from_raw_os_error(done)) }
}

impl Ending {
    /// From now on SIGTERM and SIGINT end the process at once and cleanly, whatever it is doing.
    ///
    /// A thread of its own waits for them: the serving thread can wait for a reader of the log.
    /// Landlock confines a thread and those that it starts later, so this comes after it, and before the
    /// seccomp filter, which has no room for new threads and is put on all there are.
    pub fn end_when_told(self) -> io::Result<()> {
        let set = self.set;
        crate::threads::start("signals", move || {
            let mut signal = 0;
            // SAFETY: the set is initialised and the number is written to a variable of this function.
            if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
                // No line in the log: standard error may be a full pipe.
                remove_sockets();
                // SAFETY: ends the process. There is no state to be saved, and destructors that run while
                // the other thread still works would be worse than none.
                unsafe { libc::_exit(0) };
            }
        })
    }
}

/// Whether the host has no memory for a page of a part of a mapping.
pub fn has_hole(mapping: &GuestRegionMmap<()>, at: u64, length: u64) -> bool {
    let page = rustix::param::page_size();
    let (Ok(at), Ok(length)) = (usize::try_from(at), usize::try_from(length)) else { return false };
    let end = at.saturating_add(length).min(mapping.size());
    (at / page * page..end).step_by(page).any(|start| {
        let mut there = 0_u8;
        // SAFETY: `start` is inside of the mapping, which lives as long as the reference.
        let address = unsafe { mapping.as_ptr().add(start) };
        // SAFETY: the address is that of a page; the call writes one byte for one page.
        let done = unsafe { libc::mincore(address.cast(), page, &raw mut there) };
        done == 0 && there & 1 == 0
    })
}
