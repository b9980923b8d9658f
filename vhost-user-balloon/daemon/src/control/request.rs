// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a control client asks.

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    Status,
    Target {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    /// A target for as long as the client is connected, or none any more.
    Flush {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    Stats,
    Report {
        /// Seconds to wait for the guest.
        #[serde(default = "default_timeout")]
        timeout: u64,
    },
    Discard {
        enabled: bool,
    },
}

/// The longest that a client can wait for the guest, in seconds.
pub const MAX_TIMEOUT: u64 = 3600;

fn default_timeout() -> u64 {
    10
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_ten_seconds() {
        let request: Request = serde_json::from_str(r#"{"command":"report"}"#).unwrap();
        assert_eq!(request, Request::Report { timeout: 10 });
    }
}
