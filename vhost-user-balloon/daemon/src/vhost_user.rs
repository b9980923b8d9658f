// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The front end: messages of the vhost-user protocol, and what they do to the device.
//!
//! The request handler of the `vhost` crate reads from a socket that blocks and tries again when a time-out
//! ends the read, so half a header stops it for ever. Here a message is collected without waiting, one
//! deadline covers all of it, and also a reply that the front end does not read.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use balloon_protocol::{ConfigError, QueueMap};
use rustix::event::PollFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendFlags, SocketType};
use thiserror::Error;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol, VhostUserU64,
    VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued;

use crate::call::Call;
use crate::device::{Device, LOG_ALL};
use crate::foreign::{Descriptor, Kind, peek};
use crate::limited;
use crate::memory::{MAX_REGIONS, MemoryError};
use crate::threads::{Closes, Foreign};

/// How long one message, or the reply to it, may take.
pub const DEADLINE: Duration = Duration::from_secs(1);

const HEADER: usize = 12;
const MAX_BODY: usize = 4096;
/// How many descriptors a message may have.
const MAX_DESCRIPTORS: usize = 32;
/// How many can come with one call, SCM_MAX_FD of Linux. The kernel closes those for which there is no room, here
/// and now.
const ROOM: usize = 253;
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
    #[error("a message has {0} descriptors, more than {MAX_DESCRIPTORS}")]
    Descriptors(usize),
    #[error("it sent descriptors while too many of unknown kinds wait to be closed")]
    Waiting,
    #[error(
        "it sent a descriptor of mode {mode:#o} on a device with major number {device}, which is neither an \
         eventfd, a pipe, a unix socket nor a file in memory or on a disk"
    )]
    Kind { mode: u32, device: u32 },
    #[error("request {request} is not supported")]
    Unsupported { request: u32 },
    #[error("there is no ring {0} whose index could be returned")]
    NoAnswer(u32),
}

/// Why a request is refused. Its effect is that of a request that was not made.
#[derive(Debug, Error)]
enum Refusal {
    /// The connection ends as well.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
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

    /// The body, which is a `T` and nothing else.
    fn body<T: ByteValued + Default>(&self) -> Result<T, ProtocolError> {
        parse(&self.body).ok_or_else(|| self.wrong_size())
    }

    /// The number in the body.
    fn number(&self) -> Result<u64, ProtocolError> {
        self.body::<VhostUserU64>().map(|body| body.value)
    }

    /// A range of the configuration space, and what is behind it.
    fn config(&self) -> Result<(VhostUserConfig, &[u8]), ProtocolError> {
        let parts = self.body.split_at_checked(size_of::<VhostUserConfig>());
        parts.and_then(|(range, rest)| Some((parse(range)?, rest))).ok_or_else(|| self.wrong_size())
    }

    /// Descriptions of regions, behind their number.
    fn regions(&self) -> Result<Vec<VhostUserMemoryRegion>, ProtocolError> {
        let regions = self.body.get(8..).map(|body| body.chunks(size_of::<VhostUserMemoryRegion>()));
        regions.and_then(|regions| regions.map(parse).collect()).ok_or_else(|| self.wrong_size())
    }

    /// The only region.
    fn region(&self) -> Result<VhostUserMemoryRegion, ProtocolError> {
        let [region] = self.regions()?.try_into().map_err(|_| self.wrong_size())?;
        Ok(region)
    }

    /// The number of a ring, and an eventfd, or a socket if that is allowed; it never blocks from now on.
    fn event(&mut self, sockets: bool) -> Result<(u32, Option<Descriptor>), Refusal> {
        let word = self.number()?;
        let ring = u32::try_from(word & 0xff).unwrap_or(0);
        if word & NO_DESCRIPTOR != 0 {
            return Ok((ring, None));
        }
        let event = self.one()?;
        let wanted = match (event.kind, sockets) {
            (Kind::Event, _) => {
                let flags = rustix::fs::fcntl_getfl(&*event.file)?;
                rustix::fs::fcntl_setfl(&*event.file, flags | OFlags::NONBLOCK)?;
                return Ok((ring, Some(event)));
            }
            (Kind::UnixSocket, true) => return pair(event).map(|event| (ring, Some(event))),
            (_, true) => "an eventfd or a unix socket",
            (_, false) => "an eventfd; sockets need --user-mode-linux",
        };
        Err(Refusal::Kind { found: event.kind.name(), wanted })
    }

    fn one(&mut self) -> Result<Descriptor, Refusal> {
        let count = self.descriptors.len();
        self.descriptors.pop().filter(|_| count == 1).ok_or(Refusal::Count { count, wanted: 1 })
    }
}

/// A socket of a pair. Its own end of a connection to us would keep that connection open for ever.
fn pair(socket: Descriptor) -> Result<Descriptor, Refusal> {
    if socket.kind != Kind::UnixSocket {
        return Err(Refusal::Kind { found: socket.kind.name(), wanted: "a unix socket" });
    }
    let file: Foreign<UnixStream> = socket.file.into();
    if file.peer_addr().is_ok_and(|peer| !peer.is_unnamed()) {
        return Err(Refusal::Kind { found: "a connection", wanted: "a pair of sockets" });
    }
    Ok(Descriptor { file: file.into(), ..socket })
}

/// What `bytes` hold, if that is all of a `T`.
fn parse<T: ByteValued + Default>(bytes: &[u8]) -> Option<T> {
    let mut value = T::default();
    (bytes.len() == size_of::<T>()).then(|| {
        value.as_mut_slice().copy_from_slice(bytes);
        value
    })
}

fn long(value: u64) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap_or(0);
    let mut bytes: Vec<u8> = [request, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend(body);
    bytes
}

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
            true if Closes::Known.is_full() => PollFlags::empty(),
            true => PollFlags::IN,
            false => PollFlags::OUT,
        };
        (self.socket.as_fd(), events)
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
            match rustix::net::send(&*self.socket, &self.output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
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
            if Closes::Known.is_full() {
                return Ok(Received::Part);
            }
            // What cannot be closed now is left where it is.
            if Closes::Unknown.is_full() && peek(&self.socket, part).is_ok_and(|(_, descriptors)| descriptors)
            {
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
                    self.descriptors.extend(rights.map(Descriptor::new));
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
        let done = self.handle(device, request, &mut asked);
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

    /// Do what is asked; returns the reply of a request that has one.
    fn handle(
        &mut self,
        device: &mut Device,
        request: FrontendReq,
        asked: &mut Message,
    ) -> Result<Option<Vec<u8>>, Refusal> {
        let offered = device.options.features.bits() | VERSION_1 | PROTOCOL_FEATURES;
        match request {
            // QEMU sends the latter two when it begins to log writes. There is no log of this device.
            FrontendReq::SET_OWNER | FrontendReq::SET_LOG_BASE | FrontendReq::SET_LOG_FD => {}
            FrontendReq::RESET_OWNER | FrontendReq::RESET_DEVICE => device.reset(),
            FrontendReq::GET_FEATURES => return Ok(Some(long(offered))),
            FrontendReq::SET_FEATURES => match asked.number()? {
                features if features & !(offered | LOG_ALL) != 0 => {
                    return Err(Refusal::Features(features & !(offered | LOG_ALL)));
                }
                features => device.accept(features),
            },
            FrontendReq::GET_PROTOCOL_FEATURES => return Ok(Some(long(PROTOCOL.bits()))),
            FrontendReq::SET_PROTOCOL_FEATURES => {
                self.acknowledges = asked.number()? & Protocol::REPLY_ACK.bits() != 0;
            }
            FrontendReq::GET_QUEUE_NUM => {
                return Ok(Some(long(u64::try_from(QueueMap::MAX).unwrap_or(0))));
            }
            FrontendReq::GET_MAX_MEM_SLOTS => {
                return Ok(Some(long(u64::try_from(MAX_REGIONS).unwrap_or(0))));
            }
            FrontendReq::SET_MEM_TABLE => {
                let regions = asked.regions()?;
                let files = files(&mut asked.descriptors, regions.len());
                device.change_memory(|memory| match files {
                    Ok(files) => Ok(memory.replace(regions.into_iter().zip(files))?),
                    Err(refusal) => {
                        memory.clear();
                        Err(refusal)
                    }
                })?;
            }
            FrontendReq::ADD_MEM_REG => {
                let region = asked.region()?;
                for file in files(&mut asked.descriptors, 1)? {
                    device.change_memory(|memory| memory.add(region, file))?;
                }
            }
            FrontendReq::REM_MEM_REG => {
                let region = asked.region()?;
                device.change_memory(|memory| memory.remove(region))?;
            }
            FrontendReq::GET_CONFIG => {
                let (range, _) = asked.config()?;
                let size = index(range.size);
                if size > MAX_BODY - size_of::<VhostUserConfig>() {
                    return Err(asked.wrong_size().into());
                }
                let read = device.config.read(range.offset, size);
                return Ok(Some(range.as_slice().iter().copied().chain(read).collect()));
            }
            FrontendReq::SET_CONFIG => {
                let (range, bytes) = asked.config()?;
                let (offset, length) = (range.offset, bytes.len());
                if length != index(range.size) {
                    return Err(ConfigError { offset, length }.into());
                }
                device.config.write(offset, bytes)?;
                device.update_sizes();
            }
            FrontendReq::SET_BACKEND_REQ_FD => device.set_channel(Channel::new(pair(asked.one()?)?)?),
            FrontendReq::GET_VRING_BASE => {
                let ring = asked.body::<VhostUserVringState>()?.index;
                device.ring_stopped(index(ring));
                // Without an answer the front end would wait for ever.
                let stopped = device.ring_mut(index(ring)).ok_or(ProtocolError::NoAnswer(ring))?;
                stopped.stop();
                let state = VhostUserVringState::new(ring, stopped.next_available().into());
                return Ok(Some(state.as_slice().to_vec()));
            }
            FrontendReq::SET_VRING_NUM | FrontendReq::SET_VRING_BASE | FrontendReq::SET_VRING_ENABLE => {
                let state: VhostUserVringState = asked.body()?;
                set_state(device, request, state.index, state.num)?;
            }
            FrontendReq::SET_VRING_ADDR => set_addresses(device, asked.body()?)?,
            FrontendReq::SET_VRING_KICK | FrontendReq::SET_VRING_CALL | FrontendReq::SET_VRING_ERR => {
                let calls = request != FrontendReq::SET_VRING_KICK;
                let (ring, event) = asked.event(calls && device.options.user_mode_linux)?;
                set_event(device, request, ring, event)?;
            }
            _ => return Err(ProtocolError::Unsupported { request: asked.request }.into()),
        }
        Ok(None)
    }
}

fn set_state(device: &mut Device, request: FrontendReq, ring: u32, value: u32) -> Result<(), Refusal> {
    let found = device.ring_mut(index(ring)).ok_or(Refusal::NoRing(ring))?;
    match (request, value) {
        (FrontendReq::SET_VRING_NUM, size) if found.set_size(size) => {}
        (FrontendReq::SET_VRING_NUM, size) => return Err(Refusal::RingSize { ring, size }),
        (FrontendReq::SET_VRING_BASE, base) => {
            let base = u16::try_from(base).map_err(|_| Refusal::Index { ring, index: base })?;
            found.set_base(base);
        }
        (_, 1) => found.set_enabled(true),
        (_, 0) => {
            found.set_enabled(false);
            // For some front ends this is the only request for a ring that stops.
            device.ring_stopped(index(ring));
        }
        (_, value) => return Err(Refusal::Enable { ring, value }),
    }
    device.check_ring(index(ring));
    Ok(())
}

fn set_addresses(device: &mut Device, places: VhostUserVringAddr) -> Result<(), Refusal> {
    let ring = places.index;
    let (found, memory) = device.ring_and_memory(index(ring)).ok_or(Refusal::NoRing(ring))?;
    let at = |address| memory.guest_address(address).ok_or(Refusal::RingAddress { ring, address });
    let (descriptors, available, used) = (at(places.descriptor)?, at(places.available)?, at(places.used)?);
    let invalid = |error| Refusal::Ring { ring, error };
    found.set_addresses(descriptors, available, used).map_err(invalid)?;
    if !memory.may_touch(found.areas()) {
        found.fail();
        return Err(Refusal::Untouched(ring));
    }
    found.take_up(memory.map()).map_err(invalid)?;
    device.check_ring(index(ring));
    Ok(())
}

fn set_event(
    device: &mut Device,
    request: FrontendReq,
    number: u32,
    event: Option<Descriptor>,
) -> Result<(), Refusal> {
    let call = |event: Descriptor| match event.kind {
        Kind::UnixSocket => Call::socket(event.file),
        _ => Call::event(event.file),
    };
    // Without the protocol's extensions a ring is enabled by being started.
    let enables = device.accepted & PROTOCOL_FEATURES == 0;
    if request == FrontendReq::SET_VRING_KICK {
        device.ring_starts();
    }
    let ring = device.ring_mut(index(number)).ok_or(Refusal::NoRing(number))?;
    match request {
        FrontendReq::SET_VRING_CALL => ring.set_call(event.map(call)),
        FrontendReq::SET_VRING_ERR => ring.set_error(event.map(call)),
        _ => {
            ring.set_kick(event.map(|event| event.file.into()));
            if enables {
                ring.set_enabled(true);
            }
            device.check_ring(index(number));
        }
    }
    Ok(())
}

fn files(descriptors: &mut Vec<Descriptor>, wanted: usize) -> Result<Vec<Foreign<File>>, Refusal> {
    let count = descriptors.len();
    if count != wanted {
        return Err(Refusal::Count { count, wanted });
    }
    let file = |descriptor: Descriptor| match descriptor.kind {
        Kind::File => Ok(descriptor.file.into()),
        other => Err(Refusal::Kind { found: other.name(), wanted: "a file" }),
    };
    descriptors.drain(..).map(file).collect()
}

/// A number of the protocol as an index or a length.
fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

enum Received {
    Hangup,
    Part,
    Whole(Message),
}

/// The socket on which the device speaks to the front end first.
#[derive(Debug)]
pub struct Channel {
    socket: Foreign<OwnedFd>,
}

impl Channel {
    fn new(descriptor: Descriptor) -> Result<Self, Refusal> {
        let socket = descriptor.file;
        match rustix::net::sockopt::socket_type(&*socket)? {
            SocketType::STREAM => Ok(Self { socket }),
            _ => Err(Refusal::Kind { found: "a unix socket of messages", wanted: "one of streams" }),
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
