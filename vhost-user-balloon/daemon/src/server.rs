// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop that serves one front end at a time, and the local clients.

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use thiserror::Error;

use crate::control::{self, Request};
use crate::device::{Device, Options};
use crate::foreign::{keep_in_order, open_proc, peek};
use crate::limit::Limiter;
use crate::limited;
use crate::ring::Ring;
use crate::service::{Client, Service, is_for_the_peer, listen};
use crate::signals;
use crate::state::{State, StateFile};
use crate::threads::{self, Closes, Foreign};
use crate::vhost_user::{FrontEnd, ProtocolError};
use balloon_protocol::{QueueKind, QueueMap};

/// How long a guest has to answer a question about its memory.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const NO_ANSWER: &str =
    "cannot read statistics: the guest has not answered within 5 seconds; ask again later";
const NO_STATISTICS: &str =
    "cannot read statistics: no driver with a queue for them has started; see the status";
/// How many connections may wait without a message while there is no front end.
const MAX_NEWCOMERS: usize = 16;
/// How long no connection is accepted when there is no descriptor for one.
const REST: Duration = Duration::from_millis(200);

#[derive(Debug, Error)]
pub enum ServerError {
    #[error("cannot listen on {path}: {why}")]
    Listen { path: PathBuf, why: String },
    #[error("cannot make a ring: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("cannot use descriptor {fd}: {why}; pass a unix socket, as a service manager does")]
    Descriptor { fd: i32, why: io::Error },
    #[error("cannot look at descriptors: {0}; mount /proc")]
    Proc(Errno),
    #[error("cannot wait for events: {0}; start the device again")]
    Poll(#[from] Errno),
    #[error(
        "cannot serve the front end, which does not keep to the protocol: {0}; update or restart the VMM"
    )]
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
    pub fn listen(path: &Path) -> Result<Self, ServerError> {
        listen_at(path).map(Self::Listener)
    }
}

fn listen_at(path: &Path) -> Result<UnixListener, ServerError> {
    listen(path).map_err(|why| ServerError::Listen { path: path.to_owned(), why })
}

pub struct Server {
    device: Device,
    control: Option<Service>,
    metrics: Option<Service>,
    state: Option<StateFile>,
    sandbox: String,
    /// Connections that have sent nothing yet; the first that does is the front end.
    newcomers: Vec<Foreign<UnixStream>>,
    /// For messages about front ends that come and go.
    connections: Limiter,
    /// No connection is accepted until then.
    rests_until: Option<Instant>,
    /// Calls that wait are interrupted.
    interrupts: bool,
}

impl Server {
    pub fn new(options: Options) -> Result<Self, ServerError> {
        open_proc().map_err(ServerError::Proc)?;
        Ok(Self {
            device: Device::new(options)?,
            control: None,
            metrics: None,
            state: None,
            sandbox: "none".to_owned(),
            newcomers: Vec::new(),
            connections: Limiter::default(),
            rests_until: None,
            interrupts: false,
        })
    }

    pub fn control(&mut self, path: &Path) -> Result<(), ServerError> {
        self.control = Some(Service::new(listen_at(path)?));
        Ok(())
    }

    pub fn metrics(&mut self, path: &Path) -> Result<(), ServerError> {
        self.metrics = Some(Service::new(listen_at(path)?));
        Ok(())
    }

    /// Keep what is commanded in a file. What was in there already counts more than --target; discarding starts
    /// suspended if either of the file and --discard is off.
    pub fn keep_state(&mut self, file: StateFile, state: Option<State>) {
        if let Some(State { target, discard }) = state {
            self.device.set_target(target);
            self.device.inhibited |= !discard;
            let discards = !self.device.inhibited;
            tracing::info!(target, discard, discards, "the state file overrides --target and --discard on");
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
            Source::Stream(socket) => {
                let socket = Foreign::new(socket, Closes::FrontEnds);
                keep_in_order(&socket)?;
                (None, Some(FrontEnd::new(socket)))
            }
        };
        let mut busy = [false; QueueMap::MAX];
        let mut backlog = false;
        loop {
            let pause = !backlog && !busy.contains(&true) && !signals::is_memory_lost();
            let ready = self.wait(listener.as_ref(), front_end.as_ref(), pause)?;
            let due = ready.contains(&Event::FrontEnd)
                || front_end.as_ref().is_some_and(|served| served.deadline().is_some());
            let lost = signals::memory_was_lost();
            if let Some(served) = front_end.as_mut().filter(|_| due || lost) {
                let ended = match served.serve(&mut self.device) {
                    _ if lost => Some(Err(ServerError::MemoryLost(self.device.memory.loss()))),
                    Ok(true) => None,
                    Ok(false) => Some(Ok(())),
                    Err(error) => Some(Err(error.into())),
                };
                if let Some(ended) = ended {
                    front_end = None;
                    self.device.disconnect();
                    match ended {
                        _ if listener.is_none() => return ended,
                        Ok(()) => limited!(info: self.connections, "the front end has hung up"),
                        Err(error) => limited!(self.device.limiter, %error, "left a front end"),
                    }
                }
            }
            // One that has hung up is served to its end before the next one.
            if ready.contains(&Event::Newcomer)
                && !(ready.contains(&Event::Hangup) && front_end.is_some())
                && let Some(listener) = &listener
            {
                self.accept(listener, front_end.is_some());
            }
            if front_end.is_none() && ready.contains(&Event::Message) {
                front_end = self.first_message();
            }
            for (index, more) in busy.iter_mut().enumerate() {
                *more |= self.device.ring_mut(index).is_some_and(Ring::take_pending);
                if ready.contains(&Event::Kick(index)) {
                    *more |= self.device.kicked(index);
                } else if *more {
                    *more = self.device.run_ring(index);
                }
            }
            backlog = self.device.run_backlog();
            if self.device.wants_to_notify() {
                self.device.notify();
            }
            if self.device.next_question().is_some_and(|at| at <= Instant::now()) {
                self.device.ask_for_statistics();
            }
            if let Some(mut service) = self.control.take() {
                let served =
                    service.serve(|n| ready.contains(&Event::Control(n)), |client| self.converse(client));
                self.control = Some(service);
                self.rest_unless(served);
            }
            if let Some(mut service) = self.metrics.take() {
                let text = || self.device.metrics.text();
                let served =
                    service.serve(|n| ready.contains(&Event::Metrics(n)), |client| client.answer_http(text));
                self.metrics = Some(service);
                self.rest_unless(served);
            }
        }
    }

    fn accept(&mut self, listener: &UnixListener, taken: bool) {
        let socket = match listener.accept() {
            Ok((socket, _)) => Foreign::new(socket, Closes::FrontEnds),
            Err(error) if is_for_the_peer(&error) => return,
            Err(error) => return self.rest(&error),
        };
        // There is one front end at a time: another connection is closed at once.
        if taken {
            limited!(self.device.limiter, "refused a second front end");
        } else if let Err(error) = keep_in_order(&socket) {
            self.rest(&error);
        } else {
            if self.newcomers.len() >= MAX_NEWCOMERS {
                self.newcomers.remove(0);
            }
            self.newcomers.push(socket);
        }
    }

    /// The first of the connections that has sent something. All others end.
    fn first_message(&mut self) -> Option<FrontEnd> {
        // Those that have hung up are no front end.
        self.newcomers.retain(|socket| matches!(peek(socket, &mut [0]), Ok((1, _)) | Err(Errno::AGAIN)));
        let first = self.newcomers.iter().position(|socket| peek(socket, &mut [0]).is_ok())?;
        let socket = self.newcomers.swap_remove(first);
        limited!(info: self.connections, "a front end has connected");
        if !self.newcomers.is_empty() {
            limited!(self.device.limiter, others = self.newcomers.len(), "refused a second front end");
            self.newcomers.clear();
        }
        Some(FrontEnd::new(socket))
    }

    fn rest(&mut self, error: &dyn std::fmt::Display) {
        self.rests_until = Instant::now().checked_add(REST);
        limited!(self.device.limiter, %error, "cannot accept a connection");
    }

    fn wait(
        &mut self,
        listener: Option<&UnixListener>,
        front_end: Option<&FrontEnd>,
        pause: bool,
    ) -> Result<Vec<Event>, ServerError> {
        let now = Instant::now();
        self.rests_until = self.rests_until.filter(|until| *until > now);
        // Without a descriptor for a connection a listener would be ready all the time.
        let listens = self.rests_until.is_none();
        let mut polls = Vec::new();
        let room = listens && !Closes::FrontEnds.is_full();
        polls.extend(listener.filter(|_| room).map(|l| (Event::Newcomer, PollFd::new(l, PollFlags::IN))));
        let newcomers = self.newcomers.iter();
        polls.extend(newcomers.map(|socket| (Event::Message, PollFd::new(&**socket, PollFlags::IN))));
        let drained = threads::drained().map(|event| PollFd::from_borrowed_fd(event, PollFlags::IN));
        polls.extend(drained.map(|poll| (Event::Drained, poll)));
        polls.extend(front_end.map(|front_end| {
            let (socket, events) = front_end.poll();
            (Event::FrontEnd, PollFd::from_borrowed_fd(socket, events | PollFlags::RDHUP))
        }));
        for index in 0..QueueMap::MAX {
            let kick = self.device.ring(index).filter(|ring| ring.is_running()).and_then(Ring::kick);
            polls.extend(kick.map(|k| (Event::Kick(index), PollFd::from_borrowed_fd(k, PollFlags::IN))));
        }
        for (service, event) in [(&self.control, Event::Control as Local), (&self.metrics, Event::Metrics)] {
            let service = service.iter().flat_map(|service| service.polls(listens));
            polls.extend(service.map(|(client, poll)| (event(client), poll)));
        }
        let channel = self.device.channel_fd().filter(|_| self.device.wants_to_notify());
        polls.extend(channel.map(|c| (Event::Channel, PollFd::from_borrowed_fd(c, PollFlags::OUT))));
        let (events, mut polls): (Vec<Event>, Vec<PollFd<'_>>) = polls.into_iter().unzip();

        let timeout = if pause { self.timeout(front_end) } else { Some(Duration::ZERO) };
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let polled = rustix::event::poll(&mut polls, timeout.as_ref());
        // The timer runs on from one event to the next, until it interrupts a pause.
        let interrupted = polled == Err(Errno::INTR);
        if self.interrupts == interrupted {
            self.interrupts = !interrupted;
            signals::interrupt_calls(self.interrupts);
        }
        if interrupted {
            // Nothing is known of what came.
            return Ok(Vec::new());
        }
        polled?;
        let mut ready = Vec::new();
        for (event, came) in events.into_iter().zip(polls.iter().map(PollFd::revents)) {
            if event == Event::FrontEnd && came.intersects(PollFlags::HUP | PollFlags::RDHUP) {
                ready.push(Event::Hangup);
            }
            if event == Event::Drained && !came.is_empty() {
                threads::take_drained();
            }
            ready.extend((!came.is_empty()).then_some(event));
        }
        Ok(ready)
    }

    fn timeout(&self, front_end: Option<&FrontEnd>) -> Option<Duration> {
        let now = Instant::now();
        let waiting = self.control.iter().flat_map(|s| &s.clients).filter_map(|c| c.waits_until);
        let deadline = front_end.and_then(FrontEnd::deadline);
        let next =
            waiting.chain(self.device.next_question()).chain(deadline).chain(self.rests_until).min()?;
        // Rounded up, or the time before it would be spent in a busy loop.
        Some(next.saturating_duration_since(now).saturating_add(Duration::from_millis(1)))
    }

    fn rest_unless(&mut self, accepted: bool) {
        if !accepted {
            self.rest(&"no descriptor for a local client");
        }
    }

    /// Answer what a control client has asked, and what it waits for.
    fn converse(&mut self, client: &mut Client) {
        let now = Instant::now();
        while let Some(line) = client.line() {
            self.answer(client, &line);
            client.write();
        }
        let Some(until) = client.waits_until else { return };
        let asked = until.checked_sub(ANSWER_WITHIN);
        let fresh = self.device.statistics.as_ref().filter(|(_, at)| asked.is_some_and(|asked| *at > asked));
        if let Some((statistics, _)) = fresh {
            let reply = serde_json::json!({ "ok": true, "stats": control::statistics(statistics) });
            client.answer(&reply.to_string());
            client.waits_until = None;
        } else if now >= until {
            client.answer(&control::error(NO_ANSWER));
            client.waits_until = None;
        }
    }

    fn answer(&mut self, client: &mut Client, line: &[u8]) {
        let request = match serde_json::from_slice::<Request>(line) {
            Ok(request) => request,
            Err(error) => {
                return client.answer(&control::error(format_args!(
                    "cannot read the request: {error}; one is like {{\"command\":\"status\"}}"
                )));
            }
        };
        let device = &mut self.device;
        let changes = matches!(request, Request::Target { bytes: Some(_) } | Request::Discard { .. });
        let reply = match request {
            Request::Status => control::status(device, &self.sandbox).to_string(),
            Request::Target { bytes } => {
                if let Some(bytes) = bytes {
                    device.set_target(bytes);
                }
                let target = u64::from(device.config.num_pages).saturating_mul(balloon_protocol::PAGE_SIZE);
                serde_json::json!({ "ok": true, "target": target, "actual": device.actual() }).to_string()
            }
            Request::Stats if device.queues.index(QueueKind::Stats).is_none() => {
                control::error(NO_STATISTICS)
            }
            Request::Stats => {
                // If it is being asked already, that answer will do.
                device.ask_for_statistics();
                client.waits_until = Instant::now().checked_add(ANSWER_WITHIN);
                return;
            }
            Request::Discard { enabled } => {
                device.inhibited = !enabled;
                serde_json::json!({ "ok": true, "enabled": enabled }).to_string()
            }
        };
        let state = State { target: device.target, discard: !device.inhibited };
        let saved = self.state.as_ref().filter(|_| changes).map_or(Ok(()), |file| file.save(state));
        client.answer(
            &saved.map_or_else(|error| control::error(format_args!("done, but {error}")), |()| reply),
        );
    }
}

/// What poll(2) waits for. A local client has its number, its listener has none.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Event {
    Newcomer,
    /// On a connection that is not a front end yet.
    Message,
    /// A thread that closes descriptors has room again.
    Drained,
    FrontEnd,
    /// Comes with the last of the front end's messages, or later.
    Hangup,
    Kick(usize),
    Control(Option<usize>),
    Metrics(Option<usize>),
    Channel,
}

type Local = fn(Option<usize>) -> Event;
