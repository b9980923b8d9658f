// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! sd_notify(3) in two steps: the socket is connected before the sandbox, which forbids new sockets, and the
//! message is sent from inside. The `sd-notify` crate does both at once.

use std::io;
use std::mem::ManuallyDrop;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Connect to the service manager that the environment names, if it names one.
pub fn connect() -> io::Result<Option<UnixDatagram>> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(None) };
    let connected = || {
        let address = match path.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(Some(socket))
    };
    connected().map_err(|error: io::Error| {
        let text = format!("cannot reach the service manager at {}: {error}", path.display());
        io::Error::new(error.kind(), text)
    })
}

/// Send that the daemon is ready.
pub fn ready(manager: Option<UnixDatagram>) -> io::Result<()> {
    // It stays open: this thread closes nothing from now on.
    manager.map(ManuallyDrop::new).map_or(Ok(()), |socket| socket.send(b"READY=1\n").map(drop))
}
