// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The word to the service manager that the device is ready: connected to before the sandbox, in which no
//! socket can be made any more, and said when the sandbox is there.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use thiserror::Error;

/// Why the service manager cannot be told.
#[derive(Debug, Error)]
pub enum NotifyError {
    /// It does not listen there.
    #[error("cannot reach the service manager at {}: {source}", .path.display())]
    Connect {
        /// What is in NOTIFY_SOCKET.
        path: OsString,
        /// What the kernel said.
        source: io::Error,
    },
    /// It no longer listens.
    #[error("cannot tell the service manager: {0}")]
    Send(io::Error),
}

/// The way to the service manager; none if there is no service manager.
#[derive(Debug)]
pub struct Manager(Option<UnixDatagram>);

impl Manager {
    /// Connect to the socket that the environment names, see sd_notify(3).
    ///
    /// # Errors
    ///
    /// The environment names one, and it cannot be reached.
    pub fn connect() -> Result<Self, NotifyError> {
        env::var_os("NOTIFY_SOCKET").map(Self::connect_to).transpose().map(Self)
    }

    fn connect_to(path: OsString) -> Result<UnixDatagram, NotifyError> {
        let connected = || {
            let address = match path.as_bytes().strip_prefix(b"@") {
                Some(name) => SocketAddr::from_abstract_name(name)?,
                None => SocketAddr::from_pathname(&path)?,
            };
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            Ok(socket)
        };
        connected().map_err(|source| NotifyError::Connect { path: path.clone(), source })
    }

    /// Whoever waits for the device may go on. Nothing is said after it.
    ///
    /// # Errors
    ///
    /// There is a service manager, and it does not listen.
    pub fn ready(self) -> Result<(), NotifyError> {
        self.0.map_or(Ok(()), |socket| socket.send(b"READY=1\n").map(|_| ()).map_err(NotifyError::Send))
    }
}
