// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vhost-user-balloon run -- qemu-system-x86_64 …`: a device for one run of a QEMU.
//!
//! This process becomes the VMM, so that its exit status, signals and terminal are the VMM's. The device is
//! its child, on one end of a socket pair, and ends when the VMM closes the other.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::FdFlags;
use rustix::process::Signal;
use thiserror::Error;

#[derive(Debug, Error)]
pub enum RunError {
    #[error(
        "cannot run {0}: no option has share=on, so the device would not see guest memory; add -object \
         memory-backend-memfd,id=ram,size=SIZE,share=on -machine memory-backend=ram"
    )]
    Private(String),
    #[error("cannot start the device: {0}; start it by hand, with --socket-path")]
    Device(io::Error),
    #[error("cannot start {program}: {source}; give the path of a QEMU")]
    Vmm { program: String, source: io::Error },
}

/// The options of a QEMU from 10.1 on that has this device; `chardev` is where it connects.
fn options(chardev: &str) -> [String; 4] {
    [
        "-chardev".to_owned(),
        format!("socket,id=vub,{chardev}"),
        "-device".to_owned(),
        "vhost-user-test-device-pci,chardev=vub,virtio-id=5,num_vqs=5,vq_size=128,config_size=24".to_owned(),
    ]
}

/// The same for scripts, with a socket at `path`, in one line.
pub fn qemu_args(path: &Path) -> String {
    // QEMU reads two commas as one.
    let path = path.display().to_string().replace(',', ",,");
    // Not reconnect-ms: with it QEMU 11.1 does not wait for the connection, and this device fails.
    options(&format!("path={path}")).join(" ")
}

/// Start the device with the options in `device`, and become the VMM.
pub fn run(device: &[OsString], vmm: &[OsString]) -> RunError {
    let Some((program, arguments)) = vmm.split_first() else {
        return RunError::Vmm { program: String::new(), source: io::ErrorKind::InvalidInput.into() };
    };
    let name = program.display().to_string();
    if !arguments.iter().any(|argument| argument.to_string_lossy().contains("share=on")) {
        return RunError::Private(name);
    }
    let in_background =
        arguments.iter().any(|argument| argument == "-daemonize" || argument == "--daemonize");
    match start(device, in_background) {
        Ok(socket) => {
            let socket = format!("fd={}", socket.as_raw_fd());
            let source = Command::new(program).args(arguments).args(options(&socket)).exec();
            RunError::Vmm { program: name, source }
        }
        Err(source) => RunError::Device(source),
    }
}

/// The VMM's end of the socket pair, which the VMM inherits.
///
/// The device ends with this process, even if a copy of that end is left: a VMM can send one to the device
/// itself. A VMM that goes into the background outlives this process.
fn start(options: &[OsString], in_background: bool) -> io::Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    // Each process keeps one end only: the device ends with the VMM's.
    rustix::io::fcntl_setfd(&theirs, FdFlags::empty())?;
    let mut device = Command::new("/proc/self/exe");
    device
        .arg0("vhost-user-balloon")
        .arg(format!("--fd={}", theirs.as_raw_fd()))
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    if !in_background {
        let end = || Ok(rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?);
        // SAFETY: between fork and exec this makes one system call, prctl(2), and allocates nothing.
        unsafe { device.pre_exec(end) };
    }
    device.spawn()?;
    drop(theirs);
    rustix::io::fcntl_setfd(&ours, FdFlags::empty())?;
    Ok(ours)
}
