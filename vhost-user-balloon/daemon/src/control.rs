// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control protocol: a JSON object in each line, both ways.
//!
//! | request | answer |
//! |---|---|
//! | `{"command":"status"}` | everything, see [`Status`] |
//! | `{"command":"target"}` | `{"ok":true,"target":BYTES,"actual":BYTES}` |
//! | `{"command":"target","bytes":N}` | the same, once the new target is set |
//! | `{"command":"stats"}` | `{"ok":true,"stats":{…}}` when the guest has answered, at most 5 seconds later |
//! | `{"command":"discard","enabled":BOOL}` | `{"ok":true,"enabled":BOOL}` |
//! | `{"command":"metrics"}` | `{"ok":true,"text":"…"}` |
//!
//! Where something does not work the answer is `{"ok":false,"error":"…"}`.

use std::collections::BTreeMap;

use balloon_protocol::{Claim, Features, QueueMap, Reason, Statistics};
use serde::{Deserialize, Serialize};

use crate::device::Device;

/// What can be asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    /// How it is.
    Status,
    /// Show or set the size the balloon shall have.
    Target {
        /// The new size.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    /// Ask the guest about its memory.
    Stats,
    /// Suspend discarding or go on.
    Discard {
        /// Whether to discard.
        enabled: bool,
    },
    /// Everything that is counted.
    Metrics,
}

/// A queue, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStatus {
    /// What it is for.
    pub queue: String,
    /// `running`, `stopped`, `disabled` or `broken`.
    pub state: String,
}

/// A region of guest memory, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionStatus {
    /// Where it begins in the guest.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
    /// What is behind it.
    pub backing: String,
    /// The unit in which it can be discarded.
    pub host_page: u64,
    /// What discarded parts of it read as.
    pub promise: String,
}

/// How it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Always true.
    pub ok: bool,
    /// Whether guest memory comes back to the host.
    pub working: bool,
    /// What stands in the way of that, or of claims about zeros.
    pub problems: Vec<String>,
    /// Features the driver has accepted.
    pub features: Vec<String>,
    /// The queues.
    pub queues: Vec<QueueStatus>,
    /// The memory.
    pub regions: Vec<RegionStatus>,
    /// The size the balloon shall have.
    pub target: u64,
    /// The size the driver says it has.
    pub actual: u64,
    /// Bytes that were put into the balloon.
    pub inflated: u64,
    /// Bytes that were reported as free.
    pub reported: u64,
    /// Bytes that went back to the host.
    pub discarded: u64,
    /// Bytes the driver was told read as zero.
    pub proven_zero: u64,
    /// Bytes that did not go back, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Bytes that went back and are not said to be zero, by reason.
    pub unproven: BTreeMap<String, u64>,
    /// Buffers and rings that made no sense.
    pub malformed: u64,
    /// Requests of the front end that were refused.
    pub refused: u64,
    /// How the process is confined.
    pub sandbox: String,
}

const NAMES: [(Features, &str); 7] = [
    (Features::MUST_TELL_HOST, "must-tell-host"),
    (Features::STATS_VQ, "stats"),
    (Features::DEFLATE_ON_OOM, "deflate-on-oom"),
    (Features::PAGE_POISON, "page-poison"),
    (Features::REPORTING, "free-page-reporting"),
    (Features::DEVICE_INIT_REPORTED, "device-init-reported"),
    (Features::DEVICE_INIT_ON_INFLATE, "device-init-on-inflate"),
];

impl Status {
    /// Look at a device.
    pub fn of(device: &Device, connected: bool, sandbox: &str) -> Self {
        let totals = device.metrics().totals();
        let owned =
            |list: Vec<(&'static str, u64)>| list.into_iter().map(|(n, v)| (n.to_owned(), v)).collect();
        let (working, problems) = problems(device, connected);
        Self {
            ok: true,
            working,
            problems,
            features: NAMES
                .iter()
                .filter(|(feature, _)| device.features().contains(*feature))
                .map(|(_, name)| (*name).to_owned())
                .collect(),
            queues: (0..QueueMap::MAX)
                .filter_map(|index| Some((device.queues().kind(index)?, device.ring(index)?)))
                .map(|(kind, ring)| QueueStatus {
                    queue: kind.label().to_owned(),
                    state: match (ring.is_broken(), ring.is_started(), ring.is_enabled()) {
                        (true, _, _) => "broken",
                        (_, false, _) => "stopped",
                        (_, _, false) => "disabled",
                        _ => "running",
                    }
                    .to_owned(),
                })
                .collect(),
            regions: device
                .memory()
                .regions()
                .map(|region| RegionStatus {
                    address: region.guest().start(),
                    bytes: region.guest().length(),
                    backing: region.backing().label().to_owned(),
                    host_page: region.host_page(),
                    promise: region.promise().to_string(),
                })
                .collect(),
            target: u64::from(device.config().num_pages).saturating_mul(balloon_protocol::PAGE_SIZE),
            actual: device.actual(),
            inflated: totals.inflated,
            reported: totals.reported,
            discarded: totals.discarded,
            proven_zero: totals.proven,
            skipped: owned(totals.skipped),
            unproven: owned(totals.unproven),
            malformed: totals.malformed,
            refused: totals.refused,
            sandbox: sandbox.to_owned(),
        }
    }
}

/// What keeps memory from coming back, and claims from being made.
fn problems(device: &Device, connected: bool) -> (bool, Vec<String>) {
    if !connected {
        return (false, vec!["no front end is connected".to_owned()]);
    }
    let mut found = Vec::new();
    let running =
        |index: Option<usize>| index.and_then(|i| device.ring(i)).is_some_and(|ring| ring.is_running());
    let queues = device.queues();
    let inflating = running(queues.index(balloon_protocol::QueueKind::Inflate));
    let reporting = running(queues.index(balloon_protocol::QueueKind::Reporting));
    if !inflating && !reporting {
        found.push("the guest's driver has not started (or has stopped)".to_owned());
    } else if !device.features().contains(Features::REPORTING) {
        found.push("the driver does not report free pages: only inflating gives memory back".to_owned());
    } else if !reporting {
        found.push("the reporting queue does not run".to_owned());
    }
    let broken = (0..QueueMap::MAX).filter_map(|i| device.ring(i)).filter(|ring| ring.is_broken()).count();
    if broken != 0 {
        found.push(format!("{broken} queue(s) made no sense and are no longer looked at"));
    }
    if device.is_inhibited() {
        found.push("giving memory back is suspended (subcommand discard, or --discard off)".to_owned());
    }
    let poison = device.features().contains(Features::PAGE_POISON) && device.config().poison_val != 0;
    if poison {
        found.push(format!("the guest poisons free pages with {:#x}", device.config().poison_val));
    }
    let mut any = false;
    for region in device.memory().regions() {
        let left_alone = region.has_name() && !region.known_shared();
        any |= !left_alone && region.promise() != Claim::Unproven(Reason::Aliased);
        if left_alone {
            found.push(format!(
                "memory at {:#x} is neither given back nor said to be zero: its file has a name, so that \
                 others may use it (--memory-is-shared vouches for it)",
                region.guest().start()
            ));
        } else if let Claim::Unproven(reason) = region.promise() {
            found.push(format!(
                "memory at {:#x} is never said to be zero ({})",
                region.guest().start(),
                reason.label()
            ));
        }
    }
    let works = (inflating || (reporting && !poison)) && any && !device.is_inhibited();
    if works && reporting && !device.features().contains(Features::DEVICE_INIT_REPORTED) {
        found.push("the driver does not know bit 6: it zeroes reported memory again".to_owned());
    }
    (works, found)
}

/// Statistics as an object.
pub fn statistics(told: &Statistics) -> BTreeMap<String, u64> {
    told.entries().map(|(name, _, value)| (name.to_owned(), value)).collect()
}

/// An answer that something does not work.
pub fn error(why: impl std::fmt::Display) -> String {
    serde_json::json!({ "ok": false, "error": why.to_string() }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let read = serde_json::from_str::<Request>;
        assert_eq!(read(r#"{"command":"status"}"#).unwrap(), Request::Status);
        assert_eq!(read(r#"{"command":"target","bytes":5}"#).unwrap(), Request::Target { bytes: Some(5) });
        assert_eq!(read(r#"{"command":"target"}"#).unwrap(), Request::Target { bytes: None });
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"command":"quit"}"#,
            r#"{"command":"target","bytes":-1}"#,
            r#"{"command":"target","byte":1}"#,
            r#"{"command":"discard"}"#,
        ] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
