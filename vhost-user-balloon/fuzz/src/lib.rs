// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is fuzzed, and what to begin with.
//!
//! The daemon's own tests use both files as well: they run the seeds, and what was found once.

pub mod entry;
pub mod seeds;
