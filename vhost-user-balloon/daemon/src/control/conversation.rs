// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Answers to control clients, at once or when the guest has answered.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use balloon_protocol::{PAGE_SIZE, QueueKind};
use serde_json::json;

use super::request::{MAX_TIMEOUT, Request};
use super::status::status;
use crate::device::{Device, NoReport};
use crate::service::{Client, Owed};
use crate::state::{State, StateFile};

/// How long a guest has to answer a question about its memory.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
const NO_ANSWER: &str =
    "cannot read statistics: the guest has not answered within 5 seconds; ask again later";
const NO_STATISTICS: &str =
    "cannot read statistics: no driver with a queue for them has started; see the status";
const OTHER_FLUSH: &str =
    "cannot flush: another client's flush runs; wait for its end, or end it by a target";

/// What clients are answered from, beside the device.
#[derive(Debug)]
pub struct Operator {
    /// Where commands are kept for the next device.
    pub state: Option<StateFile>,
    /// What that file has, or would have if each command could be saved.
    pub commanded: State,
    /// How the process is confined.
    pub sandbox: String,
}

impl Default for Operator {
    fn default() -> Self {
        Self { state: None, commanded: State::default(), sandbox: "none".to_owned() }
    }
}

/// Answer what a client has asked, and what it waits for: one request at most, then others get
/// their turn.
pub fn converse(device: &mut Device, operator: &mut Operator, client: &mut Client) {
    if let Some(line) = client.line() {
        answer(device, operator, client, &line);
    }
    let reply = match client.owed {
        None => None,
        Some(Owed::Statistics { asked, until }) => statistics(device, asked, until),
        Some(Owed::Report { number, seconds, until }) => reported(device, number, seconds, until),
    };
    if let Some(reply) = reply {
        client.owed = None;
        client.answer(&reply);
    }
}

/// Note what a request commands for the next device. `false`: nothing.
fn note(commanded: &mut State, request: &Request) -> bool {
    match request {
        Request::Target { bytes: Some(bytes) } => commanded.target = Some(*bytes),
        Request::Discard { enabled } => commanded.discard = Some(*enabled),
        _ => return false,
    }
    true
}

fn answer(device: &mut Device, operator: &mut Operator, client: &mut Client, line: &[u8]) {
    let request = match serde_json::from_slice::<Request>(line) {
        Ok(request) => request,
        Err(error) => {
            return client.answer(&refused(format_args!(
                "cannot read the request: {error}; one is like {{\"command\":\"status\"}}"
            )));
        }
    };
    let changes = note(&mut operator.commanded, &request);
    let reply = match request {
        Request::Status => status(device, &operator.sandbox).to_string(),
        Request::Target { bytes } => {
            if let Some(bytes) = bytes {
                device.set_target(bytes);
            }
            sizes(device)
        }
        Request::Flush { bytes } => match device.set_flush(client.peer(), bytes) {
            true => sizes(device),
            false => refused(OTHER_FLUSH),
        },
        Request::Stats if device.queues.index(QueueKind::Stats).is_none() => refused(NO_STATISTICS),
        Request::Stats => {
            // If it is being asked already, that answer will do.
            device.ask_for_statistics();
            let asked = Instant::now();
            let until = asked.checked_add(ANSWER_WITHIN).unwrap_or(asked);
            client.owed = Some(Owed::Statistics { asked, until });
            return;
        }
        Request::Report { timeout } if !(1..=MAX_TIMEOUT).contains(&timeout) => refused(format_args!(
            "cannot wait {timeout} seconds for a report: a time-out is 1 to {MAX_TIMEOUT} seconds; give another one"
        )),
        Request::Report { timeout } => match device.command_report() {
            Ok(number) => {
                let now = Instant::now();
                let until = now.checked_add(Duration::from_secs(timeout)).unwrap_or(now);
                client.owed = Some(Owed::Report { number, seconds: timeout, until });
                return;
            }
            Err(why) => no_report(why),
        },
        Request::Discard { enabled } => {
            device.set_inhibited(!enabled);
            json!({ "ok": true, "enabled": enabled }).to_string()
        }
    };
    let file = operator.state.as_ref().filter(|_| changes);
    let saved = file.map_or(Ok(()), |file| file.save(Some(operator.commanded)));
    client.answer(&saved.map_or_else(|error| refused(format_args!("done, but {error}")), |()| reply));
}

fn sizes(device: &Device) -> String {
    let target = u64::from(device.config.num_pages).saturating_mul(PAGE_SIZE);
    json!({ "ok": true, "target": target, "actual": device.actual() }).to_string()
}

fn statistics(device: &Device, asked: Instant, until: Instant) -> Option<String> {
    if let Some((statistics, _)) = device.statistics.as_ref().filter(|(_, at)| *at > asked) {
        let entries: BTreeMap<&str, u64> = statistics.entries().collect();
        return Some(json!({ "ok": true, "stats": entries }).to_string());
    }
    (Instant::now() >= until).then(|| refused(NO_ANSWER))
}

/// The outcome of a command to report, if there is one by now.
fn reported(device: &Device, number: u32, seconds: u64, until: Instant) -> Option<String> {
    let late = || (Instant::now() >= until).then_some(Err(NoReport::Timeout(seconds)));
    Some(match device.report_now.outcome(number).or_else(late)? {
        Ok(done) => json!({
            "ok": true, "reported": done.bytes, "discarded": done.discarded, "zero": done.zero,
            "milliseconds": u64::try_from(done.took.as_millis()).unwrap_or(u64::MAX),
        })
        .to_string(),
        Err(why) => no_report(why),
    })
}

fn no_report(why: NoReport) -> String {
    let error = format!("cannot have free memory reported: {why}");
    json!({ "ok": false, "error": error, "reason": why.label(), "retry": why.is_temporary() }).to_string()
}

fn refused(why: impl std::fmt::Display) -> String {
    json!({ "ok": false, "error": why.to_string() }).to_string()
}
