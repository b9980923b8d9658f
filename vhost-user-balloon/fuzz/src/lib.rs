// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest and a front end can send, made of arbitrary bytes, and what must hold afterwards.
//!
//! A server runs in the same thread: everything is in its socket and its kicks before it begins, and it
//! ends where the socket does. So each run is the same every time.

use std::collections::HashMap;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use balloon_protocol::{Bitmap, Features, QueueKind, QueueMap};
use rustix::event::EventfdFlags;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::pipe::PipeFlags;
use vhost::vhost_user::message::FrontendReq;
use vhost_user_balloon::device::{Options, TURN};
use vhost_user_balloon::server::{Server, Source};

const PAGE: u64 = 4096;
/// Where the guest's memory begins; it has two regions side by side, which are the other way round in the
/// file, with bytes of no region around them.
const BASE: u64 = 1 << 32;
const HALF: u64 = 0x4_0000;
const GUARD: u64 = 0x4000;
const FILE: u64 = 2 * HALF + 2 * GUARD;
const FILLED: u8 = 0x5a;
/// Rings, lists and answers are below this; the rest is memory to play with.
const LOW: u64 = 0x1_4000;
const LISTS: u64 = 0xa000;
const ANSWERS: u64 = 0x1_0000;
const ANSWER: u64 = 64;
/// The front end's addresses.
const USER: u64 = 0x7000_0000_0000;
const RING: u64 = 0x2000;
const SIZE: u16 = 128;

const VERSION_1: u64 = 1 << 32;
const PROTOCOL: u64 = 1 << 30;

fn memfd(bytes: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd"));
    file.set_len(bytes).expect("a memfd has a size");
    file
}

fn filled() -> File {
    let file = memfd(FILE);
    file.write_all_at(&vec![FILLED; FILE as usize], 0).expect("a memfd can be written");
    file
}

fn read(file: &File, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at).expect("it is inside of the file");
    bytes
}

/// Where an address of the guest is in the file.
fn place(address: u64) -> Option<u64> {
    let at = address.checked_sub(BASE)?;
    match at {
        _ if at < HALF => Some(GUARD + HALF + at),
        _ if at < 2 * HALF => Some(GUARD + at - HALF),
        _ => None,
    }
}

fn write(file: &File, address: u64, bytes: &[u8]) {
    file.write_all_at(bytes, place(address).expect("it is the guest's")).expect("it can be written");
}

/// Everything that is sent to the server, before it begins.
struct FrontEnd {
    ours: UnixStream,
    theirs: UnixStream,
}

impl FrontEnd {
    fn new() -> Self {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        ours.set_nonblocking(true).expect("a socket need not wait");
        Self { ours, theirs }
    }

    fn send(&self, number: FrontendReq, body: &[u8], descriptors: &[&OwnedFd]) {
        let size = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let mut message: Vec<u8> = [number as u32, 1, size].into_iter().flat_map(u32::to_ne_bytes).collect();
        message.extend(body);
        self.send_raw(&message, descriptors);
    }

    fn send_raw(&self, message: &[u8], descriptors: &[&OwnedFd]) {
        let borrowed: Vec<_> = descriptors.iter().map(|fd| fd.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&borrowed));
        }
        // When the socket is full the rest is not sent: the same every time.
        let _ = rustix::net::sendmsg(&self.ours, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL);
    }

    fn words(&self, number: FrontendReq, words: &[u64], descriptors: &[&OwnedFd]) {
        let body: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.send(number, &body, descriptors);
    }

    fn ring(&self, number: FrontendReq, index: u32, value: u32) {
        self.words(number, &[u64::from(index) | u64::from(value) << 32], &[]);
    }

    fn regions(&self, number: FrontendReq, head: u64, regions: &[[u64; 4]], descriptors: &[&OwnedFd]) {
        let words: Vec<u64> = std::iter::once(head).chain(regions.iter().flatten().copied()).collect();
        self.words(number, &words, descriptors);
    }

    fn addresses(&self, index: u32, descriptors: u64, used: u64, available: u64) {
        self.words(FrontendReq::SET_VRING_ADDR, &[u64::from(index), descriptors, used, available, 0], &[]);
    }

    fn config(&self, number: FrontendReq, offset: u32, size: u32, bytes: &[u8]) {
        let mut body: Vec<u8> = [offset, size, 0].into_iter().flat_map(u32::to_ne_bytes).collect();
        body.extend(bytes);
        self.send(number, &body, &[]);
    }

    fn serve(self, options: Options) {
        // Kicks are looked at between requests: a few that do nothing.
        for _ in 0..4 {
            self.send(FrontendReq::GET_FEATURES, &[], &[]);
        }
        self.ours.shutdown(std::net::Shutdown::Write).expect("a socket can be shut");
        let mut server = Server::new(options).expect("a server");
        // How it ends does not matter; that it does is what this is about.
        let _ = server.run(Source::Stream(self.theirs));
    }
}

fn options(u: &mut Unstructured<'_>) -> Result<Options> {
    let bits: u8 = u.arbitrary()?;
    Ok(Options {
        features: Options::all_features(),
        target: if bits & 1 != 0 { 8 * PAGE } else { 0 },
        // It is, and claims are made from the first chain on: all are in the rings when these are started.
        memory_is_shared: bits & 2 == 0,
        inhibited: bits & 16 != 0,
        discard_unit: if bits & 4 != 0 { 4 * PAGE } else { PAGE },
        inhibit_one_in: if bits & 8 != 0 { std::num::NonZeroU32::new(2) } else { None },
        stats_interval: None,
        // Requests come between the steps of one chain.
        turn: if bits & 64 != 0 { Duration::ZERO } else { TURN },
        user_mode_linux: bits & 32 != 0,
    })
}

/// An address that is near to the guest's memory most of the time.
fn address(u: &mut Unstructured<'_>) -> Result<u64> {
    let kind: u8 = u.arbitrary()?;
    let value: u32 = u.arbitrary()?;
    Ok(match kind % 16 {
        0 => u.arbitrary()?,
        1 => BASE.wrapping_add(u64::from(value % 0x10_0000)),
        2 => BASE.wrapping_sub(u64::from(value % 0x4000)),
        _ => BASE + u64::from(value) % (2 * HALF / PAGE + 2) * PAGE,
    })
}

fn length(u: &mut Unstructured<'_>) -> Result<u32> {
    let kind: u8 = u.arbitrary()?;
    let value: u16 = u.arbitrary()?;
    Ok(match kind % 8 {
        0 => u.arbitrary()?,
        1 => u32::from(value),
        _ => (u32::from(value) % 24 + 1) * PAGE as u32,
    })
}

#[derive(Clone, Default)]
struct Chain {
    parts: Vec<(u64, u32, bool)>,
    /// The content of the lists, if nothing else can be read.
    list: Option<Vec<u8>>,
    /// Where the answer goes, if it goes nowhere else.
    answer: Option<(u64, u32)>,
}

impl Chain {
    fn writable(&self) -> impl Iterator<Item = (u64, u32)> {
        self.parts.iter().filter(|part| part.2).map(|part| (part.0, part.1))
    }
}

struct Guest {
    file: File,
    lists: u64,
    answers: u64,
    /// Nothing that is discarded or answered is where the lists and rings are.
    clean: bool,
    chains: Vec<HashMap<u16, Chain>>,
    slots: Vec<u16>,
    offered: Vec<u16>,
}

impl Guest {
    fn touches(&mut self, address: u64, length: u64) {
        let end = address.saturating_add(length);
        if address < BASE + LOW && end > BASE {
            self.clean = false;
        }
    }

    fn part(&mut self, u: &mut Unstructured<'_>, chain: &mut Chain) -> Result<()> {
        let kind: u8 = u.arbitrary()?;
        match kind % 4 {
            0 => {
                let (at, length, writable) = (address(u)?, length(u)?, kind & 0x80 != 0);
                self.touches(at, u64::from(length));
                chain.parts.push((at, length, writable));
                if writable {
                    chain.answer = None;
                } else {
                    chain.list = None;
                }
            }
            1 | 2 => {
                let count = usize::from(u.arbitrary::<u8>()? % 48);
                let mut bytes = Vec::new();
                for _ in 0..count {
                    let frame = if kind % 4 == 1 {
                        let page: u16 = u.arbitrary()?;
                        let pages = (2 * HALF / PAGE) as u32 + 2;
                        (BASE / PAGE) as u32 + u32::from(page) % pages
                    } else {
                        u.arbitrary()?
                    };
                    self.touches(u64::from(frame) * PAGE, PAGE);
                    bytes.extend(frame.to_le_bytes());
                }
                bytes.truncate(bytes.len().saturating_sub(usize::from(kind >> 6 == 1)));
                let at = self.lists;
                if at + bytes.len() as u64 > BASE + ANSWERS {
                    return Ok(());
                }
                write(&self.file, at, &bytes);
                self.lists += bytes.len() as u64;
                chain.parts.push((at, bytes.len() as u32, false));
                if let Some(list) = &mut chain.list {
                    list.extend(bytes);
                }
            }
            _ => {
                let at = self.answers;
                if at + ANSWER > BASE + LOW {
                    return Ok(());
                }
                self.answers += ANSWER;
                let length = u32::from(u.arbitrary::<u8>()?) % (ANSWER as u32 + 1);
                let first = chain.writable().next().is_none();
                chain.parts.push((at, length, true));
                chain.answer = first.then_some((at, length));
            }
        }
        Ok(())
    }

    fn put(&mut self, ring: usize, chain: Chain) {
        let base = BASE + ring as u64 * RING;
        let head = self.slots[ring];
        let count = chain.parts.len() as u16;
        if count == 0 || head + count > SIZE {
            return;
        }
        for (n, (address, length, writable)) in chain.parts.iter().enumerate() {
            let slot = head + n as u16;
            let more = slot + 1 < head + count;
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend((u16::from(more) | u16::from(*writable) << 1).to_le_bytes());
            bytes.extend((slot + 1).to_le_bytes());
            write(&self.file, base + u64::from(slot) * 16, &bytes);
        }
        let offered = self.offered[ring];
        write(&self.file, base + 0x800 + 4 + u64::from(offered) * 2, &head.to_le_bytes());
        self.offered[ring] = offered + 1;
        write(&self.file, base + 0x800 + 2, &(offered + 1).to_le_bytes());
        self.slots[ring] = head + count;
        self.chains[ring].insert(head, chain);
    }

    fn is_zero(&self, page: u64) -> bool {
        place(page).is_some_and(|at| read(&self.file, at, PAGE as usize).iter().all(|byte| *byte == 0))
    }

    /// Every claim of the device, against the memory.
    fn judge(&self, features: Features) {
        let queues = QueueMap::new(features);
        // The driver may write to memory again after it was discarded.
        let inflate = queues.index(QueueKind::Inflate).unwrap_or(0);
        let answered: Vec<(u64, u32)> = self.chains[inflate].values().flat_map(Chain::writable).collect();
        let rewritten = |page: u64| {
            answered
                .iter()
                .any(|(at, length)| *at < page + PAGE && at.saturating_add((*length).into()) > page)
        };
        for ring in 0..QueueMap::MAX {
            let base = BASE + ring as u64 * RING + 0x1000;
            let at = place(base).expect("rings are in memory");
            let head = read(&self.file, at, 4);
            let used = u16::from_le_bytes([head[2], head[3]]);
            assert!(used <= self.offered[ring], "{used} chains came back, {} were given", self.offered[ring]);
            let mut seen = Vec::new();
            for n in 0..used {
                let element = read(&self.file, at + 4 + u64::from(n) * 8, 8);
                let id = u32::from_le_bytes([element[0], element[1], element[2], element[3]]);
                let length = u32::from_le_bytes([element[4], element[5], element[6], element[7]]);
                let id = u16::try_from(id).expect("a number that was given");
                assert!(!seen.contains(&id), "chain {id} came back twice");
                seen.push(id);
                let chain = &self.chains[ring][&id];
                match queues.kind(ring) {
                    Some(QueueKind::Reporting) => {
                        let total: u64 = chain.writable().map(|(_, length)| u64::from(length)).sum();
                        assert!(length == 0 || u64::from(length) == total, "{length} of {total} bytes");
                        assert!(length == 0 || features.contains(Features::DEVICE_INIT_REPORTED));
                        for (at, _) in chain.writable().filter(|_| length != 0) {
                            assert_eq!(at % PAGE, 0, "a part of a page is no report");
                        }
                        let pages = chain.writable().filter(|_| length != 0).flat_map(|(at, length)| {
                            (0..u64::from(length) / PAGE).map(move |n| at + n * PAGE)
                        });
                        for page in pages.filter(|page| !rewritten(*page)) {
                            assert!(self.is_zero(page), "{page:#x} was claimed to be zero");
                        }
                    }
                    Some(QueueKind::Inflate) => {
                        if length != 0 {
                            assert!(features.contains(Features::DEVICE_INIT_ON_INFLATE));
                            self.judge_bitmap(chain, length, rewritten);
                        }
                    }
                    _ => assert_eq!(length, 0),
                }
            }
        }
    }

    fn judge_bitmap(&self, chain: &Chain, length: u32, rewritten: impl Fn(u64) -> bool) {
        let (Some(list), Some((at, room))) = (&chain.list, chain.answer) else { return };
        assert!(length <= room, "an answer of {length} bytes where there is room for {room}");
        let frames: Vec<u64> = list
            .chunks_exact(4)
            .map(|word| u64::from(u32::from_le_bytes([word[0], word[1], word[2], word[3]])))
            .collect();
        assert_eq!(length as usize, Bitmap::bytes_for(frames.len()));
        let bits = read(&self.file, place(at).expect("it is the guest's"), length as usize);
        for n in 0..bits.len() * 8 {
            if bits[n / 8] >> (n % 8) & 1 == 0 {
                continue;
            }
            let page = frames.get(n).expect("no bit after the last page") * PAGE;
            assert!(rewritten(page) || self.is_zero(page), "{page:#x} was claimed to be zero");
        }
    }
}

/// What is in the queues.
pub fn queues(data: &[u8]) {
    let _ = run_queues(&mut Unstructured::new(data));
}

fn run_queues(u: &mut Unstructured<'_>) -> Result<()> {
    let options = options(u)?;
    let bits = u64::from(u.arbitrary::<u8>()?) & options.features.bits();
    let features = Features::negotiated(Features::from_bits(bits));
    let poison: u32 = if u.arbitrary::<u8>()? & 7 == 7 { u.arbitrary()? } else { 0 };
    let file = filled();
    for ring in 0..QueueMap::MAX as u64 {
        write(&file, BASE + ring * RING, &vec![0; RING as usize]);
    }
    let mut guest = Guest {
        file,
        lists: BASE + LISTS,
        answers: BASE + ANSWERS,
        clean: true,
        chains: vec![HashMap::new(); QueueMap::MAX],
        slots: vec![0; QueueMap::MAX],
        offered: vec![0; QueueMap::MAX],
    };
    for _ in 0..u.arbitrary::<u8>()? % 24 {
        let ring = usize::from(u.arbitrary::<u8>()?) % QueueMap::MAX;
        let mut chain = Chain { list: Some(Vec::new()), ..Chain::default() };
        for _ in 0..u.arbitrary::<u8>()? % 6 {
            guest.part(u, &mut chain)?;
        }
        guest.put(ring, chain);
    }
    // What no driver would write into its rings.
    for _ in 0..u.arbitrary::<u8>()? % 16 {
        guest.clean = false;
        let at = u64::from(u.arbitrary::<u16>()?) % LISTS;
        write(&guest.file, BASE + at, &u.arbitrary::<u16>()?.to_le_bytes());
    }

    let front = FrontEnd::new();
    front.send(FrontendReq::GET_FEATURES, &[], &[]);
    front.words(FrontendReq::SET_FEATURES, &[bits | VERSION_1 | PROTOCOL], &[]);
    front.words(FrontendReq::SET_PROTOCOL_FEATURES, &[1 << 0 | 1 << 9], &[]);
    let shared = OwnedFd::from(guest.file.try_clone().expect("a descriptor"));
    let regions = [[BASE, HALF, USER, GUARD + HALF], [BASE + HALF, HALF, USER + HALF, GUARD]];
    front.regions(FrontendReq::SET_MEM_TABLE, 2, &regions, &[&shared, &shared]);
    front.config(FrontendReq::SET_CONFIG, 12, 4, &poison.to_le_bytes());
    let call = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd");
    for ring in 0..QueueMap::MAX as u32 {
        let base = USER + u64::from(ring) * RING;
        let kick = rustix::event::eventfd(1, EventfdFlags::CLOEXEC).expect("an eventfd");
        front.ring(FrontendReq::SET_VRING_NUM, ring, SIZE.into());
        front.ring(FrontendReq::SET_VRING_BASE, ring, 0);
        front.addresses(ring, base, base + 0x1000, base + 0x800);
        front.words(FrontendReq::SET_VRING_KICK, &[ring.into()], &[&kick]);
        front.words(FrontendReq::SET_VRING_CALL, &[ring.into()], &[&call]);
        front.ring(FrontendReq::SET_VRING_ENABLE, ring, 1);
    }
    for _ in 0..u.arbitrary::<u8>().unwrap_or(0) % 12 {
        meanwhile(u.arbitrary()?, &front, bits, &regions[1], &shared);
    }
    front.serve(options);

    let (before, after) =
        (read(&guest.file, 0, GUARD as usize), read(&guest.file, FILE - GUARD, GUARD as usize));
    assert!(
        before.iter().chain(&after).all(|byte| *byte == FILLED),
        "a byte outside of the regions has changed"
    );
    if guest.clean {
        guest.judge(features);
    }
    Ok(())
}

/// A request while chains are worked on, after which the claims have to be true all the same.
fn meanwhile(kind: u8, front: &FrontEnd, bits: u64, region: &[u64; 4], file: &OwnedFd) {
    const LOG_ALL: u64 = 1 << 26;
    let ring = u32::from(kind / 8) % QueueMap::MAX as u32;
    match kind % 8 {
        0 => front.words(FrontendReq::SET_FEATURES, &[bits | LOG_ALL | VERSION_1 | PROTOCOL], &[]),
        1 => front.words(FrontendReq::SET_FEATURES, &[bits | VERSION_1 | PROTOCOL], &[]),
        2 => front.config(FrontendReq::SET_CONFIG, 12, 4, &u32::from(kind / 8).to_le_bytes()),
        3 => front.regions(FrontendReq::REM_MEM_REG, 0, &[*region], &[]),
        4 => front.regions(FrontendReq::ADD_MEM_REG, 0, &[*region], &[file]),
        5 => front.ring(FrontendReq::SET_VRING_ENABLE, ring, 0),
        6 => front.ring(FrontendReq::SET_VRING_ENABLE, ring, 1),
        _ => front.config(FrontendReq::SET_CONFIG, 20, 4, &u32::from(kind / 8).to_le_bytes()),
    }
}

/// A descriptor of one of 10 kinds; `others` keeps what has to live as long.
fn descriptor(kind: u8, others: &mut Vec<OwnedFd>) -> OwnedFd {
    let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
    match kind % 8 {
        0 => rustix::event::eventfd(1, EventfdFlags::CLOEXEC).expect("an eventfd"),
        1 => memfd(4 * PAGE).into(),
        2 => memfd(0).into(),
        3 => {
            let (reader, writer) = pipe();
            others.push(reader);
            writer
        }
        4 => pipe().0,
        5 => File::open("/dev/zero").expect("/dev/zero").into(),
        6 => {
            let (one, other) = UnixStream::pair().expect("a pair of sockets");
            let front = FrontEnd { ours: other, theirs: one };
            if kind & 8 != 0 {
                // With a descriptor in flight.
                front.send_raw(&[0; 8], &[&memfd(PAGE).into()]);
            }
            others.push(front.ours.into());
            front.theirs.into()
        }
        7 if kind & 8 != 0 => {
            rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("an epoll")
        }
        _ => File::open("/").expect("a folder").into(),
    }
}

/// What a front end asks for.
pub fn requests(data: &[u8]) {
    let _ = run_requests(&mut Unstructured::new(data));
}

fn run_requests(u: &mut Unstructured<'_>) -> Result<()> {
    let options = options(u)?;
    let file = filled();
    let shared = OwnedFd::from(file.try_clone().expect("a descriptor"));
    let front = FrontEnd::new();
    let mut others = Vec::new();
    // The parts of the file that have been the guest's.
    let mut given: Vec<(u64, u64)> = Vec::new();
    front.send(FrontendReq::GET_FEATURES, &[], &[]);
    for _ in 0..u.arbitrary::<u8>()? % 48 {
        let what: u8 = u.arbitrary()?;
        let index = u32::from(u.arbitrary::<u8>()?) % 6;
        match what % 20 {
            0 => {
                let bits: u64 = u.arbitrary()?;
                let known = options.features.bits() | VERSION_1 | PROTOCOL;
                front.words(
                    FrontendReq::SET_FEATURES,
                    &[if what & 0x80 != 0 { bits } else { bits & known }],
                    &[],
                );
            }
            1 => front.words(FrontendReq::SET_PROTOCOL_FEATURES, &[u.arbitrary()?], &[]),
            2 => {
                let mut regions = Vec::new();
                for _ in 0..index {
                    let region = region(u)?;
                    given.push((region[3], region[1]));
                    regions.push(region);
                }
                let count = if what & 0x80 != 0 { u64::from(index) + 1 } else { index.into() };
                let files = vec![&shared; regions.len()];
                front.regions(FrontendReq::SET_MEM_TABLE, count, &regions, &files);
            }
            3 => {
                let region = region(u)?;
                given.push((region[3], region[1]));
                front.regions(FrontendReq::ADD_MEM_REG, 0, &[region], &[&shared]);
            }
            4 => front.regions(FrontendReq::REM_MEM_REG, 0, &[region(u)?], &[]),
            5 => {
                let shift = u.arbitrary::<u8>()? % 12;
                let odd = u32::from(what & 0x80 != 0);
                front.ring(FrontendReq::SET_VRING_NUM, index, (1 << shift) - odd);
            }
            6 => front.ring(FrontendReq::SET_VRING_BASE, index, u.arbitrary::<u16>()?.into()),
            7 => {
                let mut at =
                    || Ok::<u64, arbitrary::Error>(USER.wrapping_add(address(u)?.wrapping_sub(BASE)));
                front.addresses(index, at()?, at()?, at()?);
            }
            8..=10 => {
                let number =
                    [FrontendReq::SET_VRING_KICK, FrontendReq::SET_VRING_CALL, FrontendReq::SET_VRING_ERR]
                        [usize::from(what % 20 - 8)];
                let kind: u8 = u.arbitrary()?;
                if kind & 0x80 != 0 {
                    front.words(number, &[u64::from(index) | 1 << 8], &[]);
                } else {
                    front.words(number, &[index.into()], &[&descriptor(kind, &mut others)]);
                }
            }
            11 => front.ring(FrontendReq::SET_VRING_ENABLE, index, u32::from(what & 0x80 == 0)),
            12 => front.ring(FrontendReq::GET_VRING_BASE, index, 0),
            13 => {
                let (offset, size) =
                    (u32::from(u.arbitrary::<u8>()?) % 28, u32::from(u.arbitrary::<u8>()?) % 28);
                front.config(FrontendReq::GET_CONFIG, offset, size, &vec![0; size as usize]);
            }
            14 => {
                let offset = u32::from(u.arbitrary::<u8>()?) % 28;
                let count = usize::from(u.arbitrary::<u8>()?) % 28;
                let bytes: Vec<u8> = (0..count).map(|_| u.arbitrary()).collect::<Result<_>>()?;
                front.config(FrontendReq::SET_CONFIG, offset, count as u32, &bytes);
            }
            15 => {
                front.words(FrontendReq::SET_BACKEND_REQ_FD, &[], &[&descriptor(u.arbitrary()?, &mut others)])
            }
            16 => front.send(FrontendReq::RESET_DEVICE, &[], &[]),
            17 => front.send(FrontendReq::SET_OWNER, &[], &[]),
            _ => {
                // Anything at all.
                let number = u32::from(u.arbitrary::<u8>()?) % 48;
                let flags: u8 = u.arbitrary()?;
                let count = usize::from(u.arbitrary::<u8>()?) % 100;
                let body: Vec<u8> = (0..count).map(|_| u.arbitrary()).collect::<Result<_>>()?;
                let kind: u8 = u.arbitrary()?;
                let size = if what & 0x80 != 0 { u.arbitrary()? } else { count as u32 };
                let mut message: Vec<u8> =
                    [number, flags.into(), size].into_iter().flat_map(u32::to_ne_bytes).collect();
                message.extend(body);
                let sent = descriptor(kind, &mut others);
                let count = [0, 1, 0, 40][usize::from(kind >> 7) + 2 * usize::from(kind >> 6 & 1)];
                front.send_raw(&message, &vec![&sent; count]);
            }
        }
    }
    front.serve(options);

    let bytes = read(&file, 0, FILE as usize);
    for (page, content) in bytes.chunks(PAGE as usize).enumerate() {
        let at = page as u64 * PAGE;
        let theirs = given.iter().any(|(start, length)| {
            let end = u128::from(*start) + u128::from(*length);
            u128::from(*start) < u128::from(at + PAGE) && end > u128::from(at)
        });
        assert!(
            theirs || content.iter().all(|byte| *byte == FILLED),
            "a byte outside of the regions has changed"
        );
    }
    Ok(())
}

/// A region: guest address, length, address of the front end, offset in the file.
fn region(u: &mut Unstructured<'_>) -> Result<[u64; 4]> {
    let kind: u8 = u.arbitrary()?;
    if kind.is_multiple_of(8) {
        return Ok([u.arbitrary()?, u.arbitrary()?, u.arbitrary()?, u.arbitrary()?]);
    }
    let pages = |value: u8| u64::from(value) * PAGE;
    let at = pages(u.arbitrary()?);
    let length = pages(u.arbitrary()?);
    let offset = pages(u.arbitrary::<u8>()? % 0x90);
    let odd = if kind & 0x80 != 0 { 0x10 } else { 0 };
    Ok([BASE + at + odd, length, USER + at, offset + odd])
}
