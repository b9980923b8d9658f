// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The sockets that are listened on, and those that have connected.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::errors::{ServerError, listen_at};
use crate::control::Operator;
use crate::device::{Device, Options};
use crate::foreign::{keep_in_order, open_proc, peek};
use crate::front_end::FrontEnd;
use crate::limit::Limiter;
use crate::limited;
use crate::service::{Service, is_for_the_peer};
use crate::state::{Kept, State, StateFile};
use crate::threads::{Closes, Foreign, Peer};

/// How many connections may wait without a message while there is no front end.
const MAX_NEWCOMERS: usize = 16;
/// How long no connection is accepted when there is no descriptor for one.
const REST: Duration = Duration::from_millis(200);

pub struct Server {
    pub(super) device: Device,
    pub(super) control: Option<Service>,
    pub(super) metrics: Option<Service>,
    pub(super) operator: Operator,
    /// Connections that have sent nothing yet; the first that does is the front end.
    pub(super) newcomers: Vec<Foreign<UnixStream>>,
    /// For messages about front ends that come and go.
    pub(super) connections: Limiter,
    /// No connection is accepted until then.
    pub(super) rests_until: Option<Instant>,
    /// Calls that wait are interrupted.
    pub(super) interrupts: bool,
}

impl Server {
    pub fn new(options: Options) -> Result<Self, ServerError> {
        open_proc().map_err(ServerError::Proc)?;
        Ok(Self {
            device: Device::new(options)?,
            control: None,
            metrics: None,
            operator: Operator::default(),
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

    /// Keep what is commanded in a file. A target in there counts more than --target; discarding
    /// starts suspended if either of the file and --discard is off, or if the file does not know.
    pub fn keep_state(&mut self, file: StateFile, kept: Kept) {
        match kept {
            Kept::State(state) => {
                let State { target, discard } = state;
                if let Some(target) = target {
                    self.device.set_target(target);
                }
                self.device.set_inhibited(self.device.is_inhibited() || discard == Some(false));
                self.operator.commanded = state;
                let discards = !self.device.is_inhibited();
                tracing::info!(
                    target,
                    discard,
                    discards,
                    "the commands in the state file override --target and --discard on"
                );
            }
            Kept::InDoubt => {
                self.suspend();
                tracing::warn!(
                    "discarding is suspended: the state file is empty, so a command was not saved"
                );
            }
            Kept::Nothing => {
                if let Err(error) = file.save(None) {
                    self.suspend();
                    tracing::warn!(%error, "discarding is suspended: no command can be saved");
                }
            }
        }
        self.operator.state = Some(file);
    }

    /// Discard nothing until that is commanded, also in the next daemon.
    fn suspend(&mut self) {
        self.device.set_inhibited(true);
        self.operator.commanded.discard = Some(false);
    }

    /// How the process is confined, for `status`.
    pub fn set_sandbox(&mut self, how: String) {
        self.operator.sandbox = how;
    }

    pub(super) fn accept(&mut self, listener: &UnixListener, taken: bool) {
        let socket = match listener.accept() {
            Ok((socket, _)) => Foreign::new(socket, Closes::FrontEnds, Peer::new()),
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
    pub(super) fn first_message(&mut self) -> Option<FrontEnd> {
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

    pub(super) fn rest(&mut self, error: &dyn std::fmt::Display) {
        self.rests_until = Instant::now().checked_add(REST);
        limited!(self.device.limiter, %error, "cannot accept a connection");
    }

    pub(super) fn rest_unless(&mut self, accepted: bool) {
        if !accepted {
            self.rest(&"no descriptor for a local client");
        }
    }
}
