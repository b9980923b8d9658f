// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How the process ends when it is told to, or when guest memory goes away under it.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::OnceLock;

/// Exit status: guest memory was truncated by whoever gave it.
pub const MEMORY_LOST: i32 = 4;

static PATHS: OnceLock<Vec<CString>> = OnceLock::new();

/// Names of sockets to remove at the end. Only the first call counts.
pub fn remove_at_the_end(paths: &[&Path]) {
    let names = paths.iter().filter_map(|path| CString::new(path.as_os_str().as_bytes()).ok()).collect();
    let _ = PATHS.set(names);
}

/// Remove the sockets. May be called in a signal handler.
pub fn remove_sockets() {
    for path in PATHS.get().into_iter().flatten() {
        // SAFETY: a string with a NUL at its end that lives as long as the program; unlink(2) may be
        // called from signal handlers.
        unsafe { libc::unlink(path.as_ptr()) };
    }
}

extern "C" fn memory_lost(_signal: libc::c_int) {
    const MESSAGE: &[u8] =
        b"vhost-user-balloon: guest memory is gone: its file was truncated by the front end\n";
    remove_sockets();
    let mut errors = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    // A full pipe that nobody reads is not waited for.
    // SAFETY: one pollfd that lives until the call returns; poll(2) may be called from signal handlers.
    let room = unsafe { libc::poll(&raw mut errors, 1, 0) };
    if room == 1 && errors.revents & libc::POLLOUT != 0 {
        // SAFETY: the bytes are static; write(2) may be called from signal handlers.
        unsafe { libc::write(2, MESSAGE.as_ptr().cast(), MESSAGE.len()) };
    }
    // SAFETY: ends the process without running anything else; allowed in signal handlers.
    unsafe { libc::_exit(MEMORY_LOST) };
}

/// End cleanly when guest memory cannot be touched any more.
///
/// # Errors
///
/// The kernel does not take the handler.
pub fn end_on_lost_memory() -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: all zeros is a valid sigaction: no flags, nothing masked, the default handler.
    let action = unsafe { action.assume_init_mut() };
    action.sa_sigaction = memory_lost as extern "C" fn(libc::c_int) as libc::sighandler_t;
    // SAFETY: the handler only makes calls that are allowed in one, and never returns.
    let done = unsafe { libc::sigaction(libc::SIGBUS, action, std::ptr::null_mut()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
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

/// SIGTERM and SIGINT, kept from the thread that made this and from those that it starts.
#[derive(Debug)]
pub struct Ending {
    set: libc::sigset_t,
}

/// From now on SIGTERM and SIGINT wait for [`Ending::end_when_told`].
///
/// To be called before any other thread exists.
///
/// # Errors
///
/// The signals cannot be kept from this thread.
pub fn block() -> io::Result<Ending> {
    let set = ending_signals();
    // SAFETY: the set is initialised and only read.
    let done = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if done == 0 { Ok(Ending { set }) } else { Err(io::Error::from_raw_os_error(done)) }
}

impl Ending {
    /// From now on SIGTERM and SIGINT end the process at once and cleanly, whatever it is doing.
    ///
    /// A thread of its own waits for them: the one that serves the front end can be in a long system call.
    /// Landlock confines a thread and those that it starts later, so this comes after it, and before the
    /// seccomp filter, which has no room for new threads and is put on all there are.
    ///
    /// # Errors
    ///
    /// There can be no thread.
    pub fn end_when_told(self) -> io::Result<()> {
        let set = self.set;
        let (started, wait) = std::sync::mpsc::channel();
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            // What a thread does when it starts is not allowed later, in the sandbox.
            let _ = started.send(());
            let mut signal = 0;
            // SAFETY: the set is initialised and the number is written to a variable of this function.
            if unsafe { libc::sigwait(&raw const set, &raw mut signal) } == 0 {
                // Not a word about it: standard error may be a full pipe, and the other thread may hold its
                // lock and wait there.
                remove_sockets();
                // SAFETY: ends the process. There is no state to be saved, and destructors that run while
                // the other thread still works would be worse than none.
                unsafe { libc::_exit(0) };
            }
        })?;
        wait.recv().map_err(io::Error::other)
    }
}
