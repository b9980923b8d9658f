// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Local clients of the control and metrics sockets, served without ever waiting for one.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::foreign::{keep_in_order, peek};
use crate::threads::{Closes, Foreign, Peer};

/// More than this is not one request.
const MAX_REQUEST: usize = 8192;
/// For one more, the one that has been idle for longest has to go.
const MAX_CLIENTS: usize = 16;

/// The answer that a client waits for, which depends on the guest.
#[derive(Debug, Clone, Copy)]
pub enum Owed {
    Statistics {
        asked: Instant,
        until: Instant,
    },
    /// To the command of this number, within so many seconds.
    Report {
        number: u32,
        seconds: u64,
        until: Instant,
    },
}

#[derive(Debug)]
pub struct Client {
    socket: Foreign<UnixStream>,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Ends when all has been answered and written.
    last: bool,
    /// A whole line waits: nothing more is read before.
    more: bool,
    pub owed: Option<Owed>,
    touched: Instant,
}

impl Client {
    fn new(socket: UnixStream) -> io::Result<Self> {
        let socket = Foreign::new(socket, Closes::Clients, Peer::new());
        socket.set_nonblocking(true)?;
        keep_in_order(&socket)?;
        Ok(Self {
            socket,
            input: Vec::new(),
            output: Vec::new(),
            last: false,
            more: false,
            owed: None,
            touched: Instant::now(),
        })
    }

    /// Which connection it is.
    pub fn peer(&self) -> Peer {
        self.socket.peer()
    }

    /// When it is answered at the latest.
    pub fn due(&self) -> Option<Instant> {
        self.owed.map(|owed| match owed {
            Owed::Statistics { until, .. } | Owed::Report { until, .. } => until,
        })
    }

    pub fn poll(&self) -> PollFd<'_> {
        // Nothing is read before the last answer was taken: one answer for each client is all that is kept.
        let events = match self.output.is_empty() {
            true if self.last || self.more => PollFlags::empty(),
            true => PollFlags::IN,
            false => PollFlags::OUT,
        };
        PollFd::new(&*self.socket, events)
    }

    /// Read what there is. `false`: it has hung up, or sends too much, or a descriptor, which is never received:
    /// the thread that closes the connection closes it as well.
    pub fn read(&mut self) -> bool {
        if !self.output.is_empty() {
            return true;
        }
        if self.last || self.more {
            // It was not asked what there is to read, so it has hung up in both directions.
            return false;
        }
        let mut bytes = [0; 2048];
        let there = peek(&self.socket, &mut bytes).and_then(|(length, descriptors)| match length {
            _ if descriptors => Err(Errno::BADMSG),
            0 => Ok(0),
            _ => recv(&self.socket, bytes.get_mut(..length).unwrap_or_default()),
        });
        match there {
            Ok(0) => {
                // It sends no more, and may wait for an answer.
                self.last = true;
                true
            }
            Ok(got) => {
                self.touched = Instant::now();
                self.input.extend(bytes.iter().take(got));
                self.input.len() <= MAX_REQUEST
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    /// The next whole line of what was read, unless an answer is owed.
    pub fn line(&mut self) -> Option<Vec<u8>> {
        let is_free = self.owed.is_none() && self.output.is_empty();
        let end = self.input.iter().position(|byte| *byte == b'\n').filter(|_| is_free);
        let line = end.map(|end| {
            let rest = self.input.split_off(end.saturating_add(1));
            let mut line = std::mem::replace(&mut self.input, rest);
            line.pop();
            line
        });
        self.more = self.input.contains(&b'\n');
        line
    }

    /// Whether [`Client::line`] has another one.
    fn has_line(&self) -> bool {
        self.more && self.owed.is_none() && self.output.is_empty()
    }

    pub fn answer(&mut self, line: &str) {
        self.output.extend_from_slice(line.as_bytes());
        self.output.push(b'\n');
    }

    /// Once a request of HTTP has come in to its end, owe it this answer, and nothing else.
    pub fn answer_http(&mut self, body: impl FnOnce() -> String) {
        let ends = |end: &[u8]| self.input.windows(end.len()).any(|bytes| bytes == end);
        if !ends(b"\r\n\r\n") && !ends(b"\n\n") {
            return;
        }
        let body = body();
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

    /// Write what can be written. `false`: it is done, has hung up, or does not read.
    pub fn write(&mut self) -> bool {
        while !self.output.is_empty() {
            match rustix::net::send(&*self.socket, &self.output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    self.output.drain(..sent.min(self.output.len()));
                    self.touched = Instant::now();
                }
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(_) => return false,
            }
        }
        !self.last || self.more || self.owed.is_some()
    }
}

fn recv(socket: &UnixStream, bytes: &mut [u8]) -> Result<usize, Errno> {
    rustix::net::recv(socket, bytes, RecvFlags::DONTWAIT).map(|(_, got)| got)
}

/// A socket that others connect to.
#[derive(Debug)]
pub struct Service {
    listener: UnixListener,
    pub clients: Vec<Client>,
}

impl Service {
    pub fn new(listener: UnixListener) -> Self {
        Self { listener, clients: Vec::new() }
    }

    /// The descriptors to poll: each client by its number, and the listener if more clients are allowed.
    pub fn polls(&self, listens: bool) -> impl Iterator<Item = (Option<usize>, PollFd<'_>)> {
        let listens = listens && !Closes::Clients.is_full();
        let listener = listens.then(|| (None, PollFd::new(&self.listener, PollFlags::IN)));
        self.clients.iter().enumerate().map(|(n, client)| (Some(n), client.poll())).chain(listener)
    }

    /// Whether there is a request that was read and not answered.
    pub fn is_busy(&self) -> bool {
        self.clients.iter().any(Client::has_line)
    }

    /// Serve all clients, those that are ready also with what they sent. `false`: as for [`Self::accept`].
    pub fn serve(
        &mut self,
        ready: impl Fn(Option<usize>) -> bool,
        mut answer: impl FnMut(&mut Client),
    ) -> bool {
        let mut number = 0_usize..;
        self.clients.retain_mut(|client| {
            if ready(number.next()) && !client.read() {
                return false;
            }
            answer(client);
            client.write()
        });
        !ready(None) || self.accept()
    }

    /// Let one more in. `false`: there is no descriptor for it, and it keeps waiting.
    fn accept(&mut self) -> bool {
        let socket = match self.listener.accept() {
            Ok((socket, _)) => socket,
            Err(error) => return is_for_the_peer(&error),
        };
        if self.clients.len() >= MAX_CLIENTS {
            self.clients.sort_by_key(|client| client.touched);
            self.clients.remove(0);
        }
        self.clients.extend(Client::new(socket));
        true
    }
}

/// Whether accept(2) failed because of the peer, and will not fail again at once.
pub fn is_for_the_peer(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM)
    )
}

/// The sockets that this process has made, until it is confined.
static BOUND: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn bound() -> MutexGuard<'static, Vec<PathBuf>> {
    BOUND.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Remove them, where the process cannot start.
pub fn remove_sockets() {
    bound().drain(..).for_each(|path| drop(std::fs::remove_file(path)));
}

/// Leave them: the process starts, and can remove nothing from now on.
pub fn keep_sockets() {
    bound().clear();
}

/// Listen on a unix socket that only this user can connect to; an error is the reason, and what helps.
///
/// A socket without a listener is replaced; anything else at the path is an error. The socket stays at the end: removing
/// files is what the sandbox forbids.
pub fn listen(path: &Path) -> Result<UnixListener, String> {
    let explained = |error: io::Error| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or_else(|| Path::new(".")).display();
        match error.kind() {
            io::ErrorKind::NotFound => format!("there is no folder {folder}; make it: mkdir -p {folder}"),
            io::ErrorKind::PermissionDenied => {
                format!("this user may not write to {folder}; choose another path, or run as its owner")
            }
            io::ErrorKind::AddrInUse => {
                "a file that is no socket is there; remove it, or choose another path".to_owned()
            }
            io::ErrorKind::InvalidInput => {
                let bytes = path.as_os_str().len();
                format!("the path has {bytes} bytes, a socket's at most 107; choose a shorter one")
            }
            _ => format!("{error}; choose another path"),
        }
    };
    if let Ok(about) = std::fs::symlink_metadata(path)
        && about.file_type().is_socket()
    {
        // A socket of another type cannot connect, so a process that listens there does not notice; the
        // error shows whether there is one.
        match UnixDatagram::unbound().and_then(|socket| socket.connect(path)) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(explained)?;
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                let user = about.uid();
                return Err(format!(
                    "it is a socket of user {user}; choose another path, or run as that user"
                ));
            }
            _ => return Err("another process listens there; end it, or choose another path".to_owned()),
        }
    }
    let before = rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let listener = UnixListener::bind(path).and_then(|listener| {
        listener.set_nonblocking(true)?;
        bound().push(path.to_owned());
        Ok(listener)
    });
    rustix::process::umask(before);
    listener.map_err(explained)
}
