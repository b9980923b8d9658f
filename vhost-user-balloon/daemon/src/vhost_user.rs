// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The front end: messages of the vhost-user protocol, and what they do to the device.
//!
//! The request handler of the `vhost` crate reads from a socket that blocks and tries again when a time-out
//! ends the read, so half a header stops it for ever. Here a message is collected without waiting, one
//! deadline covers all of it, and so it does a reply that the front end does not read.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use balloon_protocol::{Config, ConfigError, QueueMap};
use rustix::event::PollFlags;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketType,
};
use thiserror::Error;
use vhost::vhost_user::message::{FrontendReq, VhostUserProtocolFeatures as Protocol};

use crate::device::Device;
use crate::limited;
use crate::memory::{Description, MAX_REGIONS, MemoryError};
use crate::threads::close_elsewhere;

/// How long one message, or the reply to it, may take.
pub const DEADLINE: Duration = Duration::from_secs(1);

const HEADER: usize = 12;
const MAX_BODY: usize = 4096;
const MAX_DESCRIPTORS: usize = 32;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
const CONFIG_CHANGE: u32 = 2;
const NO_DESCRIPTOR: u64 = 1 << 8;
const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = 1 << 30;

const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::RESET_DEVICE);

/// The front end breaks the protocol, and the connection ends.
#[derive(Debug, Error)]
pub enum ProtocolError {
    #[error("its socket: {0}")]
    Socket(Errno),
    #[error("it hung up after {0} bytes of a message")]
    Hangup(usize),
    #[error("it sent {0} bytes of a message, and not the rest within a second")]
    Slow(usize),
    #[error("it left {0} bytes of replies unread for a second")]
    Unread(usize),
    #[error("request {request} has flags {flags:#x}, which are not those of a request of version 1")]
    Flags { request: u32, flags: u32 },
    #[error("request {request} cannot have {size} bytes")]
    Size { request: u32, size: usize },
    #[error("a message has more descriptors than there is room for")]
    Descriptors,
    #[error("request {request} is not supported")]
    Unsupported { request: u32 },
    #[error("there is no ring {0} whose index could be returned")]
    NoAnswer(u32),
}

/// Why a request is refused. Its effect is that of a request that was not made.
#[derive(Debug, Error)]
enum Refusal {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("there is no ring {0}")]
    NoRing(u32),
    #[error("ring {ring} cannot have {size} entries now")]
    RingSize { ring: u32, size: u32 },
    #[error("address {address:#x} of ring {ring} is outside of memory")]
    RingAddress { ring: u32, address: u64 },
    #[error("ring {ring}: {error}")]
    Ring { ring: u32, error: virtio_queue::Error },
    #[error("ring {0} is in memory that was never touched, as too many rings before")]
    Untouched(u32),
    #[error("index {index} of ring {ring} is more than 65535")]
    Index { ring: u32, index: u32 },
    #[error("ring {ring} cannot be enabled by {value}")]
    Enable { ring: u32, value: u32 },
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("{count} descriptors came, not {wanted}")]
    Count { count: usize, wanted: usize },
    #[error("a descriptor is {found}, not {wanted}")]
    Kind { found: &'static str, wanted: &'static str },
    #[error("a descriptor cannot be used: {0}")]
    Descriptor(#[from] Errno),
}

/// What a descriptor is. Only of these kinds it is certain that closing them does not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// An eventfd, or another one without a type.
    Event,
    Pipe,
    UnixSocket,
    /// A regular file in memory or on a disk.
    File,
}

impl Kind {
    /// Find out without asking a server behind a filesystem.
    fn of(descriptor: BorrowedFd<'_>) -> Option<Self> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(descriptor, c"", flags, StatxFlags::BASIC_STATS).ok()?;
        match FileType::from_raw_mode(about.stx_mode.into()) {
            FileType::Fifo => Some(Self::Pipe),
            FileType::Unknown if about.stx_mode & 0o170_000 == 0 => Some(Self::Event),
            FileType::Socket => {
                let domain = rustix::net::sockopt::socket_domain(descriptor).ok()?;
                (domain == AddressFamily::UNIX).then_some(Self::UnixSocket)
            }
            FileType::RegularFile => {
                let in_memory = rustix::fs::fcntl_get_seals(descriptor).is_ok();
                (in_memory || about.stx_dev_major != 0).then_some(Self::File)
            }
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Event => "an event",
            Self::Pipe => "a pipe",
            Self::UnixSocket => "a unix socket",
            Self::File => "a file",
        }
    }
}

/// A descriptor that came with a message; closed here only if its kind is known.
#[derive(Debug)]
struct Descriptor {
    kind: Option<Kind>,
    file: Option<OwnedFd>,
}

impl Descriptor {
    fn new(file: OwnedFd) -> Self {
        Self { kind: Kind::of(file.as_fd()), file: Some(file) }
    }

    fn take(mut self, wanted: &'static str, kinds: &[Kind]) -> Result<OwnedFd, Refusal> {
        let found = self.kind.map_or("of another kind", Kind::name);
        let fits = self.kind.is_some_and(|kind| kinds.contains(&kind));
        self.file.take_if(|_| fits).ok_or(Refusal::Kind { found, wanted })
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        if let Some(file) = self.file.take_if(|_| self.kind.is_none()) {
            close_elsewhere(file);
        }
    }
}

struct Message {
    request: u32,
    flags: u32,
    body: Vec<u8>,
    descriptors: Vec<Descriptor>,
}

impl Message {
    fn wrong_size(&self) -> ProtocolError {
        ProtocolError::Size { request: self.request, size: self.body.len() }
    }

    /// The words of 64 bits after `skip` bytes: `N` of them, and nothing behind.
    fn words<const N: usize>(&self, skip: usize) -> Result<[u64; N], ProtocolError> {
        let mut words = [0; N];
        let body = self.body.get(skip..).filter(|body| body.len() == N.saturating_mul(8));
        let chunks = body.ok_or_else(|| self.wrong_size())?.chunks_exact(8);
        for (word, bytes) in words.iter_mut().zip(chunks) {
            *word = bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default();
        }
        Ok(words)
    }

    /// The first two words of 32 bits.
    fn pair(&self) -> Result<[u32; 2], ProtocolError> {
        let word = |at: usize| {
            let bytes = self.body.get(at..at.saturating_add(4))?;
            bytes.try_into().map(u32::from_ne_bytes).ok()
        };
        word(0).zip(word(4)).map(|(one, two)| [one, two]).ok_or_else(|| self.wrong_size())
    }

    /// The number of a ring and a value for it.
    fn ring(&self) -> Result<[u32; 2], ProtocolError> {
        self.words::<1>(0).and_then(|_| self.pair())
    }

    /// The number of a ring, and an event, a pipe or a socket, if there is one; it never blocks from now on.
    fn event(&mut self) -> Result<Result<(u32, Option<File>), Refusal>, ProtocolError> {
        let [word] = self.words(0)?;
        let ring = u32::try_from(word & 0xff).unwrap_or(0);
        if word & NO_DESCRIPTOR != 0 {
            return Ok(Ok((ring, None)));
        }
        let event = self.one().and_then(|descriptor| {
            // User-Mode Linux makes its pipes with socketpair(2).
            let kinds = [Kind::Event, Kind::Pipe, Kind::UnixSocket];
            let event = descriptor.take("an event, a pipe or a unix socket", &kinds)?;
            // Its own end of a connection to us would keep that connection open for ever.
            let socket = UnixStream::from(event);
            if socket.peer_addr().is_ok_and(|peer| !peer.is_unnamed()) {
                return Err(Refusal::Kind { found: "a connection", wanted: "a pair of sockets" });
            }
            let event = OwnedFd::from(socket);
            let flags = rustix::fs::fcntl_getfl(&event)?;
            rustix::fs::fcntl_setfl(&event, flags | OFlags::NONBLOCK)?;
            Ok((ring, Some(File::from(event))))
        });
        Ok(event)
    }

    fn one(&mut self) -> Result<Descriptor, Refusal> {
        match (self.descriptors.pop(), self.descriptors.len()) {
            (Some(descriptor), 0) => Ok(descriptor),
            (found, left) => {
                Err(Refusal::Count { count: left.saturating_add(usize::from(found.is_some())), wanted: 1 })
            }
        }
    }

    /// Descriptions of regions after `skip` bytes.
    fn regions(&self, skip: usize) -> Result<Vec<Description>, ProtocolError> {
        let body = self.body.get(skip..).ok_or_else(|| self.wrong_size())?;
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_ne_bytes).unwrap_or_default();
        let region = |bytes: &[u8]| {
            let mut words = bytes.chunks_exact(8).map(word);
            let mut next = || words.next().unwrap_or_default();
            Description { guest: next(), length: next(), user: next(), offset: next() }
        };
        if body.len().is_multiple_of(32) {
            Ok(body.chunks_exact(32).map(region).collect())
        } else {
            Err(self.wrong_size())
        }
    }
}

/// What a request that was understood leads to.
enum Done {
    /// Nothing, or 0 if the front end wants to know.
    Yes,
    /// Nothing, or 1 if the front end wants to know.
    No(Refusal),
    /// This answer.
    Reply(Vec<u8>),
}

impl From<Result<(), Refusal>> for Done {
    fn from(result: Result<(), Refusal>) -> Self {
        result.map_or_else(Self::No, |()| Self::Yes)
    }
}

fn long(value: u64) -> Done {
    Done::Reply(value.to_ne_bytes().to_vec())
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap_or(0);
    let mut bytes: Vec<u8> = [request, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend(body);
    bytes
}

pub struct FrontEnd {
    socket: UnixStream,
    input: Vec<u8>,
    descriptors: Vec<Descriptor>,
    output: Vec<u8>,
    deadline: Option<Instant>,
    /// It may ask for replies to requests that have none.
    acknowledges: bool,
}

impl FrontEnd {
    pub fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            input: Vec::new(),
            descriptors: Vec::new(),
            output: Vec::new(),
            deadline: None,
            acknowledges: false,
        }
    }

    /// What to wait for: nothing is read before the last reply was taken.
    pub fn poll(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.socket.as_fd(), if self.output.is_empty() { PollFlags::IN } else { PollFlags::OUT })
    }

    /// When it is too late for the rest of a message or reply.
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
            match rustix::net::send(&self.socket, &self.output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => drop(self.output.drain(..sent.min(self.output.len()))),
                Err(Errno::AGAIN) => break,
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(false),
                Err(error) => return Err(ProtocolError::Socket(error)),
            }
        }
        let pending = !self.output.is_empty() || !self.input.is_empty();
        match self.deadline {
            Some(deadline) if pending && Instant::now() >= deadline => {
                return Err(match self.output.len() {
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
        let Some(header) = self.input.first_chunk::<HEADER>() else { return Ok(HEADER) };
        let (request, flags, size) = parse_header(header);
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
                let input = std::mem::take(&mut self.input);
                let Some((header, body)) = input.split_first_chunk::<HEADER>() else {
                    return Ok(Received::Part);
                };
                let (request, flags, _) = parse_header(header);
                let descriptors = std::mem::take(&mut self.descriptors);
                return Ok(Received::Whole(Message { request, flags, body: body.to_vec(), descriptors }));
            }
            // Never beyond the end of the message: descriptors belong to the one that they came with.
            let mut bytes = [0; MAX_BODY];
            let Some(part) = bytes.get_mut(..missing) else { return Ok(Received::Part) };
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got =
                match rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(part)], &mut control, flags) {
                    Ok(got) => got,
                    Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Part),
                    Err(Errno::CONNRESET) => return Ok(Received::Hangup),
                    Err(error) => return Err(ProtocolError::Socket(error)),
                };
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                    self.descriptors.extend(rights.map(Descriptor::new));
                }
            }
            if got.flags.contains(ReturnFlags::CTRUNC) || self.descriptors.len() > MAX_DESCRIPTORS {
                return Err(ProtocolError::Descriptors);
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
        let done = self.handle(device, request, &mut asked)?;
        if let Done::No(refusal) = &done {
            device.metrics.refused.inc();
            limited!(device.limiter, %refusal, "refused {request:?}");
        }
        let reply = match done {
            Done::Reply(body) => Some(body),
            _ if !self.acknowledges || asked.flags & NEED_REPLY == 0 => None,
            Done::Yes => Some(0_u64.to_ne_bytes().to_vec()),
            Done::No(_) => Some(1_u64.to_ne_bytes().to_vec()),
        };
        if let Some(body) = reply {
            self.output = message(asked.request, VERSION | REPLY, &body);
        }
        Ok(())
    }

    fn handle(
        &mut self,
        device: &mut Device,
        request: FrontendReq,
        asked: &mut Message,
    ) -> Result<Done, ProtocolError> {
        let offered = device.options.features.bits() | VERSION_1 | PROTOCOL_FEATURES;
        let one = |asked: &Message| asked.words::<1>(0).map(|[word]| word);
        Ok(match request {
            FrontendReq::SET_OWNER => Done::Yes,
            FrontendReq::RESET_OWNER | FrontendReq::RESET_DEVICE => {
                device.reset();
                Done::Yes
            }
            FrontendReq::GET_FEATURES => long(offered),
            FrontendReq::SET_FEATURES => match one(asked)? {
                features if features & !offered != 0 => Done::No(Refusal::Features(features & !offered)),
                features => {
                    device.accept(features);
                    Done::Yes
                }
            },
            FrontendReq::GET_PROTOCOL_FEATURES => long(PROTOCOL.bits()),
            FrontendReq::SET_PROTOCOL_FEATURES => {
                self.acknowledges = one(asked)? & Protocol::REPLY_ACK.bits() != 0;
                Done::Yes
            }
            FrontendReq::GET_QUEUE_NUM => long(u64::try_from(QueueMap::MAX).unwrap_or(0)),
            FrontendReq::GET_MAX_MEM_SLOTS => long(u64::try_from(MAX_REGIONS).unwrap_or(0)),
            FrontendReq::SET_MEM_TABLE => {
                let regions = asked.regions(8)?;
                let files = files(&mut asked.descriptors, regions.len());
                device
                    .change_memory(|memory| match files {
                        Ok(files) => Ok(memory.replace(regions.into_iter().zip(files))?),
                        Err(refusal) => {
                            memory.clear();
                            Err(refusal)
                        }
                    })
                    .into()
            }
            FrontendReq::ADD_MEM_REG | FrontendReq::REM_MEM_REG => {
                let regions = asked.regions(8)?;
                let [region] = regions.as_slice() else { return Err(asked.wrong_size()) };
                if request == FrontendReq::REM_MEM_REG {
                    return Ok(device.change_memory(|memory| Ok(memory.remove(*region)?)).into());
                }
                files(&mut asked.descriptors, 1)
                    .and_then(|files| {
                        let add = |file| device.change_memory(|memory| memory.add(*region, file));
                        files.into_iter().try_for_each(add).map_err(Refusal::from)
                    })
                    .into()
            }
            FrontendReq::GET_CONFIG => {
                let [offset, size] = asked.pair()?;
                let header = asked.body.get(..HEADER).ok_or_else(|| asked.wrong_size())?;
                let size = usize::try_from(size).unwrap_or(usize::MAX);
                if size.checked_add(HEADER).is_none_or(|whole| whole > MAX_BODY) {
                    return Err(asked.wrong_size());
                }
                let read = device.config.read(offset, size);
                Done::Reply(header.iter().copied().chain(read).collect())
            }
            FrontendReq::SET_CONFIG => {
                let [offset, size] = asked.pair()?;
                let bytes = asked.body.get(HEADER..).unwrap_or_default();
                if bytes.len() != usize::try_from(size).unwrap_or(usize::MAX) || bytes.len() > Config::SIZE {
                    let length = bytes.len();
                    return Ok(Done::No(ConfigError { offset, length }.into()));
                }
                let done = device.config.write(offset, bytes);
                device.update_sizes();
                done.map_err(Refusal::from).into()
            }
            FrontendReq::SET_BACKEND_REQ_FD => {
                asked.one().and_then(Channel::new).map(|channel| device.set_channel(channel)).into()
            }
            FrontendReq::GET_VRING_BASE => {
                let [ring, _] = asked.ring()?;
                device.ring_stopped(number(ring));
                // Without an answer the front end would wait for ever.
                let stopped = device.ring_mut(number(ring)).ok_or(ProtocolError::NoAnswer(ring))?;
                stopped.stop();
                let next = u32::from(stopped.next_available());
                Done::Reply([ring, next].into_iter().flat_map(u32::to_ne_bytes).collect())
            }
            FrontendReq::SET_VRING_NUM
            | FrontendReq::SET_VRING_BASE
            | FrontendReq::SET_VRING_ENABLE
            | FrontendReq::SET_VRING_ADDR
            | FrontendReq::SET_VRING_KICK
            | FrontendReq::SET_VRING_CALL
            | FrontendReq::SET_VRING_ERR => ring_request(device, request, asked)?.into(),
            _ => return Err(ProtocolError::Unsupported { request: asked.request }),
        })
    }
}

fn ring_request(
    device: &mut Device,
    request: FrontendReq,
    asked: &mut Message,
) -> Result<Result<(), Refusal>, ProtocolError> {
    if matches!(
        request,
        FrontendReq::SET_VRING_KICK | FrontendReq::SET_VRING_CALL | FrontendReq::SET_VRING_ERR
    ) {
        return Ok(asked.event()?.and_then(|(ring, event)| set_event(device, request, ring, event)));
    }
    let [index, value] = if request == FrontendReq::SET_VRING_ADDR { asked.pair()? } else { asked.ring()? };
    let places = if request == FrontendReq::SET_VRING_ADDR { Some(asked.words::<4>(8)?) } else { None };
    let Some((ring, memory)) = device.ring_and_memory(number(index)) else {
        return Ok(Err(Refusal::NoRing(index)));
    };
    let done = match (request, places) {
        (FrontendReq::SET_VRING_NUM, _) => {
            if ring.set_size(value) {
                Ok(())
            } else {
                Err(Refusal::RingSize { ring: index, size: value })
            }
        }
        (FrontendReq::SET_VRING_BASE, _) => {
            let base = u16::try_from(value).map_err(|_| Refusal::Index { ring: index, index: value });
            base.map(|base| ring.set_base(base))
        }
        (FrontendReq::SET_VRING_ENABLE, _) if value <= 1 => {
            ring.set_enabled(value == 1);
            Ok(())
        }
        (_, Some([descriptors, used, available, _log])) => {
            let at =
                |address| memory.guest_address(address).ok_or(Refusal::RingAddress { ring: index, address });
            let invalid = |error| Refusal::Ring { ring: index, error };
            match (at(descriptors), at(available), at(used)) {
                (Ok(descriptors), Ok(available), Ok(used)) => {
                    let set = ring.set_addresses(descriptors, available, used);
                    if set.is_ok() && !memory.may_touch(ring.areas()) {
                        ring.fail();
                        return Ok(Err(Refusal::Untouched(index)));
                    }
                    set.and_then(|()| ring.take_up(memory.map())).map_err(invalid)
                }
                (Err(refusal), _, _) | (_, Err(refusal), _) | (_, _, Err(refusal)) => Err(refusal),
            }
        }
        _ => Err(Refusal::Enable { ring: index, value }),
    };
    if request == FrontendReq::SET_VRING_ENABLE && value == 0 {
        // For some front ends this is the only request for a ring that stops.
        device.ring_stopped(number(index));
    }
    device.check_ring(number(index));
    Ok(done)
}

fn set_event(
    device: &mut Device,
    request: FrontendReq,
    index: u32,
    event: Option<File>,
) -> Result<(), Refusal> {
    // Without the protocol's extensions a ring is enabled by being started.
    let enables = device.accepted & PROTOCOL_FEATURES == 0;
    if request == FrontendReq::SET_VRING_KICK {
        device.ring_starts();
    }
    let ring = device.ring_mut(number(index)).ok_or(Refusal::NoRing(index))?;
    match request {
        FrontendReq::SET_VRING_CALL => ring.set_call(event),
        FrontendReq::SET_VRING_ERR => ring.set_error(event),
        _ => {
            ring.set_kick(event);
            if enables {
                ring.set_enabled(true);
            }
            device.check_ring(number(index));
        }
    }
    Ok(())
}

fn files(descriptors: &mut Vec<Descriptor>, wanted: usize) -> Result<Vec<File>, Refusal> {
    let count = descriptors.len();
    if count != wanted {
        return Err(Refusal::Count { count, wanted });
    }
    let file = |descriptor: Descriptor| descriptor.take("a file", &[Kind::File]).map(File::from);
    descriptors.drain(..).map(file).collect()
}

fn number(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

fn parse_header(header: &[u8; HEADER]) -> (u32, u32, usize) {
    let mut words =
        header.chunks_exact(4).map(|word| word.try_into().map(u32::from_ne_bytes).unwrap_or_default());
    let mut next = || words.next().unwrap_or_default();
    (next(), next(), number(next()))
}

enum Received {
    Hangup,
    Part,
    Whole(Message),
}

/// The socket on which the device speaks to the front end first.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    fn new(descriptor: Descriptor) -> Result<Self, Refusal> {
        let socket = descriptor.take("a unix socket", &[Kind::UnixSocket])?;
        match rustix::net::sockopt::socket_type(&socket)? {
            SocketType::STREAM => Ok(Self { socket }),
            _ => Err(Refusal::Kind { found: "a unix socket of messages", wanted: "one of streams" }),
        }
    }

    /// Say that the configuration has changed. `false`: not now, the channel is full.
    ///
    /// It asks for no reply: waiting for one while the front end waits for this device is a deadlock.
    pub fn config_changed(&self) -> Result<bool, Errno> {
        // Discard what the front end sends on this channel.
        let mut nothing = [0; 256];
        let _ = rustix::net::recv(&self.socket, &mut nothing, RecvFlags::DONTWAIT);
        let message = message(CONFIG_CHANGE, VERSION, &[]);
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
