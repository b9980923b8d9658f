// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's command to report all free memory now.
//!
//! The device writes a new number into the configuration. The driver reports, and writes that number back once the
//! device has answered all of it. A newer number ends an older command. Whatever the driver does, a client waits no
//! longer than it wants to.

use std::time::{Duration, Instant};

use balloon_protocol::Config;
use thiserror::Error;

/// What has come of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reported {
    pub bytes: u64,
    /// How many of them were discarded; a range that held no memory counts, too.
    pub discarded: u64,
    /// How many of them the driver was answered to be zero; only with bit 6.
    pub zero: Option<u64>,
    pub took: Duration,
}

/// Why a command has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NoReport {
    #[error("no front end is connected; start the VM")]
    NoFrontEnd,
    #[error(
        "this device does not offer feature bit 16; start it without --report-now off and --free-page-reporting off"
    )]
    NotOffered,
    #[error("the guest's driver has not started, or has stopped; wait until it runs")]
    NoDriver,
    #[error("the guest's driver has not accepted feature bit 16; use the subcommand flush")]
    NotAccepted,
    #[error("the front end reads {0} bytes of the configuration, not 24; start QEMU with config_size=24")]
    ShortConfiguration(u32),
    #[error("the front end takes no notification of a changed configuration; use another VMM")]
    NoChannel,
    #[error("discarding is suspended; use the subcommand discard on")]
    Suspended,
    #[error("discarding is suspended while the front end logs writes; try again later")]
    Logging,
    #[error("the guest has reported {0} bytes, and none went back to the host; see the subcommand status")]
    Kept(u64),
    #[error("a newer report has ended this one; wait for that one")]
    Newer,
    #[error("the guest was reset, or its driver has stopped; try again when it runs")]
    Reset,
    #[error("the guest has not answered within {0} seconds; try again with a longer --timeout")]
    Timeout(u64),
}

impl NoReport {
    /// For programs.
    pub fn label(self) -> &'static str {
        match self {
            Self::NoFrontEnd => "no-front-end",
            Self::NotOffered => "not-offered",
            Self::NoDriver => "no-driver",
            Self::NotAccepted => "not-accepted",
            Self::ShortConfiguration(_) => "short-configuration",
            Self::NoChannel => "no-channel",
            Self::Suspended => "suspended",
            Self::Logging => "logging",
            Self::Kept(_) => "kept",
            Self::Newer => "newer",
            Self::Reset => "reset",
            Self::Timeout(_) => "timeout",
        }
    }

    /// Whether the same command can succeed later, with the same guest and the same options.
    pub fn is_temporary(self) -> bool {
        !matches!(
            self,
            Self::NotOffered
                | Self::NotAccepted
                | Self::ShortConfiguration(_)
                | Self::NoChannel
                | Self::Kept(_)
        )
    }
}

/// The command that runs, and how the newest one has ended.
#[derive(Debug, Default)]
pub struct ReportNow {
    running: Option<Running>,
    ended: Option<(u32, Result<Reported, NoReport>)>,
    /// How much of the configuration the front end has asked for.
    pub seen: u32,
}

#[derive(Debug)]
struct Running {
    number: u32,
    began: Instant,
    bytes: u64,
    discarded: u64,
    zero: u64,
}

impl ReportNow {
    /// A newer command.
    pub fn begin(&mut self, config: &mut Config) -> u32 {
        let after = |number: u32| number.checked_add(1).unwrap_or(1);
        let mut number = after(config.report_now_cmd);
        if number == config.report_now_done {
            // The driver has written it by itself, and would take the command for one that is done.
            number = after(number);
        }
        config.report_now_cmd = number;
        self.running = Some(Running { number, began: Instant::now(), bytes: 0, discarded: 0, zero: 0 });
        number
    }

    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// A report was answered.
    pub fn count(&mut self, bytes: u64, discarded: u64, zero: u64) {
        if let Some(running) = &mut self.running {
            running.bytes = running.bytes.saturating_add(bytes);
            running.discarded = running.discarded.saturating_add(discarded);
            running.zero = running.zero.saturating_add(zero);
        }
    }

    /// The driver has written the configuration.
    pub fn written(&mut self, config: &Config, answers_zero: bool) {
        if let Some(running) = self.running.take_if(|running| running.number == config.report_now_done) {
            let zero = answers_zero.then_some(running.zero);
            let Running { number, began, bytes, discarded, .. } = running;
            let reported = Reported { bytes, discarded, zero, took: began.elapsed() };
            let nothing = bytes != 0 && discarded == 0;
            self.ended = Some((number, if nothing { Err(NoReport::Kept(bytes)) } else { Ok(reported) }));
        }
    }

    /// The command that runs has no result.
    pub fn fail(&mut self, why: NoReport) {
        if let Some(running) = self.running.take() {
            self.ended = Some((running.number, Err(why)));
        }
    }

    /// No command is outstanding any more.
    pub fn reset(&mut self, config: &mut Config) {
        config.report_now_done = config.report_now_cmd;
        self.fail(NoReport::Reset);
    }

    /// How this command has ended, if it has.
    pub fn outcome(&self, number: u32) -> Option<Result<Reported, NoReport>> {
        if self.running.as_ref().is_some_and(|running| running.number == number) {
            return None;
        }
        let ended = self.ended.filter(|(ended, _)| *ended == number);
        Some(ended.map_or(Err(NoReport::Newer), |(_, outcome)| outcome))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_pass_zero_and_answer_one_command() {
        let mut config = Config::default();
        config.report_now_cmd = u32::MAX - 1;
        let mut state = ReportNow::default();
        let last = state.begin(&mut config);
        assert_eq!((last, config.report_now_cmd), (u32::MAX, u32::MAX));
        let first = state.begin(&mut config);
        assert_eq!((first, config.report_now_cmd), (1, 1));
        assert_eq!((state.outcome(last), state.outcome(first)), (Some(Err(NoReport::Newer)), None));
        state.count(3 << 20, 2 << 20, 1 << 20);
        config.report_now_done = last;
        state.written(&config, true);
        assert!(state.is_running());
        config.report_now_done = first;
        state.written(&config, true);
        let done = state.outcome(first).unwrap().unwrap();
        assert_eq!((done.bytes, done.discarded, done.zero), (3 << 20, 2 << 20, Some(1 << 20)));
        // What comes later belongs to no command.
        state.count(1, 1, 1);
        state.written(&config, true);
        assert_eq!(state.outcome(first), Some(Ok(done)));
        assert_eq!(state.outcome(7), Some(Err(NoReport::Newer)));
    }

    #[test]
    fn a_number_that_is_done_is_no_command() {
        for (before, done, number) in [(0, 1, 2), (0, 2, 1), (u32::MAX, 1, 2), (u32::MAX - 1, u32::MAX, 1)] {
            let mut config = Config::default();
            (config.report_now_cmd, config.report_now_done) = (before, done);
            assert_eq!(ReportNow::default().begin(&mut config), number);
        }
    }

    #[test]
    fn a_report_of_which_the_host_got_nothing_is_none() {
        let mut config = Config::default();
        let mut state = ReportNow::default();
        for (bytes, discarded, fails) in [(0, 0, false), (2, 0, true), (2, 1, false)] {
            let number = state.begin(&mut config);
            state.count(bytes, discarded, 0);
            config.report_now_done = number;
            state.written(&config, true);
            assert_eq!(state.outcome(number).unwrap().is_err(), fails, "{bytes} {discarded}");
        }
    }

    #[test]
    fn a_reset_leaves_nothing_outstanding() {
        let mut config = Config::default();
        let mut state = ReportNow::default();
        state.reset(&mut config);
        assert_eq!(state.outcome(0), Some(Err(NoReport::Newer)));
        let number = state.begin(&mut config);
        state.reset(&mut config);
        assert_eq!(config.report_now_done, number);
        assert_eq!(state.outcome(number), Some(Err(NoReport::Reset)));
    }
}
