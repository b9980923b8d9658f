// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device: what it does with what a driver puts into its queues.
//!
//! The driver is not trusted. Each address is cut to the guest's regions, each chain and list has a cap,
//! nothing is kept that grows with what was sent, and what makes no sense costs the sender its answer
//! and nobody else anything.

use std::num::NonZeroU32;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use balloon_protocol::{
    Bitmap, Claim, Config, Features, HostPages, MAX_PFNS, MAX_STATS_BYTES, PAGE_SHIFT, PAGE_SIZE, QueueKind,
    QueueMap, Range, Reason, Statistics, parse_pfns, runs,
};
use vm_memory::{Bytes, GuestAddress};

use crate::channel::Channel;
use crate::limit::Limiter;
use crate::limited;
use crate::memory::{Discarded, Memory};
use crate::metrics::Metrics;
use crate::ring::{Chain, Kick, Ring, RingError};

/// The most a list of page frames may have, in bytes: 64 MiB of memory in one request, 64 times as much as
/// Linux sends. In the worst case each of them is a hole of its own, and nobody else is served meanwhile.
const MAX_LIST_BYTES: usize = 1 << 16;

/// How long chains are taken from a ring before others get their turn. The front end above all: a VMM may
/// stand still until it is answered, and a guest can put chains into a ring faster than they are done.
const TURN: Duration = Duration::from_millis(10);

/// What the device is like; from the command line.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// What may be offered to a driver.
    pub features: Features,
    /// The size of the balloon at first, in bytes.
    pub target: u64,
    /// Whoever runs the VMM vouches that all of the guest's memory is shared.
    pub memory_is_shared: bool,
    /// Nothing is discarded until somebody says so.
    pub inhibited: bool,
    /// Nothing smaller than this is discarded; a power of two.
    pub discard_unit: u64,
    /// About one in so many pieces of memory is left alone, at random, and the driver told so: for tests
    /// of drivers. Inflated pages that follow each other are one piece, and so is each reported block.
    pub inhibit_one_in: Option<NonZeroU32>,
    /// How often to ask for statistics.
    pub stats_interval: Option<Duration>,
}

impl Options {
    /// Everything that can be offered.
    ///
    /// Free page hinting is not: a hint holds only until the driver takes the page back, which it does
    /// without asking when memory is short, so it is good for leaving pages out of a migration (where a
    /// later write makes them dirty again) and never for discarding. This device takes no part in
    /// migration, so it has no use for hints.
    pub fn all_features() -> Features {
        Features::MUST_TELL_HOST
            | Features::STATS_VQ
            | Features::DEFLATE_ON_OOM
            | Features::PAGE_POISON
            | Features::REPORTING
            | Features::DEVICE_INIT_REPORTED
            | Features::DEVICE_INIT_ON_INFLATE
    }
}

/// The device and all that a front end has told about its guest.
pub struct Device {
    options: Options,
    accepted: u64,
    features: Features,
    queues: QueueMap,
    config: Config,
    target: u64,
    memory: Memory,
    rings: Vec<Ring>,
    in_balloon: HostPages,
    held_stats: Option<u16>,
    asked: Option<Instant>,
    statistics: Option<(Statistics, Instant)>,
    inhibited: bool,
    dice: u64,
    channel: Option<Channel>,
    tell_config: bool,
    metrics: Metrics,
    limiter: Limiter,
}

impl Device {
    /// A device nobody has connected to.
    ///
    /// # Errors
    ///
    /// None, as long as the size of the rings is one that rings can have.
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
            in_balloon: HostPages::new(),
            held_stats: None,
            asked: None,
            statistics: None,
            inhibited: options.inhibited,
            dice: 0x9e37_79b9_7f4a_7c15,
            channel: None,
            tell_config: false,
            metrics: Metrics::default(),
            limiter: Limiter::default(),
        };
        device.update_target();
        Ok(device)
    }

    /// The command line's choices.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What is counted.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// What keeps the log short.
    pub fn limiter(&mut self) -> &mut Limiter {
        &mut self.limiter
    }

    /// The guest's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// A ring by its number.
    pub fn ring(&self, index: usize) -> Option<&Ring> {
        self.rings.get(index)
    }

    pub(crate) fn ring_mut(&mut self, index: usize) -> Option<&mut Ring> {
        self.rings.get_mut(index)
    }

    pub(crate) fn ring_and_memory(&mut self, index: usize) -> Option<(&mut Ring, &Memory)> {
        Some((self.rings.get_mut(index)?, &self.memory))
    }

    /// The configuration space.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn config_mut(&mut self) -> &mut Config {
        &mut self.config
    }

    /// What the driver has accepted.
    pub fn features(&self) -> Features {
        self.features
    }

    /// The feature bits as they were accepted, transport bits included.
    pub(crate) fn accepted(&self) -> u64 {
        self.accepted
    }

    /// Which queue is what.
    pub fn queues(&self) -> &QueueMap {
        &self.queues
    }

    pub(crate) fn accept(&mut self, bits: u64) {
        if bits != self.accepted {
            // Another driver, or the same one from the start.
            self.forget_pages();
            self.held_stats = None;
        }
        self.accepted = bits;
        self.features = Features::negotiated(Features::from_bits(bits));
        self.queues = QueueMap::new(self.features);
    }

    /// The driver begins anew.
    pub(crate) fn reset(&mut self) {
        for ring in &mut self.rings {
            ring.reset();
        }
        self.accept(0);
        self.forget_pages();
        self.held_stats = None;
        self.config.actual = 0;
        self.config.poison_val = 0;
        self.update_sizes();
    }

    /// The front end is gone.
    pub fn disconnect(&mut self) {
        self.reset();
        self.channel = None;
        self.memory.clear();
        self.update_target();
    }

    /// A ring has stopped: nothing of it may be used any more.
    pub(crate) fn ring_stopped(&mut self, index: usize) {
        match self.queues.kind(index) {
            Some(QueueKind::Stats) => {
                // Its memory may be somebody else's by now. If the ring goes on, it is taken once more.
                if self.held_stats.take().is_some()
                    && let Some(ring) = self.rings.get_mut(index)
                {
                    ring.step_back();
                }
            }
            // The driver may be another one when it starts again, with other pages in its balloon.
            Some(QueueKind::Inflate | QueueKind::Deflate) => self.forget_pages(),
            _ => {}
        }
    }

    /// A ring is about to start. The driver may have read another target than this one: from a daemon that
    /// was here before.
    pub(crate) fn ring_starts(&mut self) {
        if !self.rings.iter().any(Ring::is_started) && self.config.actual != self.config.num_pages {
            self.tell_config = true;
        }
    }

    fn forget_pages(&mut self) {
        self.in_balloon.clear();
    }

    /// Change the guest's memory.
    pub(crate) fn change_memory<T>(&mut self, change: impl FnOnce(&mut Memory) -> T) -> T {
        self.forget_pages();
        let result = change(&mut self.memory);
        for ring in &mut self.rings {
            ring.forget_index();
        }
        for index in 0..self.rings.len() {
            self.watch(index);
        }
        self.update_target();
        result
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

    /// Where changes of the configuration are told.
    pub(crate) fn set_channel(&mut self, channel: Channel) {
        self.channel = Some(channel);
        self.tell_config = false;
    }

    /// The size the balloon shall have, in bytes.
    pub fn target(&self) -> u64 {
        self.target
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
            self.tell_config = true;
        }
        self.update_sizes();
    }

    /// The size the driver says the balloon has, in bytes; no more than the guest has memory.
    pub fn actual(&self) -> u64 {
        u64::from(self.config.actual).saturating_mul(PAGE_SIZE).min(self.memory.total())
    }

    pub(crate) fn update_sizes(&self) {
        let target = u64::from(self.config.num_pages).saturating_mul(PAGE_SIZE);
        self.metrics.sizes(target, self.actual());
    }

    /// Whether the driver is to be told that the configuration has changed.
    ///
    /// Before it has started a queue it has not read the configuration either, and some front ends do
    /// not survive being told.
    pub fn wants_to_tell(&self) -> bool {
        self.tell_config && self.channel.is_some() && self.rings.iter().any(Ring::is_started)
    }

    /// What to wait for until it can be told.
    pub(crate) fn channel_fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(Channel::fd)
    }

    /// Tell that the configuration has changed, without waiting for anything.
    pub fn tell(&mut self) {
        let Some(channel) = &self.channel else { return };
        match channel.config_changed() {
            Ok(true) => self.tell_config = false,
            // It is full of messages already; later.
            Ok(false) => {}
            Err(error) => {
                limited!(self.limiter, %error, "the front end cannot be told of a new target");
                self.channel = None;
            }
        }
    }

    /// Whether discarding is suspended.
    pub fn is_inhibited(&self) -> bool {
        self.inhibited
    }

    /// Suspend discarding, or go on with it.
    pub fn set_inhibited(&mut self, inhibited: bool) {
        self.inhibited = inhibited;
    }

    /// What the driver told last, and when.
    pub fn statistics(&self) -> Option<&(Statistics, Instant)> {
        self.statistics.as_ref()
    }

    /// Ask the driver for new statistics. Returns whether it can be asked: it answers one question at a
    /// time.
    pub fn ask_for_statistics(&mut self) -> bool {
        self.asked = Some(Instant::now());
        let Some(index) = self.queues.index(QueueKind::Stats) else { return false };
        let Some(ring) = self.rings.get_mut(index).filter(|ring| ring.is_running()) else { return false };
        let Some(head) = self.held_stats.take() else { return false };
        if let Err(error) = ring.push(self.memory.map(), head, 0) {
            self.metrics.malformed();
            limited!(self.limiter, %error, ring = index, "cannot ask for statistics");
            return false;
        }
        ring.call();
        true
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
                self.metrics.malformed();
                limited!(self.limiter, ring = index, "the descriptor for kicks has come to its end");
                false
            }
        }
    }

    /// Do what is in a ring, for as long as a turn is, and at least one chain. Returns whether there may be
    /// more.
    pub fn run_ring(&mut self, index: usize) -> bool {
        let Some(kind) = self.queues.kind(index) else { return false };
        let mut used = false;
        let mut more = true;
        let began = Instant::now();
        for _ in 0..crate::ring::MAX_QUEUE_SIZE {
            let Some(ring) = self.rings.get_mut(index) else { return false };
            let chain = match ring.pop(self.memory.map()) {
                Ok(Some(chain)) => chain,
                Ok(None) => {
                    more = false;
                    break;
                }
                Err(error) => {
                    self.broken(index, &error);
                    more = false;
                    break;
                }
            };
            self.watch(index);
            let head = chain.head;
            if chain.malformed {
                self.metrics.malformed();
                limited!(self.limiter, ring = index, head, "a buffer without an end or in no order");
            }
            self.metrics.request(kind);
            if let Some(length) = self.answer(kind, &chain) {
                let Some(ring) = self.rings.get_mut(index) else { return false };
                if let Err(error) = ring.push(self.memory.map(), head, length) {
                    self.broken(index, &error);
                    more = false;
                    break;
                }
                used = true;
            }
            if began.elapsed() >= TURN {
                break;
            }
        }
        // Also where the ring broke: what was answered before that was.
        if used && let Some(ring) = self.rings.get_mut(index) {
            ring.call();
        }
        more
    }

    fn broken(&mut self, index: usize, error: &RingError) {
        self.metrics.malformed();
        limited!(self.limiter, %error, ring = index, "stopped looking at a ring");
    }

    /// The used length of a chain; `None` if the device keeps it.
    fn answer(&mut self, kind: QueueKind, chain: &Chain) -> Option<u32> {
        match kind {
            QueueKind::Inflate => Some(self.inflate(chain)),
            QueueKind::Deflate => {
                self.deflate(chain);
                Some(0)
            }
            QueueKind::Stats => self.take_statistics(chain),
            QueueKind::Reporting => Some(self.reported(chain)),
            // Not offered, so there is no such queue.
            QueueKind::Hinting => Some(0),
        }
    }

    /// The page frames in a chain: of the whole chain, or `None` if it is not a list of page frames.
    fn list(&mut self, chain: &Chain) -> Option<Vec<u32>> {
        let length = chain.readable.iter().fold(0_usize, |sum, (_, length)| {
            sum.saturating_add(usize::try_from(*length).unwrap_or(usize::MAX))
        });
        if chain.malformed || length > MAX_LIST_BYTES {
            self.metrics.malformed();
            limited!(self.limiter, length, "a list of page frames that is too long or malformed");
            return None;
        }
        let mut bytes = vec![0; length];
        let mut rest = bytes.as_mut_slice();
        for (address, length) in &chain.readable {
            let length = usize::try_from(*length).unwrap_or(0).min(rest.len());
            let (part, later) = rest.split_at_mut(length);
            if let Err(error) = self.memory.map().read_slice(part, GuestAddress(*address)) {
                self.metrics.malformed();
                limited!(self.limiter, %error, address, "a list of page frames outside of memory");
                return None;
            }
            rest = later;
        }
        match parse_pfns(&bytes) {
            Ok(pfns) => Some(pfns.collect()),
            Err(error) => {
                self.metrics.malformed();
                limited!(self.limiter, %error, "cannot read a list of page frames");
                None
            }
        }
    }

    fn inflate(&mut self, chain: &Chain) -> u32 {
        let Some(pfns) = self.list(chain) else { return 0 };
        let bytes = u64::try_from(pfns.len()).unwrap_or(u64::MAX).saturating_mul(PAGE_SIZE);
        let mut taken = Taken::default();
        // Pages of the host's own size go in runs, the others when every part of them is here.
        let (plain, parts): (Vec<u32>, Vec<u32>) =
            pfns.iter().partition(|pfn| self.has_small_pages(u64::from(**pfn) << PAGE_SHIFT));
        for run in runs(&plain) {
            let length = u64::from(run.pages) << PAGE_SHIFT;
            if let Some(range) = Range::new(u64::from(run.first) << PAGE_SHIFT, length) {
                let done = self.discard(QueueKind::Inflate, range);
                taken.add(range, done);
            }
        }
        self.inflate_parts(&parts, &mut taken);
        self.metrics.memory(QueueKind::Inflate, bytes, taken.discarded);

        if !self.features.contains(Features::DEVICE_INIT_ON_INFLATE) || chain.writable.is_empty() {
            return 0;
        }
        self.write_bitmap(&pfns, chain, &taken)
    }

    /// Whether what is at `address` can be discarded a balloon page at a time.
    fn has_small_pages(&self, address: u64) -> bool {
        !self.memory.regions().any(|region| {
            region.host_page() > PAGE_SIZE
                && address >= region.guest().start()
                && address < region.guest().end()
        })
    }

    fn inflate_parts(&mut self, pfns: &[u32], taken: &mut Taken) {
        if pfns.is_empty() {
            return;
        }
        // A driver that does not tell before it uses a page again can be using other parts of a host page
        // by now; then only what comes in one request counts.
        let mut fresh = HostPages::new();
        let remember = self.features.contains(Features::MUST_TELL_HOST);
        let mut pages = if remember { std::mem::take(&mut self.in_balloon) } else { HostPages::new() };
        let pending = if remember { &mut pages } else { &mut fresh };
        let mut complete = Vec::new();
        for pfn in pfns {
            let address = u64::from(*pfn) << PAGE_SHIFT;
            let place =
                self.memory.regions().enumerate().find_map(|(index, region)| {
                    region.host_page_of(index, address).map(|place| (index, place))
                });
            match place {
                Some((index, (page, part, parts))) if pending.insert(page, part, parts) => {
                    complete.extend(self.memory.region(index).and_then(|region| region.range_of(page)));
                }
                Some(_) => {}
                None => self.metrics.skipped(Reason::OutsideMemory, PAGE_SIZE),
            }
        }
        for range in complete {
            let done = self.discard(QueueKind::Inflate, range);
            taken.add(range, done);
        }
        self.in_balloon = pages;
    }

    fn write_bitmap(&mut self, pfns: &[u32], chain: &Chain, taken: &Taken) -> u32 {
        let room =
            chain.writable.iter().fold(0_u64, |sum, (_, length)| sum.saturating_add(u64::from(*length)));
        let needed = Bitmap::bytes_for(pfns.len());
        let length = u32::try_from(needed).unwrap_or(u32::MAX);
        if chain.malformed || pfns.is_empty() || pfns.len() > MAX_PFNS || u64::from(length) > room {
            self.metrics.malformed();
            limited!(self.limiter, pages = pfns.len(), room, "an inflate request that cannot be answered");
            return 0;
        }
        let answers: Vec<Range> = chain
            .writable
            .iter()
            .filter_map(|(address, length)| Range::new(*address, u64::from(*length)))
            .collect();
        let mut bitmap = Bitmap::new(pfns.len());
        for (n, pfn) in pfns.iter().enumerate() {
            let page = Range::new(u64::from(*pfn) << PAGE_SHIFT, PAGE_SIZE);
            // Writing the answer is the one thing that can make a page that was discarded hold something.
            let zero = page.is_some_and(|page| {
                taken.is_zero(page) && !answers.iter().any(|answer| answer.overlaps(page))
            });
            if zero {
                bitmap.set(n);
            }
        }
        let mut rest = bitmap.as_bytes();
        for (address, length) in &chain.writable {
            let (part, later) = rest.split_at(usize::try_from(*length).unwrap_or(usize::MAX).min(rest.len()));
            if let Err(error) = self.memory.map().write_slice(part, GuestAddress(*address)) {
                self.metrics.malformed();
                limited!(self.limiter, %error, address, "an answer to an inflate request outside of memory");
                return 0;
            }
            rest = later;
        }
        let zero = (0..pfns.len()).filter(|n| bitmap.get(*n)).count();
        if let Some(backing) = taken.backing {
            let pages = u64::try_from(zero).unwrap_or(u64::MAX);
            self.metrics.proven(backing, pages.saturating_mul(PAGE_SIZE));
        }
        length
    }

    fn deflate(&mut self, chain: &Chain) {
        let Some(pfns) = self.list(chain) else {
            // Any page may be in use once this is answered.
            return self.forget_pages();
        };
        for pfn in pfns {
            let address = u64::from(pfn) << PAGE_SHIFT;
            let place =
                self.memory.regions().enumerate().find_map(|(n, region)| region.host_page_of(n, address));
            if let Some((page, part, _)) = place {
                self.in_balloon.remove(page, part);
            }
        }
    }

    fn take_statistics(&mut self, chain: &Chain) -> Option<u32> {
        let mut bytes = Vec::with_capacity(MAX_STATS_BYTES);
        for (address, length) in &chain.readable {
            let room = MAX_STATS_BYTES.saturating_sub(bytes.len());
            let mut part = vec![0; usize::try_from(*length).unwrap_or(usize::MAX).min(room)];
            if let Err(error) = self.memory.map().read_slice(&mut part, GuestAddress(*address)) {
                self.metrics.malformed();
                limited!(self.limiter, %error, address, "statistics outside of memory");
                return Some(0);
            }
            bytes.extend(part);
        }
        let told = Statistics::parse(&bytes);
        self.metrics.statistics(&told);
        self.statistics = Some((told, Instant::now()));
        // The device keeps this one until it wants the next; a second one goes back at once.
        if self.held_stats.is_some() {
            return Some(0);
        }
        self.held_stats = Some(chain.head);
        None
    }

    fn reported(&mut self, chain: &Chain) -> u32 {
        let total =
            chain.writable.iter().fold(0_u64, |sum, (_, length)| sum.saturating_add(u64::from(*length)));
        let Ok(length) = u32::try_from(total) else {
            self.metrics.malformed();
            return 0;
        };
        if chain.malformed || !chain.readable.is_empty() {
            // Not a report.
            self.metrics.malformed();
            self.metrics.memory(QueueKind::Reporting, total, 0);
            self.metrics.skipped(Reason::Malformed, total);
            return 0;
        }
        let mut claim: Option<Claim> = None;
        let mut discarded = 0_u64;
        for (address, length) in &chain.writable {
            let Some(range) = Range::new(*address, u64::from(*length)) else {
                claim = Some(Claim::Unproven(Reason::OutsideMemory));
                self.metrics.skipped(Reason::OutsideMemory, u64::from(*length));
                continue;
            };
            let done = self.discard(QueueKind::Reporting, range);
            discarded = discarded.saturating_add(done.bytes);
            claim = Some(claim.map_or(done.claim, |before| before.and(done.claim)));
        }
        self.metrics.memory(QueueKind::Reporting, total, discarded);
        match claim {
            Some(claim) if self.features.contains(Features::DEVICE_INIT_REPORTED) => {
                if let Claim::Proven(backing) = claim {
                    self.metrics.proven(backing, total);
                }
                claim.used_length(length)
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

    /// Give a range back to the host, unless there is a reason not to.
    fn discard(&mut self, kind: QueueKind, range: Range) -> Discarded {
        let kept = |reason| Discarded { claim: Claim::Unproven(reason), bytes: 0, errno: None };
        let poisoned = self.features.contains(Features::PAGE_POISON) && self.config.poison_val != 0;
        let done = if self.inhibited || self.leaves_it_alone() {
            kept(Reason::Inhibited)
        } else if poisoned && kind == QueueKind::Reporting {
            // The driver expects its own value there, and zeros would look like a write to free memory.
            kept(Reason::Poison)
        } else if !range.is_aligned(PAGE_SIZE) {
            kept(Reason::Misaligned)
        } else if self.rings.iter().flat_map(Ring::areas).any(|area| area.overlaps(range)) {
            // Rings are written as long as there are any: no page of them stays zero.
            kept(Reason::Malformed)
        } else {
            let metrics = &self.metrics;
            let mut done = self.memory.discard(range, |began| metrics.took(began.elapsed()));
            if poisoned && done.claim.is_proven() {
                done.claim = Claim::Unproven(Reason::Poison);
            }
            done
        };
        if let Some(errno) = done.errno {
            let error = std::io::Error::from_raw_os_error(errno);
            limited!(self.limiter, %error, start = range.start(), length = range.length(), "cannot discard");
        }
        if let Claim::Unproven(reason) = done.claim {
            self.metrics.unproven(reason, done.bytes);
            self.metrics.skipped(reason, range.length().saturating_sub(done.bytes));
        }
        done
    }
}

/// What one inflate request has taken.
#[derive(Default)]
struct Taken {
    zero: Vec<Range>,
    discarded: u64,
    backing: Option<balloon_protocol::Backing>,
}

impl Taken {
    fn add(&mut self, range: Range, done: Discarded) {
        self.discarded = self.discarded.saturating_add(done.bytes);
        if let Claim::Proven(backing) = done.claim {
            self.zero.push(range);
            self.backing = Some(backing);
        }
    }

    fn is_zero(&self, page: Range) -> bool {
        self.zero.iter().any(|range| range.intersection(page) == Some(page))
    }
}
