// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The loop that serves one front end at a time, and the local clients.

mod errors;
mod events;
mod listening;
mod serving;

pub use errors::{ServerError, Source};
pub use listening::Server;
