// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommands: what a person asks of a running device.

use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::Value;
use thiserror::Error;

use crate::cli::{Command, Switch, Where};
use crate::control::{Request, Status};

const MIB: u64 = 1 << 20;

/// Why a subcommand did not do what it should.
#[derive(Debug, Error)]
pub enum ClientError {
    #[error("cannot talk to a device at {path}: {source}")]
    Connect { path: PathBuf, source: io::Error },
    #[error("the device answers with what is no answer: {0}")]
    Answer(String),
    #[error("{0}")]
    Refused(String),
    #[error("the balloon has {actual} bytes after {seconds} s, not {target}")]
    Late { actual: u64, target: u64, seconds: u64 },
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
                Err(ClientError::Refused(why.to_owned()))
            }
            None => Err(ClientError::Answer(answer)),
        }
    }

    fn sizes(&mut self, target: Option<u64>) -> Result<(u64, u64), ClientError> {
        let value = self.ask(&Request::Target { bytes: target })?;
        let number = |name| value.get(name).and_then(Value::as_u64);
        number("target").zip(number("actual")).ok_or_else(|| ClientError::Answer(value.to_string()))
    }

    /// Wait until the balloon has its size, or has stopped changing for a while.
    fn follow(&mut self, target: u64, limit: Duration) -> Result<u64, ClientError> {
        let began = Instant::now();
        loop {
            let (_, actual) = self.sizes(None)?;
            if actual == target || began.elapsed() > limit {
                return Ok(actual);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Do what a subcommand says, and return what to print.
pub fn run(command: &Command) -> Result<String, ClientError> {
    match command {
        Command::Status(to) => {
            let value = Connection::open(to)?.ask(&Request::Status)?;
            if to.json {
                return Ok(value.to_string());
            }
            let status: Status =
                serde_json::from_value(value).map_err(|error| ClientError::Answer(error.to_string()))?;
            Ok(screen(&status))
        }
        Command::Target { to, size, wait } => {
            let mut connection = Connection::open(to)?;
            let (target, mut actual) = connection.sizes(*size)?;
            if let Some(seconds) = wait {
                actual = connection.follow(target, Duration::from_secs(seconds.get()))?;
                if actual != target {
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
            let mut text = String::new();
            for (name, number) in stats.as_object().into_iter().flatten() {
                let _ = writeln!(text, "{name:<20} {number}");
            }
            Ok(text.trim_end().to_owned())
        }
        Command::Flush { to, leave, timeout } => flush(to, *leave, timeout.get()),
        Command::Discard { to, state } => {
            let enabled = *state == Switch::On;
            Connection::open(to)?.ask(&Request::Discard { enabled })?;
            Ok(if enabled { "memory is given back" } else { "memory is kept" }.to_owned())
        }
        // It never gets here: the program becomes the VMM.
        Command::Run { .. } => Ok(String::new()),
        Command::Metrics(to) => {
            let value = Connection::open(to)?.ask(&Request::Metrics)?;
            Ok(value.get("text").and_then(Value::as_str).unwrap_or_default().trim_end().to_owned())
        }
    }
}

fn flush(to: &Where, leave: u64, seconds: u64) -> Result<String, ClientError> {
    let mut connection = Connection::open(to)?;
    let discarded = |connection: &mut Connection| -> Result<u64, ClientError> {
        let value = connection.ask(&Request::Status)?;
        value.get("discarded").and_then(Value::as_u64).ok_or_else(|| ClientError::Answer(value.to_string()))
    };
    let before = discarded(&mut connection)?;
    let value = connection.ask(&Request::Stats)?;
    let free = value.get("stats").and_then(|stats| stats.get("free_memory")).and_then(Value::as_u64);
    let free =
        free.ok_or_else(|| ClientError::Refused("the guest does not tell its free memory".to_owned()))?;
    let (target, actual) = connection.sizes(None)?;
    let spare = free.saturating_sub(leave) / 4096 * 4096;
    let limit = Duration::from_secs(seconds);
    let (wanted, _) = connection.sizes(Some(actual.saturating_add(spare)))?;
    let reached = connection.follow(wanted, limit);
    // Whatever happened, the guest gets its memory again.
    let (back, _) = connection.sizes(Some(target))?;
    let reached = reached?;
    let actual = connection.follow(back, limit)?;
    if actual != back {
        return Err(ClientError::Late { actual, target: back, seconds });
    }
    let bytes = discarded(&mut connection)?.saturating_sub(before);
    Ok(if to.json {
        serde_json::json!({ "free": free, "inflated_to": reached, "discarded": bytes }).to_string()
    } else {
        format!("{} MiB were free; {} MiB went back to the host", free / MIB, bytes / MIB)
    })
}

fn screen(status: &Status) -> String {
    let mut text = String::new();
    let mebi = |bytes: u64| format!("{:.1} MiB", bytes_as_mebi(bytes));
    let _ = writeln!(text, "{}", if status.working { "It works." } else { "It does not work." });
    for problem in &status.problems {
        let _ = writeln!(text, "  - {problem}");
    }
    let _ = writeln!(text, "balloon    target {}, actual {}", mebi(status.target), mebi(status.actual));
    let _ =
        writeln!(text, "taken in   {} inflated, {} reported", mebi(status.inflated), mebi(status.reported));
    let _ = writeln!(
        text,
        "given back {}, {} of it proven zero",
        mebi(status.discarded),
        mebi(status.proven_zero)
    );
    for (what, reasons) in [("skipped", &status.skipped), ("unproven", &status.unproven)] {
        for (reason, bytes) in reasons {
            let _ = writeln!(text, "{what:<10} {} ({reason})", mebi(*bytes));
        }
    }
    let _ = writeln!(text, "features   {}", status.features.join(" "));
    let queues: Vec<String> = status.queues.iter().map(|q| format!("{} {}", q.queue, q.state)).collect();
    let _ = writeln!(text, "queues     {}", queues.join(", "));
    for region in &status.regions {
        let _ = writeln!(
            text,
            "memory     {:#x}: {} on {}, pages of {} KiB, {}",
            region.address,
            mebi(region.bytes),
            region.backing,
            region.host_page / 1024,
            region.promise
        );
    }
    let _ = writeln!(text, "nonsense   {} buffers or rings, {} requests", status.malformed, status.refused);
    let _ = write!(text, "sandbox    {}", status.sandbox);
    text
}

#[allow(clippy::cast_precision_loss)]
fn bytes_as_mebi(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}
