// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use std::num::{NonZeroU32, NonZeroU64};
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use balloon_protocol::Features;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::control::MAX_TIMEOUT;
use crate::device::{Options, TURN};
use crate::sandbox::Seccomp;

/// A virtio memory balloon for any VMM that speaks vhost-user, and for User-Mode Linux.
///
/// Without a subcommand it is the device: it serves one front end at a time, and the next one when that
/// hangs up. It never goes into the background; SIGTERM ends it. With --fd and a connected socket it ends
/// with its front end. The subcommands talk to a running device by its control socket.
#[derive(Debug, Parser)]
#[command(name = "vhost-user-balloon", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Commands for a running device.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options of the device.
    #[command(flatten)]
    pub daemon: Daemon,
}

/// Options of the device.
#[derive(Debug, Clone, Args)]
pub struct Daemon {
    /// Listen for the front end on this unix socket
    #[arg(long, value_name = "PATH", conflicts_with = "fd")]
    pub socket_path: Option<PathBuf>,
    /// Use this descriptor: a unix socket that listens, or one that is connected to the front end
    #[arg(long, value_name = "FD")]
    pub fd: Option<RawFd>,
    /// Print what this program can do, as JSON, and end
    #[arg(long)]
    pub print_capabilities: bool,
    /// Print the options that QEMU 10.1 or later needs for a device at --socket-path, and end
    #[arg(long, requires = "socket_path")]
    pub print_qemu_args: bool,
    /// The size of the balloon at first (bytes, or with K, M, G or T)
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    pub target: u64,
    /// Listen for control requests on this unix socket
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Answer scrapes of Prometheus (HTTP GET) on this unix socket
    #[arg(long, value_name = "PATH")]
    pub metrics_socket: Option<PathBuf>,
    /// Save what `target` and `discard` set in this file, for the next device. It overrides --target, and
    /// --discard on
    #[arg(long, value_name = "PATH")]
    pub state: Option<PathBuf>,
    /// Ask the guest for statistics this often, in seconds; 0: only when a client asks
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub stats_interval: u64,
    /// Whether to offer reports of free memory (feature bit 5)
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub free_page_reporting: Switch,
    /// Whether to claim zeros for reported memory (feature bit 6). Turn it off for a VMM that
    /// serves page faults of the guest itself (userfaultfd), and for guests that use the bit otherwise
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub device_init_reported: Switch,
    /// Whether to claim zeros for inflated pages (feature bit 7)
    #[arg(long, value_name = "SWITCH", default_value = "off")]
    pub device_init_on_inflate: Switch,
    /// Whether the subcommand report can command the guest (feature bit 16, a provisional number)
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub report_now: Switch,
    /// Whether the guest may take pages back by itself when it is short of memory (feature bit 2)
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub deflate_on_oom: Switch,
    /// The front end maps all of the guest's memory shared. Without this a file without a name is only
    /// claimed to be zero once something the guest writes was seen to change in it, and a file with a name
    /// is left alone
    #[arg(long)]
    pub memory_is_shared: bool,
    /// Whether to give memory back from the start; off: not before the subcommand "discard on".
    /// For VMMs that pin guest memory, as they do to pass devices through (VFIO)
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub discard: Switch,
    /// Discard in units of this size at least (a power of two). For guest memory on a tmpfs with huge
    /// pages, 2M keeps the host from breaking them up
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = parse_unit)]
    pub discard_unit: u64,
    /// The front end is User-Mode Linux, which wants to be called by sockets; a thread of its own does that.
    /// Without this only eventfds are accepted
    #[arg(long)]
    pub user_mode_linux: bool,
    /// For tests of guests: the false answer
    #[cfg(feature = "lying")]
    #[arg(long, value_name = "WHAT")]
    pub lie: Option<crate::lying::Lie>,
    /// For tests of drivers: leave about one in so many pieces of memory alone, at random
    #[arg(long, value_name = "NUMBER", hide = true)]
    pub inhibit_one_in: Option<NonZeroU32>,
    /// The action on an unexpected system call
    #[arg(long, value_name = "ACTION", default_value = "kill")]
    pub seccomp: Seccomp,
    /// Whether to give up access to all files (where the kernel can)
    #[arg(long, value_name = "SWITCH", default_value = "on")]
    pub landlock: Switch,
    /// The least important messages to log
    #[arg(long, value_name = "LEVEL", default_value = "info", value_parser = ["error", "warn", "info", "debug", "trace"])]
    pub log_level: String,
    /// Format of log lines
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormat,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    On,
    Off,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// An object in each line
    Json,
}

/// Commands for a running device.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Show whether it works, and if not, why
    Status(Where),
    /// Show the size of the balloon, or change it
    Target {
        /// Where the device is.
        #[command(flatten)]
        to: Where,
        /// The new size (bytes, or with K, M, G or T)
        #[arg(value_parser = parse_size)]
        size: Option<u64>,
        /// Wait until the guest has followed, at most so many seconds
        #[arg(long, value_name = "SECONDS", requires = "size")]
        wait: Option<NonZeroU64>,
    },
    /// Ask the guest about its memory
    Stats(Where),
    /// Take all memory that the guest does not use, at once: inflate by what is free, then go back
    ///
    /// This needs nothing but the balloon. Where the guest has feature bit 16, report is faster and inflates
    /// nothing.
    Flush {
        /// Where the device is.
        #[command(flatten)]
        to: Where,
        /// How much free memory the guest keeps meanwhile
        #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
        leave: u64,
        /// Give up after so many seconds
        #[arg(long, value_name = "SECONDS", default_value = "60")]
        timeout: NonZeroU64,
    },
    /// Have the guest report all of its free memory now, and wait until the host has it
    ///
    /// Needs a guest whose driver has feature bit 16; flush does not. Exit status: 69 if this guest, front end or
    /// device cannot do it, 75 if the same command can succeed later.
    Report {
        /// Where the device is.
        #[command(flatten)]
        to: Where,
        /// Give up after so many seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT))]
        timeout: u64,
    },
    /// Suspend giving memory back, for example while a snapshot is taken, or go on with it
    Discard {
        /// Where the device is.
        #[command(flatten)]
        to: Where,
        /// Whether to give memory back
        state: Switch,
    },
    /// Start a device and a QEMU (10.1 or later) that has it; the device ends with QEMU
    Run {
        /// Options of the device
        #[command(flatten)]
        device: Box<Daemon>,
        /// QEMU and its options; guest memory has to be shared (share=on)
        #[arg(last = true, required = true, value_name = "COMMAND")]
        vmm: Vec<std::ffi::OsString>,
    },
}

/// Where a running device is.
#[derive(Debug, Clone, Args)]
pub struct Where {
    /// The device's control socket
    #[arg(long, value_name = "PATH", env = "VHOST_USER_BALLOON_CONTROL")]
    pub control: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// A number of bytes: digits, and K, M, G or T for powers of 1024.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let units = [('k', 10), ('m', 20), ('g', 30), ('t', 40)];
    let unit = units
        .iter()
        .find_map(|(unit, shift)| Some((text.strip_suffix([*unit, unit.to_ascii_uppercase()])?, *shift)));
    let (digits, shift) = unit.unwrap_or((text, 0));
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("a size is a number of bytes, or one with K, M, G or T behind it".to_owned());
    }
    let number: u64 = digits.parse().map_err(|_| format!("{text} is too large"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
}

/// A size that is a power of two, from 4 KiB to 1 GiB.
fn parse_unit(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size.is_power_of_two() && (4096..=1 << 30).contains(&size) => Ok(size),
        _ => Err("a unit is a power of two from 4K to 1G".to_owned()),
    }
}

impl Daemon {
    /// What the device is like.
    pub fn options(&self) -> Options {
        let mut features = Options::all_features();
        for (switch, feature) in [
            (
                self.free_page_reporting,
                Features::REPORTING | Features::DEVICE_INIT_REPORTED | Features::REPORT_NOW,
            ),
            (self.device_init_reported, Features::DEVICE_INIT_REPORTED),
            (self.device_init_on_inflate, Features::DEVICE_INIT_ON_INFLATE),
            (self.report_now, Features::REPORT_NOW),
            (self.deflate_on_oom, Features::DEFLATE_ON_OOM),
        ] {
            if switch == Switch::Off {
                features = features.without(feature);
            }
        }
        Options {
            features,
            target: self.target,
            memory_is_shared: self.memory_is_shared,
            inhibited: self.discard == Switch::Off,
            discard_unit: self.discard_unit,
            inhibit_one_in: self.inhibit_one_in,
            stats_interval: (self.stats_interval != 0).then(|| Duration::from_secs(self.stats_interval)),
            turn: TURN,
            user_mode_linux: self.user_mode_linux,
            #[cfg(feature = "lying")]
            lie: self.lie,
        }
    }
}

/// What `--print-capabilities` prints, as QEMU's vhost-user conventions have it.
pub fn capabilities() -> String {
    serde_json::json!({ "type": "balloon", "features": [] }).to_string()
}

/// The definition of the command line, for manual pages.
pub fn definition() -> clap::Command {
    Cli::command()
}
