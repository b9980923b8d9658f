// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommands: what a person asks of a running device.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::Value;
use thiserror::Error;

use crate::cli::{Command, Switch, Where};
use crate::control::Request;

const MIB: u64 = 1 << 20;

#[derive(Debug, Error)]
pub enum ClientError {
    #[error("cannot talk to a device at {path}: {source}; give the --control of one that runs")]
    Connect { path: PathBuf, source: io::Error },
    #[error("cannot read the device's answer: {0}; give --control a vhost-user-balloon's control socket")]
    Answer(String),
    #[error("{0}")]
    Refused(String),
    #[error("{error}")]
    NoReport { error: String, temporary: bool },
    #[error(
        "cannot flush: the target became {now} bytes instead of {target}, by another command or another size of \
         guest memory; run flush again"
    )]
    Replaced { target: u64, now: u64 },
    #[error(
        "the balloon does not reach {target} bytes: it has {actual} after {seconds} s; see the subcommand status"
    )]
    Late { actual: u64, target: u64, seconds: u64 },
}

/// Exit status, as sysexits.h has it: this cannot work here, and it can work later.
const UNAVAILABLE: u8 = 69;
const TEMPORARY: u8 = 75;

impl ClientError {
    /// For the shell.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::NoReport { temporary: true, .. } => ExitCode::from(TEMPORARY),
            Self::NoReport { temporary: false, .. } => ExitCode::from(UNAVAILABLE),
            _ => ExitCode::FAILURE,
        }
    }
}

struct Connection {
    stream: BufReader<UnixStream>,
}

impl Connection {
    fn open(to: &Where) -> Result<Self, ClientError> {
        let failed = |source| ClientError::Connect { path: to.control.clone(), source };
        let stream = UnixStream::connect(&to.control).map_err(failed)?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    fn ask(&mut self, request: &Request) -> Result<Value, ClientError> {
        let broken = |error: &dyn std::fmt::Display| ClientError::Answer(error.to_string());
        let mut line = serde_json::to_string(request).map_err(|e| broken(&e))?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).map_err(|e| broken(&e))?;
        let mut answer = String::new();
        (&mut self.stream).take(1 << 20).read_line(&mut answer).map_err(|e| broken(&e))?;
        let value: Value = serde_json::from_str(&answer).map_err(|e| broken(&e))?;
        match value.get("ok").and_then(Value::as_bool) {
            Some(true) => Ok(value),
            Some(false) => {
                let why = value.get("error").and_then(Value::as_str).unwrap_or("it does not say why");
                let error = why.to_owned();
                Err(match value.get("retry").and_then(Value::as_bool) {
                    Some(temporary) => ClientError::NoReport { error, temporary },
                    None => ClientError::Refused(error),
                })
            }
            None => Err(ClientError::Answer(answer)),
        }
    }

    /// Wait that much longer for answers.
    fn wait_longer(&mut self, seconds: u64) -> Result<(), ClientError> {
        let limit = Duration::from_secs(seconds.saturating_add(10));
        let stream = self.stream.get_mut();
        stream.set_read_timeout(Some(limit)).map_err(|error| ClientError::Answer(error.to_string()))
    }

    /// Target and actual size, by a request that answers with both.
    fn sizes(&mut self, request: &Request) -> Result<(u64, u64), ClientError> {
        let value = self.ask(request)?;
        let number = |name| value.get(name).and_then(Value::as_u64);
        number("target").zip(number("actual")).ok_or_else(|| ClientError::Answer(value.to_string()))
    }

    /// Wait until the balloon has its size, the time is over, or the target is a reason to end.
    /// Returns both sizes.
    fn follow(
        &mut self,
        target: u64,
        limit: Duration,
        ends: impl Fn(u64) -> bool,
    ) -> Result<(u64, u64), ClientError> {
        let began = Instant::now();
        loop {
            let (now, actual) = self.sizes(&Request::Target { bytes: None })?;
            if reached(target, actual) || began.elapsed() > limit || ends(now) {
                return Ok((now, actual));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same for a target that no other command may replace meanwhile. Returns the actual size.
    fn follow_flush(&mut self, target: u64, limit: Duration) -> Result<u64, ClientError> {
        let (now, actual) = self.follow(target, limit, |now| now != target)?;
        if now == target { Ok(actual) } else { Err(ClientError::Replaced { target, now }) }
    }
}

/// Whether a guest has followed. One with larger pages than 4 KiB rounds the target up to a whole one of them.
fn reached(target: u64, actual: u64) -> bool {
    [12, 13, 14, 15, 16].iter().any(|shift| target.checked_next_multiple_of(1 << shift) == Some(actual))
}

/// Run a subcommand; returns the text to print.
pub fn run(command: &Command) -> Result<String, ClientError> {
    match command {
        Command::Status(to) => {
            let value = Connection::open(to)?.ask(&Request::Status)?;
            Ok(if to.json { value.to_string() } else { screen(&value) })
        }
        Command::Target { to, size, wait } => {
            let mut connection = Connection::open(to)?;
            let (target, mut actual) = connection.sizes(&Request::Target { bytes: *size })?;
            if let Some(seconds) = wait {
                (_, actual) = connection.follow(target, Duration::from_secs(seconds.get()), |_| false)?;
                if !reached(target, actual) {
                    return Err(ClientError::Late { actual, target, seconds: seconds.get() });
                }
            }
            Ok(if to.json {
                serde_json::json!({ "target": target, "actual": actual }).to_string()
            } else {
                format!("target {} MiB, the guest has given {} MiB", target / MIB, actual / MIB)
            })
        }
        Command::Stats(to) => {
            let value = Connection::open(to)?.ask(&Request::Stats)?;
            let stats = value.get("stats").cloned().unwrap_or_default();
            if to.json {
                return Ok(stats.to_string());
            }
            let lines = stats.as_object().into_iter().flatten();
            let lines: Vec<String> = lines.map(|(name, number)| format!("{name:<20} {number}")).collect();
            Ok(lines.join("\n"))
        }
        Command::Flush { to, leave, timeout } => flush(to, *leave, timeout.get()),
        Command::Report { to, timeout } => report(to, *timeout),
        Command::Discard { to, state } => {
            let enabled = *state == Switch::On;
            Connection::open(to)?.ask(&Request::Discard { enabled })?;
            Ok(if enabled { "memory is given back" } else { "memory is kept" }.to_owned())
        }
        // It never gets here: the program becomes the VMM.
        Command::Run { .. } => Ok(String::new()),
    }
}

fn report(to: &Where, timeout: u64) -> Result<String, ClientError> {
    let mut connection = Connection::open(to)?;
    connection.wait_longer(timeout)?;
    let value = connection.ask(&Request::Report { timeout })?;
    let number = |name| value.get(name).and_then(Value::as_u64);
    let numbers = (number("reported"), number("discarded"), number("milliseconds"));
    let (Some(bytes), Some(discarded), Some(time)) = numbers else {
        return Err(ClientError::Answer(value.to_string()));
    };
    if to.json {
        let zero = number("zero");
        let result = serde_json::json!({
            "reported": bytes, "discarded": discarded, "zero": zero, "milliseconds": time,
        });
        return Ok(result.to_string());
    }
    let zero = match number("zero") {
        Some(zero) => format!("{} MiB of it returned as zero", zero / MIB),
        None => "the guest does not accept answers about zeros".to_owned(),
    };
    let (reported, discarded) = (bytes / MIB, discarded / MIB);
    Ok(format!("{reported} MiB were reported in {time} ms; {discarded} MiB were discarded; {zero}"))
}

fn flush(to: &Where, leave: u64, seconds: u64) -> Result<String, ClientError> {
    let mut connection = Connection::open(to)?;
    // What the guest reports or inflates twice is counted twice; what the host has for the guest is not.
    let held = |connection: &mut Connection| -> Result<u64, ClientError> {
        let value = connection.ask(&Request::Status)?;
        value.get("held").and_then(Value::as_u64).ok_or_else(|| ClientError::Answer(value.to_string()))
    };
    let before = held(&mut connection)?;
    let value = connection.ask(&Request::Stats)?;
    let free = value.get("stats").and_then(|stats| stats.get("free_memory")).and_then(Value::as_u64);
    let free = free.ok_or_else(|| {
        ClientError::Refused(
            "cannot flush: the guest has no statistic of its free memory; use target".to_owned(),
        )
    })?;
    let (_, actual) = connection.sizes(&Request::Target { bytes: None })?;
    let spare = free.saturating_sub(leave) / 4096 * 4096;
    let limit = Duration::from_secs(seconds);
    // However this process ends: the device returns to its own target when the connection ends.
    let bytes = Some(actual.saturating_add(spare));
    let (wanted, _) = connection.sizes(&Request::Flush { bytes })?;
    let inflated = connection.follow_flush(wanted, limit)?;
    let (back, _) = connection.sizes(&Request::Flush { bytes: None })?;
    let actual = connection.follow_flush(back, limit)?;
    if !reached(back, actual) {
        return Err(ClientError::Late { actual, target: back, seconds });
    }
    let bytes = before.saturating_sub(held(&mut connection)?);
    Ok(if to.json {
        serde_json::json!({ "free": free, "inflated_to": inflated, "discarded": bytes }).to_string()
    } else {
        format!("{} MiB were free; {} MiB went back to the host", free / MIB, bytes / MIB)
    })
}

fn screen(status: &Value) -> String {
    let of = |name: &str| status.get(name).unwrap_or(&Value::Null);
    let text = |value: &Value, name: &str| match value.get(name) {
        Some(Value::String(text)) => text.clone(),
        other => other.map(Value::to_string).unwrap_or_default(),
    };
    let list = |name: &str| of(name).as_array().into_iter().flatten();
    let mebi = |value: &Value| format!("{:.1} MiB", value.as_f64().unwrap_or(0.0) / 1_048_576.0);
    let size = |name: &str| mebi(of(name));
    let working = of("working") == true;
    let mut lines = vec![if working { "It works." } else { "It does not work." }.to_owned()];
    lines.extend(list("problems").filter_map(Value::as_str).map(|problem| format!("  - {problem}")));
    lines.push(format!("balloon    target {}, actual {}", size("target"), size("actual")));
    lines.push(format!("host holds {} for the guest", size("held")));
    lines.push(format!("taken in   {} inflated, {} reported", size("inflated"), size("reported")));
    let (discarded, zero) = (size("discarded"), size("proven_zero"));
    lines.push(format!("discarded  {discarded}, {zero} of it proven zero"));
    for what in ["skipped", "unproven"] {
        for (reason, bytes) in of(what).as_object().into_iter().flatten() {
            lines.push(format!("{what:<10} {} ({reason})", mebi(bytes)));
        }
    }
    let features: Vec<&str> = list("features").filter_map(Value::as_str).collect();
    lines.push(format!("features   {}", features.join(" ")));
    let queues: Vec<String> =
        list("queues").map(|queue| format!("{} {}", text(queue, "queue"), text(queue, "state"))).collect();
    lines.push(format!("queues     {}", queues.join(", ")));
    for region in list("regions") {
        let number = |name: &str| region.get(name).and_then(Value::as_u64).unwrap_or(0);
        let bytes = mebi(region.get("bytes").unwrap_or(&Value::Null));
        let (page, backing) = (number("host_page") / 1024, text(region, "backing"));
        let (address, promise) = (number("address"), text(region, "promise"));
        lines.push(format!("memory     {address:#x}: {bytes} on {backing}, pages of {page} KiB, {promise}"));
    }
    let report = of("report");
    lines.push(match report.get("why_not").and_then(Value::as_str) {
        Some(why) => format!("report     not possible: {why}"),
        None if report.get("running") == Some(&Value::Bool(true)) => "report     runs".to_owned(),
        None => "report     possible".to_owned(),
    });
    let refused = text(status, "refused");
    lines.push(format!(
        "malformed  {} buffers or rings, {refused} requests refused",
        text(status, "malformed")
    ));
    lines.push(format!("sandbox    {}", text(status, "sandbox")));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_with_large_pages_round_up() {
        let target = 102_404 << 10;
        assert!(reached(target, target));
        assert!(reached(target, 104_923_136), "64 KiB");
        assert!(reached(target, target.next_multiple_of(1 << 14)), "16 KiB");
        assert!(!reached(target, target - 4096), "not yet");
        assert!(!reached(target, 104_923_136 + (64 << 10)), "deflating");
        assert!(reached(0, 0) && !reached(u64::MAX, 0));
    }
}
