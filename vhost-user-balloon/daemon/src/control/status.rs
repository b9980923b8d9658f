// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The answer to `status`.

use balloon_discard::{Backing, Reason, Region};
use balloon_protocol::{Features, PAGE_SIZE, QueueKind, QueueMap};
use serde_json::{Value, json};

use crate::device::{Device, FEATURES};

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
            "backing": region.backing().map(Backing::label), "host_page": region.host_page(),
            "promise": promise(region),
        })
    };
    let counted = &device.metrics;
    let obstacle = device.report_obstacle();
    let report = json!({
        "possible": obstacle.is_none(), "running": device.report_now.is_running(),
        "why_not": obstacle.map(|why| why.to_string()),
    });
    json!({
        "ok": true, "working": working, "problems": problems, "features": features, "queues": queues,
        "regions": device.memory.regions.iter().map(region).collect::<Vec<_>>(),
        "target": u64::from(device.config.num_pages).saturating_mul(PAGE_SIZE),
        "actual": device.actual(), "held": device.memory.held(),
        "inflated": counted.received.get(QueueKind::Inflate.label()),
        "reported": counted.received.get(QueueKind::Reporting.label()),
        "discarded": counted.discarded.sum(), "proven_zero": counted.proven.sum(),
        "report": report,
        "skipped": counted.skipped.non_zero(), "unproven": counted.unproven.non_zero(),
        "malformed": counted.malformed.get(), "refused": counted.refused.get(), "sandbox": sandbox,
    })
}

/// What keeps memory from coming back, and claims from being made.
fn problems(device: &Device) -> (bool, Vec<String>) {
    if device.memory.regions.total() == 0 {
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
    if device.is_inhibited() {
        found.push("giving memory back is suspended (subcommand discard, or --discard off)".to_owned());
    }
    if device.is_suspended() && !device.is_inhibited() {
        found.push("giving memory back is suspended while the front end logs writes".to_owned());
    }
    let poison = device.features.contains(Features::PAGE_POISON) && device.config.poison_val != 0;
    if poison {
        found.push(format!("the guest poisons free pages with {:#x}", device.config.poison_val));
    }
    let mut any = false;
    for region in device.memory.regions.iter() {
        match region.promise() {
            Ok(_) => any = true,
            Err(Reason::NotKnownShared) if region.has_name() => found.push(format!(
                "memory at {:#x} is not given back: its file has a name, so that others may use it \
                 (--memory-is-shared states that it is shared)",
                region.guest().start()
            )),
            // It may still be seen, with the driver's first buffer.
            Err(Reason::NotKnownShared) if device.metrics.requests.sum() == 0 => any = true,
            Err(Reason::NotKnownShared) => found.push(format!(
                "memory at {:#x} is not given back: the guest was not seen to write to its file, which may be \
                 mapped privately (--memory-is-shared states that it is shared)",
                region.guest().start()
            )),
            Err(reason) => found.push(format!(
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

/// What the memory of a region reads as when it was discarded.
fn promise(region: &Region) -> String {
    match region.promise() {
        Ok(backing) => format!("zero ({})", backing.label()),
        Err(reason) => format!("not claimed to be zero ({})", reason.label()),
    }
}
