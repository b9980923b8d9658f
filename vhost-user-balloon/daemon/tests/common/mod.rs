// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A front end and its guest, without a VMM.

#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, clippy::cast_possible_truncation)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use balloon_protocol::Features;
use rustix::fs::MemfdFlags;
use vhost::vhost_user::message::VhostUserHeaderFlag;
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vhost_user_balloon::device::Options;
use vhost_user_balloon::server::{Server, ServerError, Source};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

pub const MIB: u64 = 1 << 20;
pub const PAGE: u64 = 4096;
pub const RAM: u64 = 64 * MIB;
/// Rings and buffers are below this; the rest is memory to play with.
pub const PLAY: u64 = 4 * MIB;
/// Where the front end has mapped the guest.
pub const USER: u64 = 0x7f00_0000_0000;
pub const SIZE: u16 = 128;
pub const VERSION_1: u64 = 1 << 32;
pub const PROTOCOL: u64 = 1 << 30;
pub const ALL: u64 = 0b1111_0111;
pub const LONG: Duration = Duration::from_secs(10);

pub fn options() -> Options {
    Options {
        features: Options::all_features(),
        target: 0,
        memory_is_shared: false,
        inhibited: false,
        discard_unit: 4096,
        inhibit_one_in: None,
        stats_interval: None,
        turn: vhost_user_balloon::device::TURN,
        user_mode_linux: false,
        #[cfg(feature = "lying")]
        lie: None,
    }
}

pub fn memfd(bytes: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("guest", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

/// Wait until something holds; `false` if it does not within a time that is long for a machine.
pub fn eventually(mut holds: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while began.elapsed() < LONG {
        if holds() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    false
}

/// The driver's half of a ring.
pub struct GuestRing {
    pub base: u64,
    pub kick: EventFd,
    pub call: EventFd,
    next: u16,
    seen: u16,
    free: u16,
}

impl GuestRing {
    pub fn descriptors(&self) -> u64 {
        self.base
    }
    pub fn available(&self) -> u64 {
        self.base + 0x1000
    }
    pub fn used(&self) -> u64 {
        self.base + 0x2000
    }
}

pub struct Vm {
    pub frontend: Frontend,
    pub socket: UnixStream,
    pub memory: File,
    pub rings: Vec<GuestRing>,
    pub server: Option<JoinHandle<Result<(), ServerError>>>,
    pub control: PathBuf,
    _folder: tempfile::TempDir,
}

impl Vm {
    /// A server and a front end that has sent nothing yet.
    pub fn bare(options: Options) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let control = folder.path().join("control");
        let mut server = Server::new(options).unwrap();
        server.control(&control).unwrap();
        server.metrics(&folder.path().join("metrics")).unwrap();
        let thread = std::thread::spawn(move || server.run(Source::Stream(theirs)));
        Self::with(ours, control, folder, Some(thread))
    }

    pub fn with(
        ours: UnixStream,
        control: PathBuf,
        folder: tempfile::TempDir,
        server: Option<JoinHandle<Result<(), ServerError>>>,
    ) -> Self {
        let socket = ours.try_clone().unwrap();
        let rings = (0..5)
            .map(|n| GuestRing {
                base: 0x10_0000 + n * 0x1_0000,
                kick: EventFd::new(EFD_NONBLOCK).unwrap(),
                call: EventFd::new(EFD_NONBLOCK).unwrap(),
                next: 0,
                seen: 0,
                free: 0,
            })
            .collect();
        Self {
            frontend: Frontend::from_stream(ours, 5),
            socket,
            memory: memfd(RAM),
            rings,
            server,
            control,
            _folder: folder,
        }
    }

    /// A guest whose driver has accepted `features` and started its queues.
    pub fn started(features: u64, options: Options) -> Self {
        let mut vm = Self::bare(options);
        vm.start(features);
        vm
    }

    pub fn start(&mut self, features: u64) {
        self.negotiate();
        self.share_memory();
        self.start_device(features);
    }

    pub fn negotiate(&mut self) {
        self.frontend.set_owner().unwrap();
        let offered = self.frontend.get_features().unwrap();
        assert_ne!(offered & PROTOCOL, 0);
        let protocol = self.frontend.get_protocol_features().unwrap();
        self.frontend.set_protocol_features(protocol).unwrap();
        self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    }

    pub fn share_memory(&mut self) {
        let region = self.region(0, RAM, 0);
        self.frontend.set_mem_table(&[region]).unwrap();
    }

    pub fn region(&self, guest: u64, bytes: u64, offset: u64) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: guest,
            memory_size: bytes,
            userspace_addr: USER + guest,
            mmap_offset: offset,
            mmap_handle: self.memory.as_raw_fd(),
        }
    }

    pub fn start_device(&mut self, features: u64) {
        self.frontend.set_features(features | VERSION_1 | PROTOCOL).unwrap();
        let count = balloon_protocol::QueueMap::new(Features::from_bits(features)).count();
        for index in 0..count {
            self.start_ring(index, 0);
        }
    }

    pub fn start_ring(&mut self, index: usize, base: u16) {
        let ring = &mut self.rings[index];
        if base == 0 {
            ring.next = 0;
            ring.seen = 0;
            ring.free = 0;
            let blank = [0; 0x3000];
            self.memory.write_all_at(&blank, ring.base).unwrap();
        }
        let ring = &self.rings[index];
        self.frontend.set_vring_num(index, SIZE).unwrap();
        self.frontend.set_vring_base(index, base).unwrap();
        let config = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: USER + ring.descriptors(),
            used_ring_addr: USER + ring.used(),
            avail_ring_addr: USER + ring.available(),
            log_addr: None,
        };
        self.frontend.set_vring_addr(index, &config).unwrap();
        self.frontend.set_vring_kick(index, &ring.kick).unwrap();
        self.frontend.set_vring_call(index, &ring.call).unwrap();
        // In case that one before us has answered and not called. Later calls are those of answers.
        assert!(eventually(|| ring.call.read().is_ok()), "called at once");
        self.frontend.set_vring_enable(index, true).unwrap();
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).unwrap();
    }

    pub fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn fill(&self, at: u64, bytes: u64) {
        self.write(at, &vec![0x5a; usize::try_from(bytes).unwrap()]);
    }

    pub fn is_zero(&self, at: u64, bytes: u64) -> bool {
        self.read(at, usize::try_from(bytes).unwrap()).iter().all(|b| *b == 0)
    }

    pub fn is_filled(&self, at: u64, bytes: u64) -> bool {
        self.read(at, usize::try_from(bytes).unwrap()).iter().all(|b| *b == 0x5a)
    }

    /// Bytes of the guest that the host has memory for.
    pub fn resident(&self) -> u64 {
        self.memory.metadata().unwrap().blocks() * 512
    }

    pub fn descriptor(&self, index: usize, slot: u16, address: u64, length: u32, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(self.rings[index].descriptors() + u64::from(slot) * 16, &bytes);
    }

    pub fn offer(&mut self, index: usize, head: u16) {
        let ring = &mut self.rings[index];
        let slot = ring.available() + 4 + u64::from(ring.next % SIZE) * 2;
        self.memory.write_all_at(&head.to_le_bytes(), slot).unwrap();
        ring.next = ring.next.wrapping_add(1);
        let next = ring.next;
        self.memory.write_all_at(&next.to_le_bytes(), ring.available() + 2).unwrap();
    }

    /// Put a chain into a ring: address, length, and whether the device may write it.
    pub fn put(&mut self, index: usize, parts: &[(u64, u32, bool)]) -> u16 {
        let head = self.rings[index].free;
        for (n, (address, length, writable)) in parts.iter().enumerate() {
            let slot = (head + n as u16) % SIZE;
            let last = n + 1 == parts.len();
            let flags = u16::from(!last) | if *writable { 2 } else { 0 };
            self.descriptor(index, slot, *address, *length, flags, (slot + 1) % SIZE);
        }
        self.rings[index].free = (head + parts.len() as u16) % SIZE;
        self.offer(index, head);
        head
    }

    pub fn kick(&self, index: usize) {
        self.rings[index].kick.write(1).unwrap();
    }

    pub fn used_index(&self, index: usize) -> u16 {
        u16::from_le_bytes(self.read(self.rings[index].used() + 2, 2).try_into().unwrap())
    }

    /// The used length of the next chain that comes back; `None` if none does.
    pub fn used(&mut self, index: usize) -> Option<(u16, u32)> {
        let seen = self.rings[index].seen;
        if !eventually(|| self.used_index(index) != seen) {
            return None;
        }
        let at = self.rings[index].used() + 4 + u64::from(seen % SIZE) * 8;
        self.rings[index].seen = seen.wrapping_add(1);
        let element = self.read(at, 8);
        let id = u32::from_le_bytes(element[..4].try_into().unwrap());
        Some((id as u16, u32::from_le_bytes(element[4..].try_into().unwrap())))
    }

    /// Put a chain into a ring and wait for its used length.
    pub fn ask(&mut self, index: usize, parts: &[(u64, u32, bool)]) -> u32 {
        let head = self.put(index, parts);
        self.kick(index);
        let (id, length) = self.used(index).expect("the buffer comes back");
        assert_eq!(id, head);
        length
    }

    /// Put pages into the balloon (ring 0) or take them out (ring 1).
    pub fn pages(&mut self, index: usize, pfns: &[u32]) -> u32 {
        let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
        self.write(0x8000, &bytes);
        self.ask(index, &[(0x8000, bytes.len() as u32, false)])
    }

    /// The same with a bitmap for the answer; its bytes.
    pub fn pages_with_bitmap(&mut self, pfns: &[u32], room: u32) -> (u32, Vec<u8>) {
        let bytes: Vec<u8> = pfns.iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
        self.write(0x8000, &bytes);
        self.write(0xc000, &[0xff; 64]);
        let length = self.ask(0, &[(0x8000, bytes.len() as u32, false), (0xc000, room, true)]);
        (length, self.read(0xc000, 64))
    }

    /// A request as raw bytes.
    pub fn raw(&self, request: u32, flags: u32, body: &[u8], descriptors: &[i32]) {
        let mut message: Vec<u8> =
            [request, flags, body.len() as u32].iter().flat_map(|w| w.to_ne_bytes()).collect();
        message.extend(body);
        let _ = self.socket.send_with_fds(&[message.as_slice()], descriptors);
    }

    /// A raw request that asks for a reply: whether it was accepted.
    pub fn raw_accepted(&mut self, request: u32, body: &[u8], descriptors: &[i32]) -> bool {
        self.raw(request, 1 | 8, body, descriptors);
        let mut reply = [0; 20];
        self.socket.set_read_timeout(Some(LONG)).unwrap();
        self.socket.read_exact(&mut reply).unwrap();
        assert_eq!(u32::from_ne_bytes(reply[..4].try_into().unwrap()), request);
        u64::from_ne_bytes(reply[12..].try_into().unwrap()) == 0
    }

    /// Ask on the control socket.
    pub fn control(&self, request: &str) -> serde_json::Value {
        let mut stream = UnixStream::connect(&self.control).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        stream.write_all(b"\n").unwrap();
        let mut answer = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            answer.push(byte[0]);
        }
        serde_json::from_slice(&answer).unwrap()
    }

    /// What Prometheus scrapes.
    pub fn metrics(&self) -> String {
        let mut stream = UnixStream::connect(self.control.with_file_name("metrics")).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    pub fn status(&self) -> serde_json::Value {
        self.control(r#"{"command":"status"}"#)
    }

    /// Still there, and still doing its work.
    pub fn is_alive(&mut self, reporting: usize) -> bool {
        let at = RAM - MIB;
        self.fill(at, 0x4000);
        self.ask(reporting, &[(at, 0x4000, true)]);
        self.is_zero(at, 0x4000)
    }

    /// Hang up; how the server has ended.
    pub fn end(mut self) -> Result<(), ServerError> {
        self.socket.shutdown(std::net::Shutdown::Both).unwrap();
        self.server.take().unwrap().join().expect("no panic")
    }
}
