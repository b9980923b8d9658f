// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio balloon as a process of its own, for any VMM that speaks vhost-user.
//!
//! One thread serves: requests of the front end, queues, control and metrics sockets. Others wait for
//! signals, and close descriptors that nothing is known of. So nothing can still be discarding memory after the front end has been told that a
//! ring has stopped or that a region of memory is no longer in use; with a worker thread beside the one
//! that answers requests (as `vhost-user-backend` has it) that takes a lock around every discard.

pub mod cli;
pub mod control;
pub mod device;
pub mod limit;
#[cfg(feature = "lying")]
pub mod lying;
pub mod memory;
pub mod metrics;
pub mod notify;
pub mod ring;
pub mod run;
pub mod sandbox;
pub mod server;
pub mod signals;
pub mod state;
pub mod subcommand;
pub mod threads;
pub mod vhost_user;

mod service;
