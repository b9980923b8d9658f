// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop that serves one front end and the local clients.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use thiserror::Error;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use crate::backend::Backend;
use crate::channel::{Channel, ChannelError};
use crate::control::{self, Request, Status};
use crate::device::{Device, Options};
use crate::exporter::{Client, Service, TextFile, listen};
use crate::limited;
use crate::ring::Ring;
use balloon_protocol::QueueMap;

/// A message of the front end comes in one piece; one that stops in the middle is not waited for.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a guest has to answer a question about its memory.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Why serving ended, or did not begin.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A socket cannot be listened on.
    #[error("cannot listen on {path}: {source}")]
    Listen {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No ring can be made.
    #[error("cannot make a ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    /// The descriptor for the front end is not usable.
    #[error("descriptor {fd} is no unix socket: {source}")]
    Descriptor {
        /// Its number.
        fd: i32,
        /// Why.
        source: io::Error,
    },
    /// Waiting for events does not work.
    #[error("cannot wait for events: {0}")]
    Poll(#[from] Errno),
    /// The front end does not keep to the protocol.
    #[error("the front end does not keep to the protocol: {0}")]
    Protocol(VhostError),
    /// The front end asked for a channel in a way that cannot be understood.
    #[error("the front end does not keep to the protocol: {0}")]
    Channel(#[from] ChannelError),
}

/// Where the front end comes from.
#[derive(Debug)]
pub enum Source {
    /// It will connect.
    Listener(UnixListener),
    /// It is connected.
    Stream(UnixStream),
}

impl Source {
    /// Listen at a path.
    ///
    /// # Errors
    ///
    /// It cannot be listened on.
    pub fn listen(path: &std::path::Path) -> Result<Self, ServerError> {
        let listening =
            listen(path).map_err(|source| ServerError::Listen { path: path.to_owned(), source })?;
        Ok(Self::Listener(listening))
    }
}

/// What is served, and to whom.
pub struct Server {
    backend: Arc<Backend>,
    control: Option<Service>,
    metrics: Option<Service>,
    textfile: Option<TextFile>,
    sandbox: String,
}

struct Connection {
    handler: BackendReqHandler<Backend>,
    socket: UnixStream,
}

impl Server {
    /// A device that nobody is connected to.
    ///
    /// # Errors
    ///
    /// See [`Device::new`].
    pub fn new(options: Options) -> Result<Self, ServerError> {
        Ok(Self {
            backend: Arc::new(Backend::new(Device::new(options)?)),
            control: None,
            metrics: None,
            textfile: None,
            sandbox: "none".to_owned(),
        })
    }

    /// Serve control requests at a path.
    ///
    /// # Errors
    ///
    /// It cannot be listened on.
    pub fn control(&mut self, path: &std::path::Path) -> Result<(), ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        self.control = Some(Service::bind(path).map_err(failed)?);
        Ok(())
    }

    /// Serve metrics at a path.
    ///
    /// # Errors
    ///
    /// It cannot be listened on.
    pub fn metrics(&mut self, path: &std::path::Path) -> Result<(), ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        self.metrics = Some(Service::bind(path).map_err(failed)?);
        Ok(())
    }

    /// Write metrics into a file.
    ///
    /// # Errors
    ///
    /// Its folder does not exist.
    pub fn textfile(&mut self, path: &std::path::Path) -> Result<(), ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        self.textfile = Some(TextFile::new(path).map_err(failed)?);
        Ok(())
    }

    /// The folder of the metrics file.
    pub fn textfile_folder(&self) -> Option<&std::fs::File> {
        self.textfile.as_ref().map(TextFile::folder)
    }

    /// How the process is confined, for `status`.
    pub fn set_sandbox(&mut self, how: String) {
        self.sandbox = how;
    }

    /// Serve one front end until it hangs up.
    ///
    /// # Errors
    ///
    /// It does not keep to the protocol, or the machine does not work.
    pub fn run(&mut self, source: Source) -> Result<(), ServerError> {
        let mut listener = None;
        let mut connection = None;
        match source {
            Source::Listener(waiting) => listener = Some(waiting),
            Source::Stream(socket) => connection = Some(self.connect(socket)?),
        }
        let mut busy = [false; QueueMap::MAX];
        loop {
            let ready = self.wait(listener.as_ref(), connection.as_ref(), busy.contains(&true))?;
            if ready.front_end {
                match (&mut connection, &listener) {
                    (Some(connection), _) => {
                        if !self.request(connection)? {
                            tracing::info!("the front end has hung up");
                            self.backend.device().disconnect();
                            return Ok(());
                        }
                    }
                    (None, Some(waiting)) => {
                        if let Ok((socket, _)) = waiting.accept() {
                            connection = Some(self.connect(socket)?);
                            // One front end is all there is: let the next one see that at once.
                            listener = None;
                        }
                    }
                    (None, None) => return Ok(()),
                }
            }
            let mut device = self.backend.device();
            for (index, (kicked, more)) in ready.kicks.iter().zip(busy.iter_mut()).enumerate() {
                *more |= device.ring_mut(index).is_some_and(Ring::take_pending);
                if *kicked {
                    *more |= device.kicked(index);
                } else if *more {
                    *more = device.run_ring(index);
                }
            }
            if device.wants_to_tell() {
                device.tell();
            }
            if device.next_question().is_some_and(|at| at <= Instant::now()) {
                device.ask_for_statistics();
            }
            drop(device);
            self.serve_control(&ready.control);
            self.serve_metrics(&ready.metrics);
        }
    }

    fn connect(&self, socket: UnixStream) -> Result<Connection, ServerError> {
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE))?;
        let own = socket.try_clone().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::BADF))?;
        tracing::info!("a front end has connected");
        Ok(Connection { handler: BackendReqHandler::from_stream(socket, self.backend.clone()), socket: own })
    }

    /// One request of the front end. `false`: it has hung up.
    fn request(&self, connection: &mut Connection) -> Result<bool, ServerError> {
        match Channel::take(&connection.socket, self.backend.replies()) {
            Ok(Some(made)) => {
                let mut device = self.backend.device();
                match made {
                    Ok(channel) => device.set_channel(channel),
                    Err(error) => {
                        device.metrics().refused();
                        limited!(device.limiter(), %error, "refused a channel");
                    }
                }
                return Ok(true);
            }
            Ok(None) => {}
            Err(ChannelError::Socket(Errno::CONNRESET | Errno::PIPE)) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        match connection.handler.handle_request() {
            Ok(()) => Ok(true),
            // Refused, and the front end has been told if it wanted to know.
            Err(VhostError::ReqHandlerError(_)) => Ok(true),
            Err(VhostError::Disconnected | VhostError::SocketBroken(_)) => Ok(false),
            Err(error) => Err(ServerError::Protocol(error)),
        }
    }

    fn wait(
        &self,
        listener: Option<&UnixListener>,
        connection: Option<&Connection>,
        busy: bool,
    ) -> Result<Ready, ServerError> {
        let device = self.backend.device();
        let mut polls = Vec::new();
        let front_end = match (connection, listener) {
            (Some(connection), _) => Some(PollFd::new(&connection.socket, PollFlags::IN)),
            (None, Some(listener)) => Some(PollFd::new(listener, PollFlags::IN)),
            (None, None) => None,
        };
        let fronts = usize::from(front_end.is_some());
        polls.extend(front_end);
        let mut rings = Vec::new();
        for index in 0..QueueMap::MAX {
            if let Some(kick) = device.ring(index).filter(|r| r.is_running()).and_then(|r| r.kick()) {
                polls.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
                rings.push(index);
            }
        }
        for service in [&self.control, &self.metrics].into_iter().flatten() {
            service.polls(&mut polls);
        }
        if device.wants_to_tell()
            && let Some(channel) = device.channel_fd()
        {
            polls.push(PollFd::from_borrowed_fd(channel, PollFlags::OUT));
        }
        let timeout = if busy { Some(Duration::ZERO) } else { self.timeout(&device) };
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        match rustix::event::poll(&mut polls, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut came = polls.iter().map(|poll| !poll.revents().is_empty());
        let mut ready = Ready { front_end: came.by_ref().take(fronts).any(|c| c), ..Ready::default() };
        for index in rings {
            if came.next() == Some(true)
                && let Some(slot) = ready.kicks.get_mut(index)
            {
                *slot = true;
            }
        }
        let mut of = |service: &Option<Service>| -> Vec<bool> {
            let count = service.as_ref().map_or(0, Service::poll_count);
            came.by_ref().take(count).collect()
        };
        ready.control = of(&self.control);
        ready.metrics = of(&self.metrics);
        Ok(ready)
    }

    fn timeout(&self, device: &Device) -> Option<Duration> {
        let now = Instant::now();
        let waiting = self.control.iter().flat_map(|s| &s.clients).filter_map(|c| c.waits_until);
        let next =
            waiting.chain(device.next_question()).chain(self.textfile.as_ref().map(TextFile::next)).min()?;
        // Rounded up, or the time before it would be spent turning round.
        Some(next.saturating_duration_since(now).saturating_add(Duration::from_millis(1)))
    }

    fn serve_control(&mut self, ready: &[bool]) {
        let Some(service) = &mut self.control else { return };
        let now = Instant::now();
        let mut came = ready.iter().copied();
        let newcomer = came.next() == Some(true);
        service.clients.retain_mut(|client| {
            if came.next() == Some(true) && !client.read() {
                return false;
            }
            while client.waits_until.is_none()
                && let Some(line) = client.line()
            {
                answer(&self.backend, &self.sandbox, client, &line);
            }
            if let Some(until) = client.waits_until {
                let device = self.backend.device();
                let asked = until.checked_sub(ANSWER_WITHIN);
                if let Some((told, _)) =
                    device.statistics().filter(|(_, at)| asked.is_some_and(|asked| *at > asked))
                {
                    let reply = serde_json::json!({ "ok": true, "stats": control::statistics(told) });
                    client.answer(&reply.to_string());
                    client.waits_until = None;
                } else if now >= until {
                    client.answer(&control::error("the guest has not answered within 5 seconds"));
                    client.waits_until = None;
                }
            }
            client.write()
        });
        if newcomer {
            service.accept();
        }
    }

    fn serve_metrics(&mut self, ready: &[bool]) {
        if let Some(service) = &mut self.metrics {
            let mut came = ready.iter().copied();
            let newcomer = came.next() == Some(true);
            service.clients.retain_mut(|client| {
                if came.next() == Some(true) && !client.read() {
                    return false;
                }
                if client.has_http_request() {
                    client.answer_http(&self.backend.device().metrics().text());
                }
                client.write()
            });
            if newcomer {
                service.accept();
            }
        }
        if let Some(file) = &mut self.textfile
            && file.next() <= Instant::now()
        {
            let mut device = self.backend.device();
            let text = device.metrics().text();
            if let Err(error) = file.write(&text) {
                limited!(device.limiter(), %error, "cannot write the metrics file");
            }
        }
    }
}

#[derive(Default)]
struct Ready {
    front_end: bool,
    kicks: [bool; QueueMap::MAX],
    control: Vec<bool>,
    metrics: Vec<bool>,
}

fn answer(backend: &Backend, sandbox: &str, client: &mut Client, line: &[u8]) {
    let request = match serde_json::from_slice::<Request>(line) {
        Ok(request) => request,
        Err(error) => return client.answer(&control::error(format_args!("not a request: {error}"))),
    };
    let mut device = backend.device();
    match request {
        Request::Status => {
            let connected = device.memory().total() != 0;
            let status = Status::of(&device, connected, sandbox);
            match serde_json::to_string(&status) {
                Ok(text) => client.answer(&text),
                Err(error) => client.answer(&control::error(error)),
            }
        }
        Request::Target { bytes } => {
            if let Some(bytes) = bytes {
                device.set_target(bytes);
            }
            let target = u64::from(device.config().num_pages).saturating_mul(balloon_protocol::PAGE_SIZE);
            let reply = serde_json::json!({ "ok": true, "target": target, "actual": device.actual() });
            client.answer(&reply.to_string());
        }
        Request::Stats => {
            let now = Instant::now();
            if device.queues().index(balloon_protocol::QueueKind::Stats).is_none() {
                client.answer(&control::error("the guest's driver has no statistics (or is not there)"));
            } else {
                // If it is being asked already, that answer will do.
                device.ask_for_statistics();
                client.waits_until = now.checked_add(ANSWER_WITHIN);
            }
        }
        Request::Discard { enabled } => {
            device.set_inhibited(!enabled);
            client.answer(&serde_json::json!({ "ok": true, "enabled": enabled }).to_string());
        }
        Request::Metrics => {
            let reply = serde_json::json!({ "ok": true, "text": device.metrics().text() });
            client.answer(&reply.to_string());
        }
    }
}
