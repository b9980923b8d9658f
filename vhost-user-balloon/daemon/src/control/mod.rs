// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control protocol: a JSON object in each line, both ways.
//!
//! | request | answer |
//! |---|---|
//! | `{"command":"status"}` | everything, see `status.rs` |
//! | `{"command":"target"}` | `{"ok":true,"target":BYTES,"actual":BYTES}` |
//! | `{"command":"target","bytes":N}` | the same, once the new target is set |
//! | `{"command":"flush","bytes":N}` | the same: a target that is not saved, and ends with the connection, with `{"command":"flush"}` or with a new target; refused while another connection has one |
//! | `{"command":"stats"}` | `{"ok":true,"stats":{…}}` when the guest has answered, at most 5 seconds later |
//! | `{"command":"report","timeout":SECONDS}` | at the end of the pass: see [below](#report) |
//! | `{"command":"discard","enabled":BOOL}` | `{"ok":true,"enabled":BOOL}` |
//!
//! # Report
//!
//! When the guest has reported all free memory:
//! `{"ok":true,"reported":BYTES,"discarded":BYTES,"zero":BYTES,"milliseconds":N}`. `discarded`
//! counts a range that held no memory, too; `zero` is null without bit 6.
//!
//! # Errors
//!
//! Where something does not work the answer is `{"ok":false,"error":"…"}`.

mod conversation;
mod request;
mod status;

pub use conversation::{Operator, converse};
pub use request::{MAX_TIMEOUT, Request};
