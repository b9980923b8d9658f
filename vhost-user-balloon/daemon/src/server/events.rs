// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the loop waits for.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use balloon_protocol::QueueMap;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::errors::ServerError;
use super::listening::Server;
use crate::front_end::FrontEnd;
use crate::ring::Ring;
use crate::service::Client;
use crate::signals;
use crate::threads::{self, Closes};

/// What poll(2) waits for. A local client has its number, its listener has none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Newcomer,
    /// On a connection that is not a front end yet.
    Message,
    /// A thread that closes descriptors has room again.
    Drained,
    FrontEnd,
    /// The front end has closed its end, or both directions.
    Hangup,
    Kick(usize),
    Control(Option<usize>),
    Metrics(Option<usize>),
    Channel,
}

type Local = fn(Option<usize>) -> Event;
type Polls<'a> = Vec<(Event, PollFd<'a>)>;

impl Server {
    /// Wait until something is ready, or due; `pause`: or else look only.
    pub(super) fn wait(
        &mut self,
        listener: Option<&UnixListener>,
        front_end: Option<&FrontEnd>,
        pause: bool,
    ) -> Result<Vec<Event>, ServerError> {
        let now = Instant::now();
        self.rests_until = self.rests_until.filter(|until| *until > now);
        let timeout = if pause { self.timeout(front_end) } else { Some(Duration::ZERO) };
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let (events, mut polls): (Vec<Event>, Vec<PollFd<'_>>) =
            self.polls(listener, front_end).into_iter().unzip();
        let polled = rustix::event::poll(&mut polls, timeout.as_ref());
        let came: Vec<PollFlags> = polls.iter().map(PollFd::revents).collect();
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
        for (event, came) in events.into_iter().zip(came) {
            if event == Event::FrontEnd && came.contains(PollFlags::HUP) {
                ready.push(Event::Hangup);
            }
            if event == Event::Drained && !came.is_empty() {
                threads::take_drained();
            }
            ready.extend((!came.is_empty()).then_some(event));
        }
        Ok(ready)
    }

    fn polls<'a>(&'a self, listener: Option<&'a UnixListener>, front_end: Option<&'a FrontEnd>) -> Polls<'a> {
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
            (Event::FrontEnd, PollFd::from_borrowed_fd(socket, events))
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
        polls
    }

    fn timeout(&self, front_end: Option<&FrontEnd>) -> Option<Duration> {
        let now = Instant::now();
        let waiting = self.control.iter().flat_map(|s| &s.clients).filter_map(Client::due);
        let deadline = front_end.and_then(FrontEnd::deadline);
        let next =
            waiting.chain(self.device.next_question()).chain(deadline).chain(self.rests_until).min()?;
        // Rounded up, or the time before it would be spent in a busy loop.
        Some(next.saturating_duration_since(now).saturating_add(Duration::from_millis(1)))
    }
}
