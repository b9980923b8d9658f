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

use proptest::prelude::ProptestConfig;

/// Miri is a thousand times slower, and has no files.
fn cases() -> ProptestConfig {
    let usual = ProptestConfig::default();
    if cfg!(miri) { ProptestConfig { cases: 2, failure_persistence: None, ..usual } } else { usual }
}
