// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where front ends come from, and why the device ends.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use thiserror::Error;

use crate::front_end::ProtocolError;
use crate::service::listen;

#[derive(Debug, Error)]
pub enum ServerError {
    #[error("cannot listen on {path}: {why}")]
    Listen { path: PathBuf, why: String },
    #[error("cannot make a ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("cannot use descriptor {fd}: {why}; pass a unix socket, as a service manager does")]
    Descriptor { fd: i32, why: io::Error },
    #[error("cannot look at descriptors: {0}; mount /proc")]
    Proc(Errno),
    #[error("cannot wait for events: {0}; start the device again")]
    Poll(#[from] Errno),
    #[error(
        "cannot serve the front end, which does not keep to the protocol: {0}; update or restart the VMM"
    )]
    Protocol(#[from] ProtocolError),
    #[error("{0}")]
    MemoryLost(&'static str),
}

/// Where the front end comes from.
#[derive(Debug)]
pub enum Source {
    /// Front ends will connect, one after the other.
    Listener(UnixListener),
    /// One is connected, and there will be no other.
    Stream(UnixStream),
}

impl Source {
    pub fn listen(path: &Path) -> Result<Self, ServerError> {
        listen_at(path).map(Self::Listener)
    }
}

pub fn listen_at(path: &Path) -> Result<UnixListener, ServerError> {
    listen(path).map_err(|why| ServerError::Listen { path: path.to_owned(), why })
}
