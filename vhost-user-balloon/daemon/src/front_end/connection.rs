// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The connection to a front end: messages come in, replies go out.
//!
//! The request handler of the `vhost` crate reads from a socket that blocks and tries again when a time-out
//! ends the read, so half a header stops it for ever. Here a message is collected without waiting, one
//! deadline covers all of it, and also a reply that the front end does not read.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags};
use vhost::vhost_user::message::FrontendReq;

use super::errors::{MAX_DESCRIPTORS, ProtocolError, Refusal};
use super::message::Message;
use super::requests::handle;
use crate::device::Device;
use crate::foreign::{Descriptor, Kind, peek};
use crate::limited;
use crate::threads::{Closes, Foreign};
use crate::wire::{HEADER, MAX_BODY, NEED_REPLY, REPLY, VERSION, index, long, message, parse};

/// How long one message, or the reply to it, may take.
pub const DEADLINE: Duration = Duration::from_secs(1);

/// How many can come with one call, SCM_MAX_FD of Linux. The kernel closes those for which there is no room, here
/// and now.
const ROOM: usize = 253;

pub struct FrontEnd {
    socket: Foreign<UnixStream>,
    input: Vec<u8>,
    descriptors: Vec<Descriptor>,
    output: Vec<u8>,
    deadline: Option<Instant>,
    /// It may ask for replies to requests that have none.
    acknowledges: bool,
}

impl FrontEnd {
    pub fn new(socket: Foreign<UnixStream>) -> Self {
        Self {
            socket,
            input: Vec::new(),
            descriptors: Vec::new(),
            output: Vec::new(),
            deadline: None,
            acknowledges: false,
        }
    }

    /// What to wait for: nothing is read before the last reply was taken, nor while much is being closed.
    pub fn poll(&self) -> (BorrowedFd<'_>, PollFlags) {
        let events = match self.output.is_empty() {
            true if self.is_full() => PollFlags::empty(),
            true => PollFlags::IN,
            false => PollFlags::OUT,
        };
        (self.socket.as_fd(), events)
    }

    /// Whether no more descriptors of it are received until some are closed.
    fn is_full(&self) -> bool {
        let peer = self.socket.peer();
        Closes::Memory.is_full() || Closes::Memory.is_full_of(peer) || Closes::Descriptors.is_full_of(peer)
    }

    /// When it is too late for the rest of a message or reply, or for descriptors to be closed.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Do what can be done without waiting; one request at most. `false`: it has hung up.
    pub fn serve(&mut self, device: &mut Device) -> Result<bool, ProtocolError> {
        if self.output.is_empty() {
            match self.receive()? {
                Received::Hangup => return Ok(false),
                Received::Part => {}
                Received::Whole(message) => self.answer(device, message)?,
            }
        }
        while !self.output.is_empty() {
            match rustix::net::send(&*self.socket, &self.output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.output.drain(..sent.min(self.output.len()))),
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(ProtocolError::Socket(error)),
            }
        }
        let is_full = self.is_full();
        let pending = is_full || !self.output.is_empty() || !self.input.is_empty();
        match self.deadline {
            Some(deadline) if pending && Instant::now() >= deadline => {
                return Err(match self.output.len() {
                    0 if is_full => ProtocolError::Waiting,
                    0 => ProtocolError::Slow(self.input.len()),
                    unread => ProtocolError::Unread(unread),
                });
            }
            Some(_) if pending => {}
            _ => self.deadline = pending.then(|| Instant::now().checked_add(DEADLINE)).flatten(),
        }
        Ok(true)
    }

    /// How long the message is of which the beginning has come.
    fn wanted(&self) -> Result<usize, ProtocolError> {
        let header = self.input.get(..HEADER).and_then(parse::<[u32; 3]>);
        let Some([request, flags, size]) = header else { return Ok(HEADER) };
        let size = index(size);
        if flags & 3 != VERSION || flags & REPLY != 0 {
            return Err(ProtocolError::Flags { request, flags });
        }
        if size > MAX_BODY {
            return Err(ProtocolError::Size { request, size });
        }
        Ok(HEADER.saturating_add(size))
    }

    fn receive(&mut self) -> Result<Received, ProtocolError> {
        loop {
            let missing = self.wanted()?.saturating_sub(self.input.len());
            if missing == 0 {
                let mut header = std::mem::take(&mut self.input);
                let body = header.split_off(HEADER);
                let [request, flags, _] = parse(&header).unwrap_or_default();
                let descriptors = std::mem::take(&mut self.descriptors);
                return Ok(Received::Whole(Message { request, flags, body, descriptors }));
            }
            // Never beyond the end of the message: descriptors belong to the one that they came with.
            let mut bytes = [0; MAX_BODY];
            let Some(part) = bytes.get_mut(..missing) else { return Ok(Received::Part) };
            if self.is_full() {
                return Ok(Received::Part);
            }
            // What cannot be closed now is left where it is.
            let full = Closes::Descriptors.is_full();
            if full && peek(&self.socket, part).is_ok_and(|(_, descriptors)| descriptors) {
                return Err(ProtocolError::Waiting);
            }
            // With room for all. What the kernel may put before them is shorter than the rest.
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM)) + 4096];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = match rustix::net::recvmsg(
                &*self.socket,
                &mut [IoSliceMut::new(part)],
                &mut control,
                flags,
            ) {
                Ok(got) => got,
                Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Part),
                Err(Errno::CONNRESET) => return Ok(Received::Hangup),
                Err(error) => return Err(ProtocolError::Socket(error)),
            };
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                    let peer = self.socket.peer();
                    self.descriptors.extend(rights.map(|file| Descriptor::new(file, peer)));
                }
            }
            if let Some(other) = self.descriptors.iter().find(|descriptor| descriptor.kind == Kind::Other) {
                return Err(ProtocolError::Kind { mode: other.mode, device: other.device });
            }
            if got.flags.contains(ReturnFlags::CTRUNC) || self.descriptors.len() > MAX_DESCRIPTORS {
                return Err(ProtocolError::Descriptors(self.descriptors.len()));
            }
            if got.bytes == 0 {
                return match self.input.len() {
                    0 => Ok(Received::Hangup),
                    length => Err(ProtocolError::Hangup(length)),
                };
            }
            self.input.extend(part.iter().take(got.bytes));
        }
    }

    fn answer(&mut self, device: &mut Device, mut asked: Message) -> Result<(), ProtocolError> {
        let unsupported = ProtocolError::Unsupported { request: asked.request };
        let request = FrontendReq::try_from(asked.request).map_err(|_| unsupported)?;
        let done = handle(device, &mut self.acknowledges, request, &mut asked);
        let acknowledged = self.acknowledges && asked.flags & NEED_REPLY != 0;
        let reply = match done {
            Ok(Some(reply)) => Some(reply),
            Ok(None) => acknowledged.then(|| long(0)),
            Err(Refusal::Protocol(error)) => return Err(error),
            Err(refusal) => {
                device.metrics.refused.inc();
                limited!(device.limiter, %refusal, "refused {request:?}");
                acknowledged.then(|| long(1))
            }
        };
        if let Some(body) = reply {
            self.output = message(asked.request, VERSION | REPLY, &body);
        }
        Ok(())
    }
}

enum Received {
    Hangup,
    Part,
    Whole(Message),
}
