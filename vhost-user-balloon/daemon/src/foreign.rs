// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Descriptors that a front end sends: what they are, found out without touching them.

use std::ffi::CString;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags};
use thiserror::Error;

use crate::threads::{Closes, Foreign, Peer};

/// /proc/self/fd, opened before the sandbox.
static PROC: OnceLock<OwnedFd> = OnceLock::new();
const EVENTFD: &[u8] = b"anon_inode:[eventfd]";

/// Open the folder that has what each descriptor is; its number, for the sandbox.
pub fn open_proc() -> Result<RawFd, Errno> {
    if let Some(open) = PROC.get() {
        return Ok(open.as_raw_fd());
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?;
    Ok(PROC.get_or_init(|| folder).as_raw_fd())
}

/// Why a descriptor is refused.
#[derive(Debug, Error)]
pub enum DescriptorError {
    #[error("a descriptor is {found}, not {wanted}")]
    Kind { found: &'static str, wanted: &'static str },
    #[error("a descriptor cannot be used: {0}")]
    Call(#[from] Errno),
}

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An eventfd: the only kind whose poll(2), read(2) and write(2) take no lock that another process can hold. Closing it
    /// can: an epoll set of the front end has a mutex.
    Event,
    UnixSocket,
    Pipe,
    /// A regular file in memory or on a disk.
    File,
    /// Another file, a device, an epoll, a timer, a TCP connection.
    Other,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Event => "an eventfd",
            Self::UnixSocket => "a unix socket",
            Self::Pipe => "a pipe",
            Self::File => "a file in memory or on a disk",
            Self::Other => "of another kind",
        }
    }

    /// Which thread closes it.
    fn closes(self) -> Closes {
        match self {
            Self::File => Closes::Memory,
            Self::Event | Self::UnixSocket | Self::Pipe | Self::Other => Closes::Descriptors,
        }
    }
}

/// A descriptor that came with a message.
#[derive(Debug)]
pub struct Descriptor {
    pub kind: Kind,
    pub file: Foreign<OwnedFd>,
    pub mode: u32,
    /// The major number of its device.
    pub device: u32,
}

impl Descriptor {
    /// Find out what it is. Neither a server behind a filesystem is asked nor a lock taken.
    pub fn new(file: OwnedFd, peer: Peer) -> Self {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(&file, c"", flags, StatxFlags::BASIC_STATS);
        let (mode, device) = about.map_or((0, 0), |a| (u32::from(a.stx_mode), a.stx_dev_major));
        let kind = match FileType::from_raw_mode(mode) {
            FileType::Fifo => Kind::Pipe,
            // The type of all files without an inode of their own.
            FileType::Unknown if about.is_ok() && mode & 0o170_000 == 0 && is_eventfd(file.as_fd()) => {
                Kind::Event
            }
            FileType::Socket if rustix::net::sockopt::socket_domain(&file) == Ok(AddressFamily::UNIX) => {
                Kind::UnixSocket
            }
            FileType::RegularFile if device != 0 || rustix::fs::fcntl_get_seals(&file).is_ok() => Kind::File,
            _ => Kind::Other,
        };
        Self { kind, file: Foreign::new(file, kind.closes(), peer), mode, device }
    }

    /// Have no call wait from now on.
    pub fn never_block(&self) -> Result<(), DescriptorError> {
        let flags = rustix::fs::fcntl_getfl(&*self.file)?;
        Ok(rustix::fs::fcntl_setfl(&*self.file, flags | OFlags::NONBLOCK)?)
    }
}

/// A socket of a pair. Its own end of a connection to us would keep that connection open for ever.
pub fn pair(socket: Descriptor) -> Result<Descriptor, DescriptorError> {
    if socket.kind != Kind::UnixSocket {
        return Err(DescriptorError::Kind { found: socket.kind.name(), wanted: "a unix socket" });
    }
    let file: Foreign<UnixStream> = socket.file.into();
    if file.peer_addr().is_ok_and(|peer| !peer.is_unnamed()) {
        return Err(DescriptorError::Kind { found: "a connection", wanted: "a pair of sockets" });
    }
    Ok(Descriptor { file: file.into(), ..socket })
}

/// Whether the kernel's name of a descriptor is that of an eventfd. No file can have it: names of files begin
/// with a slash.
fn is_eventfd(file: BorrowedFd<'_>) -> bool {
    let Ok(number) = CString::new(file.as_raw_fd().to_string()) else { return false };
    if open_proc().is_err() {
        return false;
    }
    let Some(folder) = PROC.get() else { return false };
    let mut name = [0_u8; 32];
    let read = rustix::fs::readlinkat_raw(folder, &number, &mut name);
    read.is_ok_and(|length| name.get(..length) == Some(EVENTFD))
}

/// How many bytes could be read, and whether descriptors come with them. All stays in the socket.
pub fn peek(socket: &UnixStream, bytes: &mut [u8]) -> Result<(usize, bool), Errno> {
    let mut control = RecvAncillaryBuffer::default();
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let got = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags)?;
    Ok((got.bytes, got.flags.contains(ReturnFlags::CTRUNC)))
}

/// Have a connection keep urgent bytes among the others: a read that passes one would close what came with it.
pub fn keep_in_order(socket: &UnixStream) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_oobinline(socket, true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, epoll};

    fn kind(file: OwnedFd) -> Kind {
        Descriptor::new(file, Peer::new()).kind
    }

    #[test]
    fn kinds() {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        assert_eq!(kind(event), Kind::Event);
        let others = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        assert_eq!(kind(others), Kind::Other);
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(kind(reader), Kind::Pipe);
        let memory =
            rustix::fs::memfd_create(c"anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(kind(memory), Kind::File);
        let zero = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(kind(zero.into()), Kind::Other);
        let (socket, _other) = UnixStream::pair().unwrap();
        assert_eq!(kind(socket.into()), Kind::UnixSocket);
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(kind(tcp.into()), Kind::Other);
    }
}
