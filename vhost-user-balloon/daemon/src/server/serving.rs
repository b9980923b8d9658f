// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One turn after the other for the front end, its queues and the local clients.

use std::os::unix::net::UnixListener;
use std::time::Instant;

use balloon_protocol::QueueMap;
use rustix::io::Errno;

use super::errors::{ServerError, Source};
use super::events::Event;
use super::listening::Server;
use crate::control::converse;
use crate::foreign::keep_in_order;
use crate::front_end::{FrontEnd, ProtocolError};
use crate::limited;
use crate::ring::Ring;
use crate::service::Service;
use crate::signals;
use crate::threads::{Closes, Foreign, Peer};

impl Server {
    /// Serve front ends: one until it hangs up, or one after the other.
    pub fn run(&mut self, source: Source) -> Result<(), ServerError> {
        let (listener, mut front_end) = begin(source)?;
        let mut busy = [false; QueueMap::MAX];
        let mut backlog = false;
        loop {
            let asked = self.control.as_ref().is_some_and(Service::is_busy);
            let pause = !backlog && !asked && !busy.contains(&true) && !signals::is_front_end_lost();
            let ready = self.wait(listener.as_ref(), front_end.as_ref(), pause)?;
            if let Some(ended) = self.serve_front_end(front_end.as_mut(), &ready) {
                front_end = None;
                self.device.disconnect();
                match ended {
                    _ if listener.is_none() => return ended,
                    Ok(()) => limited!(info: self.connections, "the front end has hung up"),
                    Err(error) => limited!(self.device.limiter, %error, "left a front end"),
                }
            }
            if ready.contains(&Event::Newcomer)
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
            self.serve_clients(&ready);
        }
    }

    /// One request at most. How the front end has ended, if it has.
    fn serve_front_end(
        &mut self,
        front_end: Option<&mut FrontEnd>,
        ready: &[Event],
    ) -> Option<Result<(), ServerError>> {
        let (lost, waited) = (signals::memory_was_lost(), signals::call_was_interrupted());
        let served = front_end?;
        if !ready.contains(&Event::FrontEnd) && served.deadline().is_none() && !lost && !waited {
            return None;
        }
        let served = match ready.contains(&Event::Hangup) {
            // No reply can arrive, and disconnect() undoes what its last messages would do: they
            // are dropped, or the next front end would wait for them.
            true => Ok(false),
            false => served.serve(&mut self.device),
        };
        match served {
            _ if lost => Some(Err(ServerError::MemoryLost(self.device.memory.loss()))),
            _ if waited => Some(Err(ProtocolError::Blocks.into())),
            Ok(true) => None,
            Ok(false) => Some(Ok(())),
            Err(error) => Some(Err(error.into())),
        }
    }

    fn serve_clients(&mut self, ready: &[Event]) {
        if let Some(mut service) = self.control.take() {
            let is_ready = |n| ready.contains(&Event::Control(n));
            let (device, operator) = (&mut self.device, &mut self.operator);
            let served = service.serve(is_ready, |client| converse(device, operator, client));
            self.device.check_flush(|client| service.clients.iter().any(|other| other.peer() == client));
            self.control = Some(service);
            self.rest_unless(served);
        }
        if let Some(mut service) = self.metrics.take() {
            let text = || self.device.metrics.text();
            let is_ready = |n| ready.contains(&Event::Metrics(n));
            let served = service.serve(is_ready, |client| client.answer_http(text));
            self.metrics = Some(service);
            self.rest_unless(served);
        }
    }
}

/// What to listen on, and who is connected already.
fn begin(source: Source) -> Result<(Option<UnixListener>, Option<FrontEnd>), Errno> {
    match source {
        Source::Listener(listener) => {
            listener.set_nonblocking(true).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::BADF))?;
            Ok((Some(listener), None))
        }
        Source::Stream(socket) => {
            let socket = Foreign::new(socket, Closes::FrontEnds, Peer::new());
            keep_in_order(&socket)?;
            Ok((None, Some(FrontEnd::new(socket))))
        }
    }
}
