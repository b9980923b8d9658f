// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: what it does with what a driver puts into its queues.
//!
//! The driver is not trusted. Each address is cut to the guest's regions, each chain and list has a cap,
//! what is kept is bounded by the size of guest memory, and an invalid request gets no claim.

use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use balloon_discard::Outcome;
use balloon_protocol::{
    Backing, Bitmap, Claim, Config, Features, MAX_PFNS, MAX_STATS_BYTES, PAGE_SHIFT, PAGE_SIZE, PageSet,
    QueueKind, QueueMap, Range, Reason, Run, Statistics, parse_pfns, runs,
};
use vm_memory::{Bytes, GuestAddress};

use crate::limit::Limiter;
use crate::limited;
#[cfg(feature = "lying")]
use crate::lying::Lie;
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::ring::{Chain, Kick, Ring};
use crate::vhost_user::Channel;

/// Count and log a malformed request.
macro_rules! malformed {
    ($device:expr, $($message:tt)+) => {
        $device.metrics.malformed.inc();
        limited!($device.limiter, $($message)+);
    };
}

/// The most a list of page frames may have, in bytes: 16 times as much as Linux sends. In the worst case
/// each of them is a hole of its own.
const MAX_LIST_BYTES: usize = 1 << 14;

/// How long a queue is served before others get their turn: a VMM may stand still until it is answered, and
/// a guest can put chains into a ring faster than they are done.
const TURN: Duration = Duration::from_millis(10);

/// `VHOST_F_LOG_ALL`: the front end logs writes from now on. It is not offered, so no front end migrates with this
/// device, but QEMU sets it to measure how much is written (calc-dirty-rate).
pub const LOG_ALL: u64 = 1 << 26;

/// How many pages that were kept are discarded at once: 4 MiB.
const BACKLOG_PAGES: u32 = 1024;

/// The options of the command line that are for the device.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub features: Features,
    pub target: u64,
    pub memory_is_shared: bool,
    pub inhibited: bool,
    pub discard_unit: u64,
    /// Inflated pages that follow each other are one piece of memory, and so is each reported block.
    pub inhibit_one_in: Option<NonZeroU32>,
    pub stats_interval: Option<Duration>,
    /// Calls may be sockets.
    pub user_mode_linux: bool,
    #[cfg(feature = "lying")]
    pub lie: Option<Lie>,
}

/// Everything that can be offered, and its name in `status`.
///
/// Free page hinting is not: a hint holds only until the driver takes the page back, which it does without
/// asking when memory is short, so it is good for leaving pages out of a migration (where a later write makes
/// them dirty again) and never for discarding. This device takes no part in migration, so it has no use for
/// hints.
pub const FEATURES: [(Features, &str); 7] = [
    (Features::MUST_TELL_HOST, "must-tell-host"),
    (Features::STATS_VQ, "stats"),
    (Features::DEFLATE_ON_OOM, "deflate-on-oom"),
    (Features::PAGE_POISON, "page-poison"),
    (Features::REPORTING, "free-page-reporting"),
    (Features::DEVICE_INIT_REPORTED, "device-init-reported"),
    (Features::DEVICE_INIT_ON_INFLATE, "device-init-on-inflate"),
];

impl Options {
    /// All bits of [`FEATURES`].
    pub fn all_features() -> Features {
        FEATURES.iter().fold(Features::default(), |all, (bit, _)| all | *bit)
    }
}

/// The device and all that it knows of its guest.
pub struct Device {
    pub(crate) options: Options,
    pub(crate) accepted: u64,
    pub(crate) features: Features,
    pub(crate) queues: QueueMap,
    pub(crate) config: Config,
    pub(crate) target: u64,
    pub(crate) memory: Memory,
    rings: Vec<Ring>,
    jobs: [Option<Job>; QueueMap::MAX],
    /// Pages in the balloon, where a page of the host has several of them.
    in_balloon: PageSet,
    /// Pages that came into the balloon while discarding was suspended.
    kept: PageSet,
    held_stats: Option<u16>,
    asked: Option<Instant>,
    pub(crate) statistics: Option<(Statistics, Instant)>,
    /// Discarding is suspended. With MUST_TELL_HOST, the device discards the pages that are inflated meanwhile
    /// when it resumes.
    pub(crate) inhibited: bool,
    /// The front end logs what is written to memory, and this device does not take part in that: it leaves memory
    /// as it is.
    logging: bool,
    dice: u64,
    channel: Option<Channel>,
    notify_config: bool,
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
            memory: Memory::new(options.memory_is_shared, options.discard_unit),
            rings,
            jobs: Default::default(),
            in_balloon: PageSet::new(),
            kept: PageSet::new(),
            held_stats: None,
            asked: None,
            statistics: None,
            inhibited: options.inhibited,
            logging: false,
            dice: 0x9e37_79b9_7f4a_7c15,
            channel: None,
            notify_config: false,
            metrics: Metrics::default(),
            limiter: Limiter::default(),
        };
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
        self.logging = bits & LOG_ALL != 0;
        if self.logging {
            // What these have discarded until now is not in the log.
            self.jobs.iter_mut().flatten().for_each(|job| {
                job.zero.clear();
                job.doubt(Reason::Inhibited);
            });
        }
        let bits = bits & !LOG_ALL;
        if bits != self.accepted {
            // Another driver, or the same one from the start.
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
        self.config.actual = 0;
        self.config.poison_val = 0;
        self.update_sizes();
    }

    pub fn disconnect(&mut self) {
        self.reset();
        self.channel = None;
        self.memory.clear();
        self.update_target();
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

    /// Whether memory is left as it is, by command or while the front end logs writes.
    pub(crate) fn is_suspended(&self) -> bool {
        self.inhibited || self.logging
    }

    fn forget_pages(&mut self) {
        self.in_balloon.clear();
        self.kept.clear();
    }

    pub(crate) fn change_memory<T>(&mut self, change: impl FnOnce(&mut Memory) -> T) -> T {
        self.forget_pages();
        for job in self.jobs.iter_mut().flatten() {
            // What was discarded until now may be outside of memory by now.
            job.zero.clear();
            job.doubt(Reason::OutsideMemory);
        }
        let result = change(&mut self.memory);
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

    /// Let the balloon have another size: as many whole pages of it as the guest has memory.
    pub fn set_target(&mut self, bytes: u64) {
        self.target = bytes;
        self.update_target();
    }

    fn update_target(&mut self) {
        let total = self.memory.total();
        let bytes = if total == 0 { self.target } else { self.target.min(total) };
        let pages = u32::try_from(bytes >> PAGE_SHIFT).unwrap_or(u32::MAX);
        if pages != self.config.num_pages {
            self.config.num_pages = pages;
            self.notify_config = true;
        }
        self.update_sizes();
    }

    /// The size of the balloon by the driver, in bytes; no more than the guest has memory.
    pub fn actual(&self) -> u64 {
        u64::from(self.config.actual).saturating_mul(PAGE_SIZE).min(self.memory.total())
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

    /// Ask the driver for new statistics, if it can be asked: it answers one question at a time.
    pub fn ask_for_statistics(&mut self) {
        self.asked = Some(Instant::now());
        let Some(index) = self.queues.index(QueueKind::Stats) else { return };
        if !self.rings.get(index).is_some_and(Ring::is_running) {
            return;
        }
        let Some(head) = self.held_stats.take() else { return };
        match self.push(index, head, 0) {
            Ok(()) => self.rings.get_mut(index).into_iter().for_each(Ring::call),
            Err(error) => {
                malformed!(self, %error, ring = index, "cannot ask for statistics");
            }
        }
    }

    /// When to ask for statistics next.
    pub fn next_question(&self) -> Option<Instant> {
        let interval = self.options.stats_interval?;
        self.held_stats?;
        match self.asked {
            Some(asked) => asked.checked_add(interval),
            None => Some(Instant::now()),
        }
    }

    /// A ring was kicked: do what is in it. Returns whether there is more to do.
    pub fn kicked(&mut self, index: usize) -> bool {
        let Some(ring) = self.rings.get_mut(index) else { return false };
        match ring.take_kick() {
            Kick::Yes => self.run_ring(index),
            Kick::No => false,
            Kick::Hangup => {
                malformed!(self, ring = index, "the descriptor for kicks has come to its end");
                false
            }
        }
    }

    /// Do what is in a ring, for as long as a turn is. Returns whether there may be more.
    pub fn run_ring(&mut self, index: usize) -> bool {
        let Some(kind) = self.queues.kind(index) else { return false };
        if !self.rings.get(index).is_some_and(Ring::is_running) {
            return false;
        }
        let mut used = false;
        let began = Instant::now();
        let more = loop {
            let job = match self.jobs.get_mut(index).and_then(Option::take) {
                Some(job) => Ok(Some(job)),
                None => self.next_job(index, kind),
            };
            let done = match job {
                Ok(None) => break false,
                Ok(Some(mut job)) => match self.work(&mut job, began) {
                    Progress::More => {
                        if let Some(slot) = self.jobs.get_mut(index) {
                            *slot = Some(job);
                        }
                        break true;
                    }
                    Progress::Held => Ok(()),
                    Progress::Used(length) => {
                        used = true;
                        self.push(index, job.chain.head, length)
                    }
                },
                Err(error) => Err(error),
            };
            if let Err(error) = done {
                malformed!(self, %error, ring = index, "stopped looking at a ring");
                break false;
            }
            if began.elapsed() >= TURN {
                break true;
            }
        };
        // Also where the ring broke: what was answered before that was.
        if used && let Some(ring) = self.rings.get_mut(index) {
            ring.call();
        }
        more
    }

    /// Return a chain to the driver.
    fn push(&mut self, index: usize, head: u16, length: u32) -> Result<(), virtio_queue::Error> {
        let Some(ring) = self.rings.get_mut(index) else { return Ok(()) };
        let done = ring.push(self.memory.map(), head, length);
        let areas: Vec<Range> = ring.areas().collect();
        self.written(&areas);
        done
    }

    /// This process has written to these parts of memory: what was discarded there in the turns of an unfinished
    /// chain is not known to be zero any more.
    fn written(&mut self, parts: &[Range]) {
        for job in self.jobs.iter_mut().flatten() {
            let reported = job.chain.writable.iter().map(|(at, length)| Range::new(*at, u64::from(*length)));
            let zero = job.zero.iter().copied().map(Some).chain(reported);
            if zero.flatten().any(|range| parts.iter().any(|part| part.overlaps(range))) {
                job.zero.retain(|range| !parts.iter().any(|part| part.overlaps(*range)));
                job.doubt(Reason::Malformed);
            }
        }
    }

    fn next_job(&mut self, index: usize, kind: QueueKind) -> Result<Option<Job>, virtio_queue::Error> {
        let Some(ring) = self.rings.get_mut(index) else { return Ok(None) };
        let Some(chain) = ring.pop(self.memory.map())? else { return Ok(None) };
        self.watch(index);
        if chain.malformed {
            malformed!(self, ring = index, head = chain.head, "a buffer without an end or in no order");
        }
        self.metrics.requests.add(kind.label(), 1);
        let mut job = Job::new(kind, chain);
        match kind {
            QueueKind::Inflate => self.inflate(&mut job),
            QueueKind::Reporting => self.report(&mut job),
            _ => {}
        }
        job.todo.reverse();
        Ok(Some(job))
    }

    fn work(&mut self, job: &mut Job, began: Instant) -> Progress {
        while let Some(range) = job.todo.pop() {
            let (step, rest) = self.memory.step(range);
            job.todo.extend(rest);
            let done = self.discard(job.kind, step);
            if self.is_suspended()
                && job.kind == QueueKind::Inflate
                && self.remembers()
                && !self.came_back(step)
            {
                // Discarding was suspended after the list was read.
                let inside = self.memory.region_at(step.start()).and(whole_run(step));
                inside.into_iter().for_each(|run| self.kept.insert(run));
            }
            job.discarded = job.discarded.saturating_add(done.discarded);
            match done.claim {
                Claim::Proven(backing) => {
                    job.backing = Some(backing);
                    if job.kind == QueueKind::Inflate {
                        job.zero.push(step);
                    }
                }
                Claim::Unproven(reason) => job.doubt(reason),
            }
            if !job.todo.is_empty() && began.elapsed() >= TURN {
                return Progress::More;
            }
        }
        match job.kind {
            QueueKind::Inflate => Progress::Used(self.inflated(job)),
            QueueKind::Deflate => {
                self.deflate(&job.chain);
                Progress::Used(0)
            }
            QueueKind::Stats => self.take_statistics(&job.chain),
            QueueKind::Reporting => Progress::Used(self.reported(job)),
            // Not offered, so there is no such queue.
            QueueKind::Hinting => Progress::Used(0),
        }
    }

    /// The readable bytes of a chain, at most `limit`; `None` if they are not in memory.
    fn read(&mut self, chain: &Chain, limit: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (address, length) in &chain.readable {
            let room = limit.saturating_sub(bytes.len());
            let mut part = vec![0; usize::try_from(*length).unwrap_or(usize::MAX).min(room)];
            if let Err(error) = self.memory.read(*address, &mut part) {
                malformed!(self, %error, address, "a list of page frames or statistics outside of memory");
                return None;
            }
            bytes.extend(part);
        }
        Some(bytes)
    }

    /// The page frames in a chain: of the whole chain, or `None` if it is not a list of page frames.
    fn list(&mut self, chain: &Chain) -> Option<Vec<u32>> {
        let length = usize::try_from(total(&chain.readable)).unwrap_or(usize::MAX);
        if chain.malformed || length > MAX_LIST_BYTES {
            malformed!(self, length, "a list of page frames that is too long or malformed");
            return None;
        }
        match parse_pfns(&self.read(chain, length)?) {
            Ok(pfns) => Some(pfns.collect()),
            Err(error) => {
                malformed!(self, %error, "cannot read a list of page frames");
                None
            }
        }
    }

    /// Whether pages in the balloon stay there until a deflate request. Without that it can be using
    /// other parts of a host page by now, and only what comes in one request counts.
    fn remembers(&self) -> bool {
        self.features.contains(Features::MUST_TELL_HOST)
    }

    fn inflate(&mut self, job: &mut Job) {
        let Some(pfns) = self.list(&job.chain) else { return };
        job.received = u64::try_from(pfns.len()).unwrap_or(u64::MAX).saturating_mul(PAGE_SIZE);
        let (remembers, suspended, memory) = (self.remembers(), self.is_suspended(), &self.memory);
        let runs = runs(&pfns);
        for run in &runs {
            // Only pages in memory: others, as many as there are numbers, would cost memory as well.
            let pieces = range_of(*run).into_iter().flat_map(|range| memory.pieces(range));
            for (region, piece) in pieces.filter(|_| remembers) {
                let Some(part) = whole_run(piece) else { continue };
                if region.host_page() > PAGE_SIZE {
                    self.in_balloon.insert(part);
                }
                if suspended {
                    self.kept.insert(part);
                }
            }
        }
        let mut seen = None;
        runs.into_iter().for_each(|run| self.targets(run, &mut seen, &mut job.todo));
        job.pfns = pfns;
    }

    /// What can be discarded because of a run of pages in the balloon. `seen`: the host page that was looked at
    /// last.
    fn targets(&self, run: Run, seen: &mut Option<Range>, targets: &mut Vec<Range>) {
        let Some(range) = range_of(run) else { return };
        let mut outside = range.length();
        for (region, piece) in self.memory.pieces(range) {
            outside = outside.saturating_sub(piece.length());
            if region.host_page() <= PAGE_SIZE {
                targets.push(piece);
            } else if self.remembers() {
                let touched = region.touched_pages(piece);
                let Ok(step) = usize::try_from(region.host_page()) else { continue };
                for start in touched.into_iter().flat_map(|t| (t.start()..t.end()).step_by(step)) {
                    let Some(page) = Range::new(start, region.host_page()) else { continue };
                    // Runs are in order: another part of the same page has just been looked at.
                    if seen.replace(page) != Some(page)
                        && whole_run(page).is_some_and(|p| self.in_balloon.contains(p))
                    {
                        targets.push(page);
                    }
                }
            } else {
                let whole = region.whole_pages(piece);
                let part = piece.length().saturating_sub(whole.map_or(0, Range::length));
                self.metrics.skipped.add(Reason::PartOfHostPage.label(), part);
                targets.extend(whole);
            }
        }
        self.metrics.skipped.add(Reason::OutsideMemory.label(), outside);
    }

    /// Discard what came into the balloon while that was suspended, for a turn. Returns whether there is more.
    pub fn run_backlog(&mut self) -> bool {
        let began = Instant::now();
        while !self.is_suspended()
            && began.elapsed() < TURN
            && let Some(run) = self.kept.next_run(0)
        {
            // One call for each turn of this loop.
            let run = Run { pages: run.pages.min(BACKLOG_PAGES), ..run };
            self.kept.remove(run);
            let mut targets = Vec::new();
            self.targets(run, &mut None, &mut targets);
            for target in targets {
                whole_run(target).into_iter().for_each(|run| self.kept.remove(run));
                let done = self.discard(QueueKind::Inflate, target);
                self.metrics.memory(QueueKind::Inflate, 0, done.discarded);
            }
        }
        !self.is_suspended() && self.kept.next_run(0).is_some()
    }

    fn inflated(&mut self, job: &Job) -> u32 {
        self.metrics.memory(QueueKind::Inflate, job.received, job.discarded);
        let negotiated = self.features.contains(Features::DEVICE_INIT_ON_INFLATE);
        #[cfg(feature = "lying")]
        let negotiated = negotiated || self.options.lie == Some(Lie::FullLength);
        if !negotiated || job.chain.writable.is_empty() {
            return 0;
        }
        let (pfns, chain) = (&job.pfns, &job.chain);
        let room = total(&chain.writable);
        let needed = Bitmap::bytes_for(pfns.len());
        let length = u32::try_from(needed).unwrap_or(u32::MAX);
        if chain.malformed || pfns.is_empty() || pfns.len() > MAX_PFNS || u64::from(length) > room {
            malformed!(self, pages = pfns.len(), room, "an inflate request that cannot be answered");
            return 0;
        }
        // What is written of each part.
        let mut left = u64::from(length);
        let answers: Vec<Range> = chain
            .writable
            .iter()
            .filter_map(|(address, length)| {
                let part = u64::from(*length).min(left);
                left = left.saturating_sub(part);
                Range::new(*address, part)
            })
            .collect();
        let mut bitmap = Bitmap::new(pfns.len());
        let mut zero = 0_u64;
        for (n, pfn) in pfns.iter().enumerate() {
            // This process writes answers, and rings, which may have moved since the page was discarded.
            let page = Range::new(u64::from(*pfn) << PAGE_SHIFT, PAGE_SIZE).filter(|page| {
                !answers.iter().any(|answer| answer.overlaps(*page)) && !self.is_in_a_ring(*page)
            });
            if page.is_some_and(|page| job.is_zero(page)) {
                bitmap.set(n);
                zero = zero.saturating_add(PAGE_SIZE);
            }
        }
        if !self.memory.may_touch(answers.iter().copied()) {
            malformed!(self, "too many answers to inflate requests were in untouched memory");
            return 0;
        }
        #[cfg(feature = "lying")]
        let (bitmap, length) = crate::lying::inflated(self.options.lie, bitmap, length);
        self.written(&answers);
        let mut rest = bitmap.as_bytes();
        for answer in answers {
            let length = usize::try_from(answer.length()).unwrap_or(usize::MAX).min(rest.len());
            let (part, later) = rest.split_at(length);
            if let Err(error) = self.memory.map().write_slice(part, GuestAddress(answer.start())) {
                let address = answer.start();
                malformed!(self, %error, address, "an answer to an inflate request outside of memory");
                return 0;
            }
            rest = later;
        }
        if let Some(backing) = job.backing {
            self.metrics.proven.add(backing.label(), zero);
        }
        length
    }

    fn deflate(&mut self, chain: &Chain) {
        match self.list(chain) {
            Some(pfns) => runs(&pfns).into_iter().for_each(|run| {
                self.in_balloon.remove(run);
                self.kept.remove(run);
            }),
            // Any page may be in use once this is answered.
            None => self.forget_pages(),
        }
    }

    fn take_statistics(&mut self, chain: &Chain) -> Progress {
        let Some(bytes) = self.read(chain, MAX_STATS_BYTES) else { return Progress::Used(0) };
        let statistics = Statistics::parse(&bytes);
        self.metrics.statistics(&statistics);
        self.statistics = Some((statistics, Instant::now()));
        // The device keeps this one until it wants the next; a second one goes back at once.
        if self.held_stats.is_some() {
            return Progress::Used(0);
        }
        self.held_stats = Some(chain.head);
        Progress::Held
    }

    fn report(&mut self, job: &mut Job) {
        let chain = &job.chain;
        job.received = total(&chain.writable);
        let malformed = chain.malformed || !chain.readable.is_empty();
        if malformed {
            self.metrics.malformed.inc();
        }
        let mut refused = chain.writable.is_empty().then_some(Reason::Malformed);
        for (address, length) in &chain.writable {
            let reason = match Range::new(*address, u64::from(*length)) {
                _ if malformed => Reason::Malformed,
                None => Reason::OutsideMemory,
                Some(range) if !range.is_aligned(PAGE_SIZE) => Reason::Misaligned,
                Some(range) => {
                    job.todo.push(range);
                    continue;
                }
            };
            self.metrics.skipped.add(reason.label(), u64::from(*length));
            refused = Some(reason);
        }
        if let Some(reason) = refused {
            job.doubt(reason);
        }
    }

    fn reported(&mut self, job: &Job) -> u32 {
        self.metrics.memory(QueueKind::Reporting, job.received, job.discarded);
        // There is no used length for 4 GiB and more.
        let length = u32::try_from(job.received).unwrap_or(0);
        #[cfg(feature = "lying")]
        if let Some(lied) = crate::lying::reported(self.options.lie, length) {
            return lied;
        }
        // A ring may have moved there since it was discarded.
        let mut reported = job.chain.writable.iter().map(|(at, length)| Range::new(*at, u64::from(*length)));
        let touched = reported.any(|range| range.is_some_and(|range| self.is_in_a_ring(range)));
        match (job.doubt, job.backing) {
            (None, Some(backing))
                if self.features.contains(Features::DEVICE_INIT_REPORTED) && length != 0 && !touched =>
            {
                self.metrics.proven.add(backing.label(), job.received);
                Claim::Proven(backing).used_length(length)
            }
            _ => 0,
        }
    }

    /// Whether this piece of memory is one that a test has kept; xorshift64 is random enough.
    fn leaves_it_alone(&mut self) -> bool {
        let Some(one_in) = self.options.inhibit_one_in else { return false };
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        // The upper bits are the better ones.
        (self.dice >> 32).is_multiple_of(u64::from(one_in.get()))
    }

    /// Whether a page of it has left the balloon since its request was read: its host page is in use.
    fn came_back(&self, range: Range) -> bool {
        let large = self.memory.region_at(range.start()).is_some_and(|region| region.host_page() > PAGE_SIZE);
        large && self.remembers() && !whole_run(range).is_some_and(|run| self.in_balloon.contains(run))
    }

    /// Whether a ring has a part of a range. A ring is written as long as there is one, so it does not stay zero.
    fn is_in_a_ring(&self, range: Range) -> bool {
        self.rings.iter().flat_map(Ring::areas).any(|area| area.overlaps(range))
    }

    /// Give one step of a range back to the host, unless there is a reason not to.
    fn discard(&mut self, kind: QueueKind, range: Range) -> Outcome {
        let kept = |reason| Outcome { claim: Claim::Unproven(reason), discarded: 0, errno: None };
        let poisoned = self.features.contains(Features::PAGE_POISON) && self.config.poison_val != 0;
        let mut done = if self.is_suspended() || self.leaves_it_alone() {
            kept(Reason::Inhibited)
        } else if poisoned && kind == QueueKind::Reporting {
            // The driver expects its own value there, and zeros would look like a write to free memory.
            kept(Reason::Poison)
        } else if kind == QueueKind::Inflate && self.came_back(range) {
            kept(Reason::PartOfHostPage)
        } else if self.is_in_a_ring(range) {
            kept(Reason::Malformed)
        } else {
            let began = Instant::now();
            #[cfg(feature = "lying")]
            let done =
                crate::lying::discard(self.options.lie, range).unwrap_or_else(|| self.memory.discard(range));
            #[cfg(not(feature = "lying"))]
            let done = self.memory.discard(range);
            self.metrics.took(began.elapsed());
            done
        };
        if poisoned && done.claim.is_proven() {
            done.claim = Claim::Unproven(Reason::Poison);
        }
        if let Some(errno) = done.errno {
            let error = std::io::Error::from_raw_os_error(errno);
            limited!(self.limiter, %error, start = range.start(), length = range.length(), "cannot discard");
        }
        if let Claim::Unproven(reason) = done.claim {
            self.metrics.unproven.add(reason.label(), done.discarded);
            self.metrics.skipped.add(reason.label(), range.length().saturating_sub(done.discarded));
        }
        done
    }
}

fn total(parts: &[(u64, u32)]) -> u64 {
    parts.iter().fold(0, |sum, (_, length)| sum.saturating_add(u64::from(*length)))
}

/// The memory of a run of pages.
fn range_of(run: Run) -> Option<Range> {
    Range::new(u64::from(run.first) << PAGE_SHIFT, u64::from(run.pages) << PAGE_SHIFT)
}

/// The pages of a range, if they have page frame numbers.
fn whole_run(range: Range) -> Option<Run> {
    let first = u32::try_from(range.start() >> PAGE_SHIFT).ok()?;
    Some(Run { first, pages: u32::try_from(range.length() >> PAGE_SHIFT).ok()? })
}

/// How far a chain is done.
enum Progress {
    More,
    /// The device keeps it.
    Held,
    /// It goes back with this used length.
    Used(u32),
}

/// A chain that is being worked on.
struct Job {
    kind: QueueKind,
    chain: Chain,
    pfns: Vec<u32>,
    received: u64,
    /// What is still to be discarded, the next one last.
    todo: Vec<Range>,
    discarded: u64,
    /// What reads as zero because of a list of page frames.
    zero: Vec<Range>,
    backing: Option<Backing>,
    /// Why not all of it does.
    doubt: Option<Reason>,
}

impl Job {
    fn new(kind: QueueKind, chain: Chain) -> Self {
        let (pfns, todo, zero) = (Vec::new(), Vec::new(), Vec::new());
        Self { kind, chain, pfns, received: 0, todo, discarded: 0, zero, backing: None, doubt: None }
    }

    fn doubt(&mut self, reason: Reason) {
        self.doubt.get_or_insert(reason);
    }

    /// What was discarded is in order, unless the memory has changed.
    fn is_zero(&self, page: Range) -> bool {
        self.zero.iter().any(|range| range.intersection(page) == Some(page))
    }
}

#[cfg(test)]
#[path = "tests/device.rs"]
mod tests;
