// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Examples and properties of what the crate offers.

#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

mod bitmap;
mod config;
mod features;
mod pageset;
mod pfn;
mod range;
mod stats;
