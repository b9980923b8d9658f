// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device and all that it knows of its guest; what front end and driver set up.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use balloon_discard::{Hold, Table};
use balloon_protocol::{Config, Features, PAGE_SHIFT, PAGE_SIZE, PageSet, QueueKind, QueueMap, Statistics};

use super::job::Job;
use super::options::Options;
use super::report_now::{NoReport, ReportNow};
use crate::channel::Channel;
use crate::limit::Limiter;
use crate::limited;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::ring::Ring;
use crate::threads::Peer;

/// Count and log a malformed request.
#[macro_export]
macro_rules! malformed {
    ($device:expr, $($message:tt)+) => {
        $device.metrics.malformed.inc();
        $crate::limited!($device.limiter, $($message)+);
    };
}

/// `VHOST_F_LOG_ALL`: the front end logs writes from now on. It is not offered, so no front end migrates with this
/// device, but QEMU sets it to measure how much is written (calc-dirty-rate).
pub const LOG_ALL: u64 = 1 << 26;

/// The device and all that it knows of its guest.
pub struct Device {
    pub(crate) options: Options,
    pub(crate) accepted: u64,
    pub(crate) features: Features,
    pub(crate) queues: QueueMap,
    pub(crate) config: Config,
    pub(crate) target: u64,
    /// A client's target, which counts more for as long as its flush runs.
    flush: Option<(Peer, u64)>,
    pub(crate) memory: Memory,
    pub(super) rings: Vec<Ring>,
    pub(super) jobs: [Option<Job>; QueueMap::MAX],
    /// Pages in the balloon, where a page of the host has several of them.
    pub(super) in_balloon: PageSet,
    /// Pages that came into the balloon while discarding was suspended.
    pub(super) kept: PageSet,
    /// The memory that both sets are about.
    pub(super) pages_of: Table,
    pub(super) held_stats: Option<u16>,
    pub(super) asked: Option<Instant>,
    pub(crate) statistics: Option<(Statistics, Instant)>,
    /// Discarding is suspended. With MUST_TELL_HOST, the device discards the pages that are inflated meanwhile
    /// when it resumes.
    pub(super) inhibited: bool,
    pub(super) dice: u64,
    pub(super) channel: Option<Channel>,
    pub(super) notify_config: bool,
    pub(crate) report_now: ReportNow,
    pub(crate) metrics: Metrics,
    pub(crate) limiter: Limiter,
}

impl Device {
    pub fn new(options: Options) -> Result<Self, virtio_queue::Error> {
        let mut rings = Vec::with_capacity(QueueMap::MAX);
        for _ in 0..QueueMap::MAX {
            rings.push(Ring::new()?);
        }
        let mut device = Self {
            options,
            accepted: 0,
            features: Features::default(),
            queues: QueueMap::new(Features::default()),
            config: Config::default(),
            target: options.target,
            flush: None,
            memory: Memory::new(options.memory_is_shared, options.discard_unit),
            rings,
            jobs: Default::default(),
            in_balloon: PageSet::new(),
            kept: PageSet::new(),
            pages_of: Table::default(),
            held_stats: None,
            asked: None,
            statistics: None,
            inhibited: options.inhibited,
            dice: 0x9e37_79b9_7f4a_7c15,
            channel: None,
            notify_config: false,
            report_now: ReportNow::default(),
            metrics: Metrics::default(),
            limiter: Limiter::default(),
        };
        device.set_inhibited(options.inhibited);
        device.update_target();
        Ok(device)
    }

    pub fn ring(&self, index: usize) -> Option<&Ring> {
        self.rings.get(index)
    }

    pub(crate) fn ring_mut(&mut self, index: usize) -> Option<&mut Ring> {
        self.rings.get_mut(index)
    }

    pub(crate) fn ring_and_memory(&mut self, index: usize) -> Option<(&mut Ring, &mut Memory)> {
        Some((self.rings.get_mut(index)?, &mut self.memory))
    }

    pub(crate) fn accept(&mut self, bits: u64) {
        // This device does not take part in the log: it leaves memory as it is.
        self.memory.regions.hold(Hold::Logged, bits & LOG_ALL != 0);
        if bits & LOG_ALL != 0 {
            self.report_now.fail(NoReport::Logging);
        }
        let bits = bits & !LOG_ALL;
        if bits != self.accepted {
            // Another driver, or the same one from the start.
            self.report_now.reset(&mut self.config);
            for index in 0..self.rings.len() {
                self.ring_stopped(index);
            }
            self.forget_pages();
        }
        self.accepted = bits;
        self.features = Features::negotiated(Features::from_bits(bits));
        self.queues = QueueMap::new(self.features);
    }

    pub(crate) fn reset(&mut self) {
        self.accept(0);
        for ring in &mut self.rings {
            ring.reset();
        }
        self.jobs = Default::default();
        self.forget_pages();
        self.held_stats = None;
        self.report_now.reset(&mut self.config);
        self.config.actual = 0;
        self.config.poison_val = 0;
        self.update_sizes();
    }

    pub fn disconnect(&mut self) {
        self.reset();
        self.channel = None;
        self.report_now.seen = 0;
        self.change_memory(Memory::clear);
        return_memory();
    }

    /// A ring has stopped: nothing of it may be used any more. A chain that was taken and not given back is
    /// taken once more if the ring goes on.
    pub(crate) fn ring_stopped(&mut self, index: usize) {
        let kind = self.queues.kind(index);
        let job = self.jobs.get_mut(index).and_then(Option::take).is_some();
        let held = kind == Some(QueueKind::Stats) && self.held_stats.take().is_some();
        if let Some(ring) = self.rings.get_mut(index).filter(|_| job || held) {
            ring.step_back();
        }
        if kind == Some(QueueKind::Reporting) {
            self.report_now.reset(&mut self.config);
        }
        if matches!(kind, Some(QueueKind::Inflate | QueueKind::Deflate)) {
            // The driver may be another one when it starts again, with other pages in its balloon.
            self.forget_pages();
        }
    }

    /// A ring is about to start. The driver may have read another target than this one: from a daemon that
    /// was here before.
    pub(crate) fn ring_starts(&mut self) {
        if !self.rings.iter().any(Ring::is_started) && self.config.actual != self.config.num_pages {
            self.notify_config = true;
        }
    }

    /// Suspend discarding, by command, or go on with it.
    pub(crate) fn set_inhibited(&mut self, inhibited: bool) {
        self.inhibited = inhibited;
        self.memory.regions.hold(Hold::Suspended, inhibited);
        if inhibited {
            self.report_now.fail(NoReport::Suspended);
        }
    }

    /// Whether discarding is suspended by command.
    pub(crate) fn is_inhibited(&self) -> bool {
        self.inhibited
    }

    /// Whether memory is left as it is, by command or while the front end logs writes.
    pub(crate) fn is_suspended(&self) -> bool {
        self.memory.regions.held().is_some()
    }

    pub(super) fn forget_pages(&mut self) {
        self.in_balloon.clear();
        self.kept.clear();
        self.pages_of = self.memory.regions.table();
    }

    /// Change the memory, and forget what belongs to the old one. A refused change has no effect.
    pub(crate) fn change_memory<T>(&mut self, change: impl FnOnce(&mut Memory) -> T) -> T {
        let before = self.memory.regions.table();
        let result = change(&mut self.memory);
        if self.memory.regions.table() == before {
            return result;
        }
        self.forget_pages();
        for ring in &mut self.rings {
            ring.forget_index();
        }
        for index in 0..self.rings.len() {
            self.check_ring(index);
        }
        self.update_target();
        result
    }

    /// A ring may be touched from now on: if it lies in holes of memory, only as long as these are few.
    pub(crate) fn check_ring(&mut self, index: usize) {
        let Some(ring) = self.rings.get_mut(index) else { return };
        if !ring.is_started() || self.memory.may_touch(ring.areas()) {
            self.watch(index);
        } else {
            ring.fail();
            malformed!(self, ring = index, "stopped a ring: too many rings were in untouched memory");
        }
    }

    /// Look at a ring's available index, now and whenever a chain is taken: once it has changed, the guest
    /// is known to write to the file that it is in.
    pub(crate) fn watch(&mut self, index: usize) {
        if let Some(ring) = self.rings.get_mut(index)
            && let Some(address) = ring.watch(self.memory.map())
        {
            self.memory.written_by_guest(address);
        }
    }

    /// The channel for changes of the configuration.
    pub(crate) fn set_channel(&mut self, channel: Channel) {
        self.channel = Some(channel);
        self.notify_config = false;
    }

    /// Let the balloon have another size: as many whole pages of it as the guest has memory. A
    /// flush ends.
    pub fn set_target(&mut self, bytes: u64) {
        self.target = bytes;
        self.flush = None;
        self.update_target();
    }

    /// Let the balloon have another size for a flush of this client, or end that. `false`: the
    /// flush of another client runs.
    pub(crate) fn set_flush(&mut self, client: Peer, bytes: Option<u64>) -> bool {
        if self.flush.is_some_and(|(other, _)| other != client) {
            return false;
        }
        self.flush = bytes.map(|bytes| (client, bytes));
        self.update_target();
        true
    }

    /// End a flush whose client is not connected any more.
    pub(crate) fn check_flush(&mut self, is_connected: impl FnOnce(Peer) -> bool) {
        if self.flush.take_if(|(client, _)| !is_connected(*client)).is_some() {
            self.update_target();
        }
    }

    pub(super) fn update_target(&mut self) {
        let total = self.memory.regions.total();
        let wanted = self.flush.map_or(self.target, |(_, bytes)| bytes);
        let bytes = if total == 0 { wanted } else { wanted.min(total) };
        let pages = u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX);
        if pages != self.config.num_pages {
            self.config.num_pages = pages;
            self.notify_config = true;
        }
        self.update_sizes();
    }

    /// The size of the balloon by the driver, in bytes; no more than the guest has memory.
    pub fn actual(&self) -> u64 {
        u64::from(self.config.actual).saturating_mul(PAGE_SIZE).min(self.memory.regions.total())
    }

    pub(crate) fn update_sizes(&self) {
        let target = u64::from(self.config.num_pages).saturating_mul(PAGE_SIZE);
        self.metrics.sizes(target, self.actual());
    }

    /// Whether to notify the driver of a changed configuration.
    ///
    /// Before it has started a queue it has not read the configuration either, and some front ends do
    /// not survive the message.
    pub fn wants_to_notify(&self) -> bool {
        self.notify_config && self.channel.is_some() && self.rings.iter().any(Ring::is_started)
    }

    /// What to wait for until it can be sent.
    pub(crate) fn channel_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(Channel::fd)
    }

    /// Notify the driver that the configuration has changed, without waiting for anything.
    pub fn notify(&mut self) {
        let Some(channel) = &self.channel else { return };
        match channel.config_changed() {
            Ok(true) => self.notify_config = false,
            // It is full of messages already; later.
            Ok(false) => {}
            Err(error) => {
                limited!(self.limiter, %error, "cannot send a new target to the front end");
                self.channel = None;
            }
        }
    }
}

/// Return what was freed to the host: the allocator keeps it where something else lies behind it.
fn return_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointer, and locks the allocator as others do.
    unsafe {
        libc::malloc_trim(0)
    };
}
