// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The socket on which the device speaks to the front end first.
//!
//! The `vhost` crate keeps the socket of SET_BACKEND_REQ_FD to itself and cannot say that the
//! configuration has changed, so that one request is taken from the wire before the crate sees it.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketType};
use thiserror::Error;

const SET_BACKEND_REQ_FD: u32 = 21;
const CONFIG_CHANGE: u32 = 2;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const HEADER: usize = 12;
const MAX_BODY: u32 = 4096;

/// What is wrong with a request for a channel.
#[derive(Debug, Error)]
pub enum ChannelError {
    /// The socket of the front end fails.
    #[error("reading a request: {0}")]
    Socket(#[from] Errno),
    /// It is not as the protocol has it.
    #[error("SET_BACKEND_REQ_FD of {size} bytes with {descriptors} descriptors")]
    Malformed {
        /// The size of its body.
        size: u32,
        /// How many descriptors came with it.
        descriptors: usize,
    },
    /// The descriptor is no stream socket.
    #[error("SET_BACKEND_REQ_FD with a descriptor that is no stream socket")]
    Kind,
}

/// A header is three words in the byte order of this machine.
#[derive(Debug, Clone, Copy)]
struct Header {
    request: u32,
    flags: u32,
    size: u32,
}

impl Header {
    fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let mut words =
            bytes.chunks_exact(4).map(|w| w.try_into().map(u32::from_ne_bytes).unwrap_or_default());
        let mut next = || words.next().unwrap_or_default();
        Self { request: next(), flags: next(), size: next() }
    }

    fn to_bytes(self) -> Vec<u8> {
        [self.request, self.flags, self.size].into_iter().flat_map(u32::to_ne_bytes).collect()
    }
}

/// The way to the front end.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// If the next request on `socket` is the one for a channel, take it. `None`: it is another one.
    ///
    /// `replies`: the front end has negotiated that requests can ask for a reply.
    pub fn take(
        socket: &UnixStream,
        replies: bool,
    ) -> Result<Option<Result<Self, ChannelError>>, ChannelError> {
        let mut bytes = [0; HEADER];
        // Descriptors are left where they are by this.
        let (_, got) = rustix::net::recv(socket, &mut bytes, RecvFlags::PEEK)?;
        let header = Header::from_bytes(&bytes);
        if got != HEADER || header.request != SET_BACKEND_REQ_FD {
            return Ok(None);
        }
        let made = Self::receive(socket, header)?;
        if replies && header.flags & NEED_REPLY != 0 {
            let reply = Header { request: SET_BACKEND_REQ_FD, flags: VERSION | REPLY, size: 8 };
            let mut message = reply.to_bytes();
            message.extend(u64::from(made.is_err()).to_ne_bytes());
            rustix::net::send(socket, &message, SendFlags::NOSIGNAL)?;
        }
        Ok(Some(made))
    }

    fn receive(socket: &UnixStream, header: Header) -> Result<Result<Self, ChannelError>, ChannelError> {
        let mut bytes = [0; HEADER];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut descriptors: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        let count = descriptors.len();
        let malformed = ChannelError::Malformed { size: header.size, descriptors: count };
        if header.size > MAX_BODY || header.flags & 3 != VERSION {
            // What follows cannot be told from this request.
            return Err(malformed);
        }
        let mut left = usize::try_from(header.size).unwrap_or(0);
        let mut body = [0; 256];
        while left > 0 {
            let room = body.len().min(left);
            let Some(part) = body.get_mut(..room) else { return Err(malformed) };
            let (_, got) = rustix::net::recv(socket, part, RecvFlags::empty())?;
            if got == 0 {
                return Err(malformed);
            }
            left = left.saturating_sub(got);
        }
        let (Some(descriptor), 1) = (descriptors.pop(), count) else { return Ok(Err(malformed)) };
        match rustix::net::sockopt::socket_type(&descriptor) {
            Ok(SocketType::STREAM) => Ok(Ok(Self { socket: descriptor })),
            _ => Ok(Err(ChannelError::Kind)),
        }
    }

    /// Say that the configuration has changed. `false`: not now, the channel is full.
    ///
    /// No reply is asked for: waiting for one while the front end waits for this device is a deadlock.
    pub fn config_changed(&self) -> Result<bool, Errno> {
        // What the front end may have to say on this channel is of no interest.
        let mut nothing = [0; 256];
        let _ = rustix::net::recv(&self.socket, &mut nothing, RecvFlags::DONTWAIT);
        let message = Header { request: CONFIG_CHANGE, flags: VERSION, size: 0 }.to_bytes();
        match rustix::net::send(&self.socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
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
