// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop that serves one front end at a time, and the local clients.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use thiserror::Error;

use crate::control::{self, Request, Status};
use crate::device::{Device, Options};
use crate::limited;
use crate::ring::Ring;
use crate::service::{Client, Service, is_for_the_peer, listen};
use crate::signals;
use crate::state::{State, StateFile};
use crate::vhost_user::{FrontEnd, ProtocolError};
use balloon_protocol::{QueueKind, QueueMap};

/// How long a guest has to answer a question about its memory.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long no connection is accepted when there is no descriptor for one.
const REST: Duration = Duration::from_millis(200);

/// Why serving ended, or did not begin.
#[derive(Debug, Error)]
#[allow(missing_docs)]
pub enum ServerError {
    #[error("cannot listen on {path}: {source}")]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot make a ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("descriptor {fd} is no unix socket: {source}")]
    Descriptor { fd: i32, source: io::Error },
    #[error("cannot wait for events: {0}")]
    Poll(#[from] Errno),
    #[error("the front end does not keep to the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("{0}")]
    MemoryLost(&'static str),
}

/// Where the front end comes from.
#[derive(Debug)]
pub enum Source {
    /// Front ends will connect, one after the other.
    Listener(UnixListener),
    /// One is connected, and there will be no other.
    Stream(UnixStream),
}

impl Source {
    /// Listen at a path.
    pub fn listen(path: &Path) -> Result<Self, ServerError> {
        let listening =
            listen(path).map_err(|source| ServerError::Listen { path: path.to_owned(), source })?;
        Ok(Self::Listener(listening))
    }
}

/// What is served, and to whom.
pub struct Server {
    device: Device,
    control: Option<Service>,
    metrics: Option<Service>,
    state: Option<StateFile>,
    sandbox: String,
    /// No connection is accepted until then.
    rests_until: Option<Instant>,
    /// Calls that wait are interrupted.
    interrupts: bool,
}

impl Server {
    /// A device without a front end.
    pub fn new(options: Options) -> Result<Self, ServerError> {
        Ok(Self {
            device: Device::new(options)?,
            control: None,
            metrics: None,
            state: None,
            sandbox: "none".to_owned(),
            rests_until: None,
            interrupts: false,
        })
    }

    /// Serve control requests at a path.
    pub fn control(&mut self, path: &Path) -> Result<(), ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        self.control = Some(Service::bind(path).map_err(failed)?);
        Ok(())
    }

    /// Serve metrics at a path.
    pub fn metrics(&mut self, path: &Path) -> Result<(), ServerError> {
        let failed = |source| ServerError::Listen { path: path.to_owned(), source };
        self.metrics = Some(Service::bind(path).map_err(failed)?);
        Ok(())
    }

    /// Keep what is commanded in a file; what was in there already counts more than the options.
    pub fn keep_state(&mut self, file: StateFile, state: Option<State>) {
        if let Some(State { target, discard }) = state {
            tracing::info!(target, discard, "the state file overrides --target and --discard");
            self.device.set_target(target);
            self.device.set_inhibited(!discard);
        }
        self.state = Some(file);
    }

    /// How the process is confined, for `status`.
    pub fn set_sandbox(&mut self, how: String) {
        self.sandbox = how;
    }

    /// Serve front ends: one until it hangs up, or one after the other.
    pub fn run(&mut self, source: Source) -> Result<(), ServerError> {
        let (listener, mut front_end) = match source {
            Source::Listener(listener) => {
                listener
                    .set_nonblocking(true)
                    .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::BADF))?;
                (Some(listener), None)
            }
            Source::Stream(socket) => (None, Some(FrontEnd::new(socket))),
        };
        let mut busy = [false; QueueMap::MAX];
        let mut backlog = false;
        loop {
            let pause = !backlog && !busy.contains(&true) && !signals::is_memory_lost();
            let ready = self.wait(listener.as_ref(), front_end.as_ref(), pause)?;
            let due = ready.front_end || front_end.as_ref().is_some_and(|served| served.deadline().is_some());
            let lost = signals::memory_was_lost();
            if let Some(served) = front_end.as_mut().filter(|_| due || lost) {
                let ended = match served.serve(&mut self.device) {
                    _ if lost => Some(Err(ServerError::MemoryLost(self.device.memory().loss()))),
                    Ok(true) => None,
                    Ok(false) => Some(Ok(())),
                    Err(error) => Some(Err(error.into())),
                };
                if let Some(ended) = ended {
                    front_end = None;
                    self.device.disconnect();
                    match ended {
                        _ if listener.is_none() => return ended,
                        Ok(()) => tracing::info!("the front end has hung up"),
                        Err(error) => limited!(self.device.limiter(), %error, "left a front end"),
                    }
                }
            }
            // One that has hung up is served to its end before the next one.
            if ready.newcomer
                && !(ready.hangup && front_end.is_some())
                && let Some(listener) = &listener
            {
                self.accept(listener, &mut front_end);
            }
            for (index, (kicked, more)) in ready.kicks.iter().zip(busy.iter_mut()).enumerate() {
                *more |= self.device.ring_mut(index).is_some_and(Ring::take_pending);
                if *kicked {
                    *more |= self.device.kicked(index);
                } else if *more {
                    *more = self.device.run_ring(index);
                }
            }
            backlog = self.device.run_backlog();
            if self.device.wants_to_tell() {
                self.device.tell();
            }
            if self.device.next_question().is_some_and(|at| at <= Instant::now()) {
                self.device.ask_for_statistics();
            }
            self.serve_control(&ready.control);
            self.serve_metrics(&ready.metrics);
        }
    }

    fn accept(&mut self, listener: &UnixListener, front_end: &mut Option<FrontEnd>) {
        match listener.accept() {
            // One front end is all there is: the next one sees that at once.
            Ok(_) if front_end.is_some() => {
                limited!(self.device.limiter(), "refused a second front end");
            }
            Ok((socket, _)) => {
                tracing::info!("a front end has connected");
                *front_end = Some(FrontEnd::new(socket));
            }
            Err(error) if is_for_the_peer(&error) => {}
            Err(error) => self.rest(&error),
        }
    }

    fn rest(&mut self, error: &dyn std::fmt::Display) {
        self.rests_until = Instant::now().checked_add(REST);
        limited!(self.device.limiter(), %error, "cannot accept a connection");
    }

    fn wait(
        &mut self,
        listener: Option<&UnixListener>,
        front_end: Option<&FrontEnd>,
        pause: bool,
    ) -> Result<Ready, ServerError> {
        let now = Instant::now();
        self.rests_until = self.rests_until.filter(|until| *until > now);
        let mut polls = Vec::new();
        // Without a descriptor for a connection a listener would be ready all the time.
        let listens = self.rests_until.is_none();
        polls.extend(listener.filter(|_| listens).map(|listener| PollFd::new(listener, PollFlags::IN)));
        let listeners = polls.len();
        let fronts = usize::from(front_end.is_some());
        polls.extend(front_end.map(|front_end| {
            let (socket, events) = front_end.poll();
            PollFd::from_borrowed_fd(socket, events | PollFlags::RDHUP)
        }));
        let mut rings = Vec::new();
        for index in 0..QueueMap::MAX {
            if let Some(kick) = self.device.ring(index).filter(|r| r.is_running()).and_then(Ring::kick) {
                polls.push(PollFd::from_borrowed_fd(kick, PollFlags::IN));
                rings.push(index);
            }
        }
        for service in [&self.control, &self.metrics].into_iter().flatten() {
            service.polls(listens, &mut polls);
        }
        if self.device.wants_to_tell()
            && let Some(channel) = self.device.channel_fd()
        {
            polls.push(PollFd::from_borrowed_fd(channel, PollFlags::OUT));
        }
        let timeout = if pause { self.timeout(front_end) } else { Some(Duration::ZERO) };
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let polled = rustix::event::poll(&mut polls, timeout.as_ref());
        // The timer runs on from one event to the next, until it interrupts a pause.
        let interrupted = polled == Err(Errno::INTR);
        if self.interrupts == interrupted {
            self.interrupts = !interrupted;
            signals::interrupt_calls(self.interrupts);
        }
        match polled {
            Ok(_) => {}
            // Nothing is known of what came.
            Err(Errno::INTR) => polls.iter_mut().for_each(PollFd::clear_revents),
            Err(error) => return Err(error.into()),
        }
        let gone = PollFlags::HUP | PollFlags::RDHUP;
        let hangup = polls.iter().skip(listeners).take(fronts).any(|poll| poll.revents().intersects(gone));
        let mut came = polls.iter().map(|poll| !poll.revents().is_empty());
        let newcomer = came.by_ref().take(listeners).any(|c| c);
        let mut ready = Ready { newcomer, hangup, ..Ready::default() };
        ready.front_end = came.by_ref().take(fronts).any(|c| c);
        for index in rings {
            if came.next() == Some(true)
                && let Some(slot) = ready.kicks.get_mut(index)
            {
                *slot = true;
            }
        }
        let mut of = |service: &Option<Service>| -> Vec<bool> {
            let count = service.as_ref().map_or(0, |service| service.clients.len());
            let listener = service.iter().filter(|_| listens).count();
            let newcomer = came.by_ref().take(listener).any(|c| c);
            std::iter::once(newcomer).chain(came.by_ref().take(count)).collect()
        };
        ready.control = of(&self.control);
        ready.metrics = of(&self.metrics);
        Ok(ready)
    }

    fn timeout(&self, front_end: Option<&FrontEnd>) -> Option<Duration> {
        let now = Instant::now();
        let waiting = self.control.iter().flat_map(|s| &s.clients).filter_map(|c| c.waits_until);
        let deadline = front_end.and_then(FrontEnd::deadline);
        let next =
            waiting.chain(self.device.next_question()).chain(deadline).chain(self.rests_until).min()?;
        // Rounded up, or the time before it would be spent turning round.
        Some(next.saturating_duration_since(now).saturating_add(Duration::from_millis(1)))
    }

    fn serve_control(&mut self, ready: &[bool]) {
        let Some(mut service) = self.control.take() else { return };
        let now = Instant::now();
        let mut came = ready.iter().copied();
        let newcomer = came.next() == Some(true);
        service.clients.retain_mut(|client| {
            if came.next() == Some(true) && !client.read() {
                return false;
            }
            while let Some(line) = client.line() {
                self.answer(client, &line);
                if !client.write() {
                    return false;
                }
            }
            if let Some(until) = client.waits_until {
                let asked = until.checked_sub(ANSWER_WITHIN);
                let fresh = self.device.statistics().filter(|(_, at)| asked.is_some_and(|asked| *at > asked));
                if let Some((statistics, _)) = fresh {
                    let reply = serde_json::json!({ "ok": true, "stats": control::statistics(statistics) });
                    client.answer(&reply.to_string());
                    client.waits_until = None;
                } else if now >= until {
                    client.answer(&control::error("the guest has not answered within 5 seconds"));
                    client.waits_until = None;
                }
            }
            client.write()
        });
        let accepted = !newcomer || service.accept();
        self.control = Some(service);
        if !accepted {
            self.rest(&"no descriptor for a control client");
        }
    }

    fn serve_metrics(&mut self, ready: &[bool]) {
        let Some(service) = &mut self.metrics else { return };
        let mut came = ready.iter().copied();
        let newcomer = came.next() == Some(true);
        service.clients.retain_mut(|client| {
            if came.next() == Some(true) && !client.read() {
                return false;
            }
            if client.has_http_request() {
                client.answer_http(&self.device.metrics().text());
            }
            client.write()
        });
        if newcomer && !service.accept() {
            self.rest(&"no descriptor for a scrape");
        }
    }

    fn answer(&mut self, client: &mut Client, line: &[u8]) {
        let request = match serde_json::from_slice::<Request>(line) {
            Ok(request) => request,
            Err(error) => return client.answer(&control::error(format_args!("not a request: {error}"))),
        };
        let device = &mut self.device;
        let changes = matches!(request, Request::Target { bytes: Some(_) } | Request::Discard { .. });
        let reply = match request {
            Request::Status => {
                let connected = device.memory().total() != 0;
                let status = Status::of(device, connected, &self.sandbox);
                serde_json::to_string(&status).unwrap_or_else(control::error)
            }
            Request::Target { bytes } => {
                if let Some(bytes) = bytes {
                    device.set_target(bytes);
                }
                let target = u64::from(device.config().num_pages).saturating_mul(balloon_protocol::PAGE_SIZE);
                serde_json::json!({ "ok": true, "target": target, "actual": device.actual() }).to_string()
            }
            Request::Stats if device.queues().index(QueueKind::Stats).is_none() => {
                control::error("the guest's driver has no statistics (or is not there)")
            }
            Request::Stats => {
                // If it is being asked already, that answer will do.
                device.ask_for_statistics();
                client.waits_until = Instant::now().checked_add(ANSWER_WITHIN);
                return;
            }
            Request::Discard { enabled } => {
                device.set_inhibited(!enabled);
                serde_json::json!({ "ok": true, "enabled": enabled }).to_string()
            }
            Request::Metrics => {
                serde_json::json!({ "ok": true, "text": device.metrics().text() }).to_string()
            }
        };
        let state = State { target: device.target(), discard: !device.is_inhibited() };
        let saved = self.state.as_ref().filter(|_| changes).map_or(Ok(()), |file| file.save(state));
        client.answer(
            &saved.map_or_else(|error| control::error(format_args!("done, but {error}")), |()| reply),
        );
    }
}

#[derive(Default)]
struct Ready {
    newcomer: bool,
    front_end: bool,
    hangup: bool,
    kicks: [bool; QueueMap::MAX],
    control: Vec<bool>,
    metrics: Vec<bool>,
}
