// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtio balloon as a process of its own, for any VMM that speaks vhost-user.
//!
//! One thread serves: requests of the front end, queues, control and metrics sockets. Others wait for
//! signals, close what peers sent, write the log, and call User-Mode Linux. So no discard runs after the front end was notified that a
//! ring has stopped or that a region of memory is no longer in use. A worker
//! thread (as in `vhost-user-backend`) would need a lock around every discard for that.

// The library is for the daemon's own tests, fuzzers and manual pages.
#![allow(missing_docs)]

pub mod cli;
pub mod device;
pub mod sandbox;
pub mod server;

mod call;
mod channel;
mod charge;
mod control;
mod foreign;
mod front_end;
mod holes;
mod limit;
mod log;
#[cfg(feature = "lying")]
pub mod lying;
mod memory;
mod metrics;
mod notify;
mod ring;
mod run;
mod service;
mod signals;
mod start;
mod state;
mod subcommand;
mod threads;
mod wire;

pub use start::main;
