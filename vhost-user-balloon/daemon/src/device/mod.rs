// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: what it does with what a driver puts into its queues.
//!
//! The driver is not trusted. Each address is cut to the guest's regions, each chain and list has a cap,
//! what is kept is bounded by the size of guest memory, and an invalid request gets no claim.
//!
//! Each module uses only those above it:
//!
//! | module | |
//! |---|---|
//! | `options`, `job`, `report_now` | data |
//! | `state` | what there is, and what a front end sets up |
//! | `command` | what the host commands |
//! | `writes` | rings |
//! | `chains` | what is in a chain |
//! | `pages` | which pages are in the balloon |
//! | `discard` | one piece of memory |
//! | `inflate`, `report`, `stats` | one request of a queue |
//! | `turns` | all queues |

mod chains;
mod command;
mod discard;
mod inflate;
mod job;
mod options;
mod pages;
mod report;
mod report_now;
mod state;
mod stats;
mod turns;
mod writes;

#[cfg(test)]
mod tests;

pub use options::{FEATURES, Options, TURN};
pub use report_now::{NoReport, Reported};
pub use state::{Device, LOG_ALL};
