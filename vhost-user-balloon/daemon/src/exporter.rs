// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Local clients of the control and metrics sockets, served without ever waiting for one.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

/// More than this is not one request.
const MAX_REQUEST: usize = 8192;
/// More than this is not read by the other side.
const MAX_PENDING: usize = 1 << 18;
/// More at a time are turned away: whoever is allowed to connect could use up all descriptors.
const MAX_CLIENTS: usize = 16;
/// Nobody needs so long for one request or answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// One connection.
#[derive(Debug)]
pub struct Client {
    socket: UnixStream,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Ends when all has been written.
    last: bool,
    /// It is owed an answer to a question to the guest, until then.
    pub waits_until: Option<Instant>,
    touched: Instant,
}

impl Client {
    fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket,
            input: Vec::new(),
            output: Vec::new(),
            last: false,
            waits_until: None,
            touched: Instant::now(),
        })
    }

    /// What to wait for.
    pub fn poll(&self) -> PollFd<'_> {
        let mut events = PollFlags::IN;
        if !self.output.is_empty() {
            events |= PollFlags::OUT;
        }
        PollFd::new(&self.socket, events)
    }

    /// Read what there is. `false`: it is gone, or sends what nobody can want.
    pub fn read(&mut self) -> bool {
        let mut bytes = [0; 2048];
        match rustix::net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.last && !self.output.is_empty(),
            Ok((_, got)) => {
                self.touched = Instant::now();
                self.input.extend(bytes.iter().take(got));
                self.input.len() <= MAX_REQUEST
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    /// The next whole line of what was read.
    pub fn line(&mut self) -> Option<Vec<u8>> {
        let end = self.input.iter().position(|byte| *byte == b'\n')?;
        let rest = self.input.split_off(end.saturating_add(1));
        let mut line = std::mem::replace(&mut self.input, rest);
        line.pop();
        Some(line)
    }

    /// Whether a request of HTTP has come in to its end.
    pub fn has_http_request(&self) -> bool {
        self.input.windows(4).any(|w| w == b"\r\n\r\n") || self.input.windows(2).any(|w| w == b"\n\n")
    }

    /// Owe it a line.
    pub fn answer(&mut self, line: &str) {
        self.output.extend_from_slice(line.as_bytes());
        self.output.push(b'\n');
    }

    /// Owe it an answer of HTTP, and nothing else.
    pub fn answer_http(&mut self, body: &str) {
        self.input.clear();
        let head = format!(
            "HTTP/1.0 200 OK\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        );
        self.output.extend_from_slice(head.as_bytes());
        self.output.extend_from_slice(body.as_bytes());
        self.last = true;
    }

    /// Write what can be written. `false`: it is done, or gone, or does not read.
    pub fn write(&mut self) -> bool {
        while !self.output.is_empty() {
            match rustix::net::send(&self.socket, &self.output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.output.drain(..sent.min(self.output.len()));
                    self.touched = Instant::now();
                }
                Err(Errno::AGAIN | Errno::INTR) => return self.output.len() <= MAX_PENDING,
                Err(_) => return false,
            }
        }
        !self.last
    }

    fn is_patient(&self, now: Instant) -> bool {
        // One that has sent nothing and is owed nothing may stay, as `watch`-like tools do.
        (self.input.is_empty() && self.output.is_empty())
            || now.saturating_duration_since(self.touched) < PATIENCE
    }
}

/// A socket that others connect to.
#[derive(Debug)]
pub struct Service {
    listener: UnixListener,
    /// Who has.
    pub clients: Vec<Client>,
}

impl Service {
    /// Listen at `path`, for the same user only.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let listener = listen(path)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, clients: Vec::new() })
    }

    /// What to wait for: the listener first, and then each client.
    pub fn polls<'a>(&'a self, into: &mut Vec<PollFd<'a>>) {
        into.push(PollFd::new(&self.listener, PollFlags::IN));
        into.extend(self.clients.iter().map(Client::poll));
    }

    /// How many entries `polls` has made.
    pub fn poll_count(&self) -> usize {
        self.clients.len().saturating_add(1)
    }

    /// Let one more in, if there is room.
    pub fn accept(&mut self) {
        let now = Instant::now();
        self.clients.retain(|client| client.is_patient(now));
        // An error is for the one who tried to connect.
        if let Ok((socket, _)) = self.listener.accept()
            && self.clients.len() < MAX_CLIENTS
            && let Ok(client) = Client::new(socket)
        {
            self.clients.push(client);
        }
    }
}

/// Listen on a unix socket that only this user can connect to.
///
/// A socket that nobody listens on any more is replaced; anything else at the path is an error.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    use std::os::unix::fs::FileTypeExt;
    if let Ok(about) = std::fs::symlink_metadata(path)
        && about.file_type().is_socket()
    {
        // A socket of another type cannot connect, so whoever listens there does not notice; it is told
        // whether there is anybody.
        match UnixDatagram::unbound()?.connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path)?,
            _ => return Err(io::Error::new(io::ErrorKind::AddrInUse, "somebody listens there")),
        }
    }
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    listener
}

/// The file of the textfile collector. Its folder is opened once, and nothing outside of it is named.
#[derive(Debug)]
pub struct TextFile {
    folder: File,
    name: PathBuf,
    part: PathBuf,
    next: Instant,
}

const TEXTFILE_INTERVAL: Duration = Duration::from_secs(15);

impl TextFile {
    /// A file at `path`, which shall name a file in a folder that exists.
    pub fn new(path: &Path) -> io::Result<Self> {
        let name =
            path.file_name().ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not a file name"))?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let mut part = std::ffi::OsString::from(".");
        part.push(name);
        part.push(".part");
        Ok(Self { folder: File::open(folder)?, name: name.into(), part: part.into(), next: Instant::now() })
    }

    /// The folder it is in.
    pub fn folder(&self) -> &File {
        &self.folder
    }

    /// When it shall be written next.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Write it, so that a reader sees the old one or the new one.
    pub fn write(&mut self, text: &str) -> io::Result<()> {
        let now = Instant::now();
        self.next = now.checked_add(TEXTFILE_INTERVAL).unwrap_or(now);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let descriptor = rustix::fs::openat(self.folder.as_fd(), &self.part, flags, mode)?;
        File::from(descriptor).write_all(text.as_bytes())?;
        rustix::fs::renameat(self.folder.as_fd(), &self.part, self.folder.as_fd(), &self.name)?;
        Ok(())
    }
}
