// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control protocol: a JSON object in each line, both ways.
//!
//! | request | answer |
//! |---|---|
//! | `{"command":"status"}` | everything, see [`status`] |
//! | `{"command":"target"}` | `{"ok":true,"target":BYTES,"actual":BYTES}` |
//! | `{"command":"target","bytes":N}` | the same, once the new target is set |
//! | `{"command":"stats"}` | `{"ok":true,"stats":{…}}` when the guest has answered, at most 5 seconds later |
//! | `{"command":"discard","enabled":BOOL}` | `{"ok":true,"enabled":BOOL}` |
//!
//! Where something does not work the answer is `{"ok":false,"error":"…"}`.

use std::collections::BTreeMap;

use balloon_discard::Region;
use balloon_protocol::{Claim, Features, PAGE_SIZE, QueueKind, QueueMap, Reason, Statistics};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::device::{Device, FEATURES};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "lowercase", deny_unknown_fields)]
pub enum Request {
    Status,
    Target {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
    },
    Stats,
    Discard {
        enabled: bool,
    },
}

/// How a device is. Sizes are in bytes.
pub fn status(device: &Device, sandbox: &str) -> Value {
    let (working, problems) = problems(device);
    let features: Vec<&str> =
        FEATURES.iter().filter(|(bit, _)| device.features.contains(*bit)).map(|(_, name)| *name).collect();
    let queues: Vec<Value> = (0..QueueMap::MAX)
        .filter_map(|index| Some((device.queues.kind(index)?, device.ring(index)?)))
        .map(|(kind, ring)| json!({ "queue": kind.label(), "state": ring.state() }))
        .collect();
    let region = |region: &Region| {
        json!({
            "address": region.guest().start(), "bytes": region.guest().length(),
            "backing": region.backing().label(), "host_page": region.host_page(),
            "promise": region.promise().to_string(),
        })
    };
    let counted = &device.metrics;
    json!({
        "ok": true, "working": working, "problems": problems, "features": features, "queues": queues,
        "regions": device.memory.regions().map(region).collect::<Vec<_>>(),
        "target": u64::from(device.config.num_pages).saturating_mul(PAGE_SIZE),
        "actual": device.actual(), "held": device.memory.held(),
        "inflated": counted.received.get(QueueKind::Inflate.label()),
        "reported": counted.received.get(QueueKind::Reporting.label()),
        "discarded": counted.discarded.sum(), "proven_zero": counted.proven.sum(),
        "skipped": counted.skipped.non_zero(), "unproven": counted.unproven.non_zero(),
        "malformed": counted.malformed.get(), "refused": counted.refused.get(), "sandbox": sandbox,
    })
}

/// What keeps memory from coming back, and claims from being made.
fn problems(device: &Device) -> (bool, Vec<String>) {
    if device.memory.total() == 0 {
        return (false, vec!["no front end is connected".to_owned()]);
    }
    let mut found = Vec::new();
    let running =
        |index: Option<usize>| index.and_then(|i| device.ring(i)).is_some_and(|ring| ring.is_running());
    let queues = device.queues;
    let inflating = running(queues.index(QueueKind::Inflate));
    let reporting = running(queues.index(QueueKind::Reporting));
    if !inflating && !reporting {
        found.push("the guest's driver has not started (or has stopped)".to_owned());
    } else if !device.features.contains(Features::REPORTING) {
        found.push("the driver does not report free pages: only inflating gives memory back".to_owned());
    } else if !reporting {
        found.push("the reporting queue does not run".to_owned());
    }
    let broken = (0..QueueMap::MAX).filter_map(|i| device.ring(i)).filter(|ring| ring.is_broken()).count();
    if broken != 0 {
        found.push(format!("{broken} queue(s) made no sense and are no longer looked at"));
    }
    if device.inhibited {
        found.push("giving memory back is suspended (subcommand discard, or --discard off)".to_owned());
    }
    if device.is_suspended() && !device.inhibited {
        found.push("giving memory back is suspended while the front end logs writes".to_owned());
    }
    let poison = device.features.contains(Features::PAGE_POISON) && device.config.poison_val != 0;
    if poison {
        found.push(format!("the guest poisons free pages with {:#x}", device.config.poison_val));
    }
    let mut any = false;
    for region in device.memory.regions() {
        match region.promise() {
            Claim::Proven(_) => any = true,
            Claim::Unproven(Reason::NotKnownShared) if region.has_name() => found.push(format!(
                "memory at {:#x} is not given back: its file has a name, so that others may use it \
                 (--memory-is-shared states that it is shared)",
                region.guest().start()
            )),
            // It may still be seen, with the driver's first buffer.
            Claim::Unproven(Reason::NotKnownShared) if device.metrics.requests.sum() == 0 => any = true,
            Claim::Unproven(Reason::NotKnownShared) => found.push(format!(
                "memory at {:#x} is not given back: the guest was not seen to write to its file, which may be \
                 mapped privately (--memory-is-shared states that it is shared)",
                region.guest().start()
            )),
            Claim::Unproven(reason) => found.push(format!(
                "memory at {:#x} is never given back ({})",
                region.guest().start(),
                reason.label()
            )),
        }
    }
    let works = (inflating || (reporting && !poison)) && any && !device.is_suspended();
    if works && reporting && !device.features.contains(Features::DEVICE_INIT_REPORTED) {
        found.push("the driver does not know bit 6: it zeroes reported memory again".to_owned());
    }
    (works, found)
}

pub fn statistics(statistics: &Statistics) -> BTreeMap<&'static str, u64> {
    statistics.entries().collect()
}

pub fn error(why: impl std::fmt::Display) -> String {
    json!({ "ok": false, "error": why.to_string() }).to_string()
}
