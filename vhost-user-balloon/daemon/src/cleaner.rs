// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The process that removes the sockets at the end.
//!
//! Landlock allows to remove files by folder, with all that is below. So the daemon has no right to remove anything,
//! and a child that looks at nothing a peer sends does it: when it is asked, or when the daemon has ended.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use crate::sandbox;

/// How long the end of the daemon waits for the child.
const WAIT: Duration = Duration::from_millis(500);

/// Sockets to remove at the end: path, device, inode.
static SOCKETS: Mutex<Vec<(PathBuf, u64, u64)>> = Mutex::new(Vec::new());
static CHILD: OnceLock<UnixStream> = OnceLock::new();

/// Remove a socket at the end, that of an error included.
pub fn remove_at_the_end(path: &Path) {
    if let (Ok(about), Ok(mut sockets)) = (rustix::fs::lstat(path), SOCKETS.lock()) {
        sockets.push((path.to_path_buf(), about.st_dev, about.st_ino));
    }
}

/// The folder that a path is in.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// Have the sockets removed.
pub fn remove_sockets() {
    let Some(mut child) = CHILD.get() else { return remove_here() };
    let _ = child.shutdown(Shutdown::Write);
    let _ = child.read(&mut [0]);
}

/// Remove the sockets, unless a successor has replaced them.
fn remove_here() {
    for (path, device, inode) in SOCKETS.lock().iter().flat_map(|sockets| sockets.iter()) {
        if rustix::fs::lstat(path).is_ok_and(|now| (now.st_dev, now.st_ino) == (*device, *inode)) {
            let _ = rustix::fs::unlink(path);
        }
    }
}

/// Start the child, if there are sockets. `confine`: it may only remove files, from their folders. Call it before any
/// other thread exists, with the signals blocked that end the daemon.
pub fn start(confine: bool) -> io::Result<()> {
    if SOCKETS.lock().is_ok_and(|sockets| sockets.is_empty()) {
        return Ok(());
    }
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(WAIT))?;
    // SAFETY: this process has one thread, so the child has all that its memory refers to, with no lock held.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            wait_and_remove(&theirs, confine);
            // SAFETY: ends the child without running what the daemon does at its own end.
            unsafe { libc::_exit(0) };
        }
        _ => {
            let _ = CHILD.set(ours);
            Ok(())
        }
    }
}

fn wait_and_remove(daemon: &UnixStream, confine: bool) {
    if confine {
        let sockets: Vec<PathBuf> =
            SOCKETS.lock().iter().flat_map(|s| s.iter()).map(|s| s.0.clone()).collect();
        let folders = sockets.iter().map(|path| folder_of(path));
        if sandbox::landlock(folders).is_err() {
            return;
        }
    }
    // SAFETY: the call makes descriptor 0 a copy of this one; what it was before is not used here.
    if unsafe { libc::dup2(daemon.as_raw_fd(), 0) } != 0 {
        return;
    }
    // All others: of a listener that is left open, clients would not see the end.
    // SAFETY: this process uses no descriptor but 0 from now on, and ends without closing others.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, 1_u32, u32::MAX, 0_u32) };
    if closed != 0 {
        for other in 1..1024 {
            // SAFETY: as above.
            unsafe { libc::close(other) };
        }
    }
    // SAFETY: descriptor 0 is open and has no other owner in this process.
    let mut daemon = UnixStream::from(unsafe { OwnedFd::from_raw_fd(0) });
    // The end of the daemon, or of its half.
    let _ = daemon.read(&mut [0]);
    remove_here();
    let _ = daemon.write(&[1]);
}
