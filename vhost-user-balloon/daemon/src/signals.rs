// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Signals: the orderly end, guest memory that cannot be touched, and system calls that take too long.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use vmm_sys_util::signal::{block_signal, create_sigset, register_signal_handler};

/// Exit status: the front end has truncated guest memory, and there is no other front end to serve.
pub const MEMORY_LOST: i32 = 4;

/// How long a system call of the serving thread may wait before it is interrupted.
const CALL_MICROSECONDS: i64 = 200_000;

/// Start and length of each mapping of guest memory; a length of 0 is a free entry.
static MAPPINGS: [(AtomicUsize, AtomicUsize); 512] =
    [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; 512];
static LOST: AtomicBool = AtomicBool::new(false);

/// While it exists, the process survives touching a page of this mapping that the host does not have.
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

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Whether [`memory_was_lost`] or [`call_was_interrupted`] is about to return true.
pub fn is_front_end_lost() -> bool {
    LOST.load(Ordering::SeqCst) || INTERRUPTED.load(Ordering::SeqCst)
}

/// An event of the front end has made a call wait, until the timer interrupted it. No other event is touched until the
/// connection has ended: each could wait as long.
pub fn note_interrupted_call() {
    INTERRUPTED.store(true, Ordering::SeqCst);
}

/// Whether events may be touched.
pub fn may_touch_events() -> bool {
    !INTERRUPTED.load(Ordering::SeqCst)
}

/// Whether an event of the front end has made a call wait since this was asked last.
pub fn call_was_interrupted() -> bool {
    INTERRUPTED.swap(false, Ordering::SeqCst)
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
            // SAFETY: it replaces a mapping of guest memory, from which only rings and answers are read, by
            // zeros of the same length; its owner unmaps these as it would have unmapped the other.
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

static ALARMS: AtomicBool = AtomicBool::new(false);

/// Survive guest memory that is truncated and a limit of file sizes, and interrupt calls that wait.
pub fn install() -> io::Result<()> {
    // Without SA_RESTART: a call that is interrupted fails.
    register_signal_handler(libc::SIGBUS, bus_error)?;
    register_signal_handler(libc::SIGALRM, interrupt)?;
    // A state file over the limit of file sizes is an error of its write. With a handler the call fails all the same.
    register_signal_handler(libc::SIGXFSZ, interrupt)?;
    ALARMS.store(true, Ordering::SeqCst);
    Ok(())
}

/// Start, or stop, to interrupt calls of this thread that wait for 0.2 s.
///
/// No call is meant to wait. A front end can still make an event wait that it shares with this process, by taking away its
/// O_NONBLOCK. Its connection then ends.
pub fn interrupt_calls(on: bool) {
    if ALARMS.load(Ordering::Relaxed) {
        let every = libc::timeval { tv_sec: 0, tv_usec: if on { CALL_MICROSECONDS } else { 0 } };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        // SAFETY: both pointers are to what the call wants or null.
        unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
    }
}

/// Leave the timer's signal to the thread that serves.
pub fn block_timer() {
    let _ = block_signal(libc::SIGALRM);
}

/// Signals that are kept from the thread that made this and from those that it starts.
pub struct Blocked(libc::sigset_t);

/// From now on these signals wait. Call it before any other thread exists.
pub fn block(signals: &[libc::c_int]) -> io::Result<Blocked> {
    // One that is blocked already stays so.
    signals.iter().for_each(|signal| drop(block_signal(*signal)));
    Ok(Blocked(create_sigset(signals)?))
}

impl Blocked {
    /// Wait for one of them.
    pub fn wait(&self) -> bool {
        let mut signal = 0;
        // SAFETY: the set is initialised and the number is written to a variable of this function.
        unsafe { libc::sigwait(&raw const self.0, &raw mut signal) == 0 }
    }
}
