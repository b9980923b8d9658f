// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The socket on which the device speaks to the front end first.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{SendFlags, SocketType};

use crate::foreign::{Descriptor, DescriptorError};
use crate::threads::Foreign;
use crate::wire::{VERSION, message};

const CONFIG_CHANGE: u32 = 2;

/// The socket on which the device speaks to the front end first.
#[derive(Debug)]
pub struct Channel {
    socket: Foreign<OwnedFd>,
}

impl Channel {
    pub fn new(descriptor: Descriptor) -> Result<Self, DescriptorError> {
        let socket = descriptor.file;
        match rustix::net::sockopt::socket_type(&*socket)? {
            SocketType::STREAM => Ok(Self { socket }),
            _ => Err(DescriptorError::Kind { found: "a unix socket of messages", wanted: "one of streams" }),
        }
    }

    /// Say that the configuration has changed. `false`: not now, the channel is full.
    ///
    /// It asks for no reply: waiting for one while the front end waits for this device is a deadlock. Nothing is
    /// ever read here: a reader takes a lock that the front end, which may have a copy of this end, can hold.
    /// Sending takes none.
    pub fn config_changed(&self) -> Result<bool, Errno> {
        let message = message(CONFIG_CHANGE, VERSION, &[]);
        match rustix::net::send(&*self.socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) if sent == message.len() => Ok(true),
            Ok(_) => Err(Errno::MSGSIZE),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What to wait for until it is not full.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
