// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! sd_notify(3) in two steps: the socket is connected before the sandbox, which forbids new sockets, and the
//! message is sent from inside. The `sd-notify` crate does both at once.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The service manager, if there is one.
#[derive(Debug)]
pub struct Manager(Option<UnixDatagram>);

impl Manager {
    /// Connect to the socket that the environment names.
    pub fn connect() -> io::Result<Self> {
        std::env::var_os("NOTIFY_SOCKET").map(connect_to).transpose().map(Self)
    }

    /// Send that the daemon is ready.
    pub fn ready(self) -> io::Result<()> {
        self.0.map_or(Ok(()), |socket| socket.send(b"READY=1\n").map(|_| ()))
    }
}

fn connect_to(path: OsString) -> io::Result<UnixDatagram> {
    let connected = || {
        let address = match path.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(socket)
    };
    connected().map_err(|error: io::Error| {
        let text = format!("cannot reach the service manager at {}: {error}", path.display());
        io::Error::new(error.kind(), text)
    })
}
