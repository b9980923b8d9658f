// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! All of guest memory, and what is known of it while requests are worked on.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use balloon_protocol::{QueueKind, Range};

use crate::claim::{Backing, Claim, Reason};
use crate::error::RegionError;
use crate::region::{FileId, Region};
use crate::zeros::Zeros;

/// Why nothing is discarded for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Hold {
    /// The operator wants that, memory is copied (a background snapshot), or userfaultfd(2) serves
    /// it (an incoming postcopy). Begin it before the copy, and before userfaultfd has the memory.
    Suspended,
    /// Writes are logged, and the VMM does not enter discards into the log. One that does has no need for this.
    Logged,
    /// All of guest memory is pinned, as for a device that is passed through (VFIO).
    Pinned,
}

impl Hold {
    const fn reason(self) -> Reason {
        match self {
            Self::Suspended => Reason::Inhibited,
            Self::Logged => Reason::Logged,
            Self::Pinned => Reason::Pinned,
        }
    }
}

/// What became of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// How many bytes were discarded; a range that held no memory counts, too.
    pub discarded: u64,
    /// Why not all of it is known to read as zero.
    pub doubt: Option<Reason>,
    /// The error of the call that failed.
    pub errno: Option<i32>,
}

impl Outcome {
    fn ended() -> Self {
        Self { doubt: Some(Reason::Ended), ..Self::default() }
    }
}

/// What a request of a queue has discarded until now.
#[derive(Debug, Default)]
struct Work {
    zeros: Zeros,
    backing: Option<Backing>,
    doubt: Option<Reason>,
}

impl Work {
    fn forget(&mut self, reason: Reason) {
        self.zeros.clear();
        self.doubt.get_or_insert(reason);
    }
}

/// Numbers of tables and requests. Each is used once in this process, which may have several
/// `Regions`, one after the other or at once.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

fn next_number() -> u64 {
    NEXT_NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// Identifies the memory of a guest between two changes of its regions; no two [`Regions`] have the
/// same, unless they never had memory.
///
/// What a guest has given away of one table says nothing of the same addresses in the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Table(u64);

/// A request of the driver, from [`Regions::begin`] to [`Regions::answer`]. It ends when a region comes or goes:
/// nothing is discarded for it from then on, and nothing is claimed.
#[derive(Debug)]
#[must_use]
pub struct Request {
    queue: QueueKind,
    number: u64,
    table: Table,
}

impl Request {
    /// The memory that it was made for.
    #[must_use]
    pub fn table(&self) -> Table {
        self.table
    }
}

/// Guest memory: regions that do not overlap, and the requests that discard parts of it.
///
/// A queue has one request at a time: [`Regions::begin`], any number of [`Regions::discard`], and
/// [`Regions::answer`]. What happens in between counts: rings that move, answers that are written, pages that are pinned,
/// a log of writes that begins. Memory that goes or comes ends all requests.
#[derive(Debug, Default)]
pub struct Regions {
    /// In the order of the guest's addresses.
    regions: Vec<Region>,
    rings: Vec<Range>,
    pinned: Vec<Range>,
    holds: BTreeSet<Hold>,
    poisoned: bool,
    /// The request of each queue, by its number.
    work: BTreeMap<QueueKind, (u64, Work)>,
    table: Table,
}

impl Regions {
    /// No memory yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            regions: Vec::new(),
            rings: Vec::new(),
            pinned: Vec::new(),
            holds: BTreeSet::new(),
            poisoned: false,
            work: BTreeMap::new(),
            table: Table(0),
        }
    }

    /// Add a region. Parts of the host's memory that the guest sees twice from now on are not discarded: the other
    /// address may be in use.
    ///
    /// # Errors
    ///
    /// It overlaps another one; nothing has changed.
    pub fn insert(&mut self, region: Region) -> Result<(), RegionError> {
        let guest = region.guest();
        if self.regions.iter().any(|other| other.guest().overlaps(guest)) {
            return Err(RegionError::Overlap { guest: guest.start() });
        }
        self.regions.push(region);
        self.changed();
        Ok(())
    }

    /// Remove the region that is exactly this.
    pub fn remove(&mut self, guest: Range) -> Option<Region> {
        let index = self.regions.iter().position(|region| region.guest() == guest)?;
        let region = self.regions.remove(index);
        self.changed();
        Some(region)
    }

    /// Remove all regions.
    pub fn clear(&mut self) {
        self.regions.clear();
        self.changed();
    }

    fn changed(&mut self) {
        self.regions.sort_by_key(Region::guest);
        let aliased: Vec<bool> = self
            .regions
            .iter()
            .map(|one| self.regions.iter().filter(|other| one.is_alias_of(other)).count() > 1)
            .collect();
        for (region, aliased) in self.regions.iter_mut().zip(aliased) {
            region.set_aliased(aliased);
        }
        self.table = Table(next_number());
        self.work.clear();
    }

    /// The memory that there is now.
    #[must_use]
    pub fn table(&self) -> Table {
        self.table
    }

    /// All regions, in the order of the guest's addresses.
    pub fn iter(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter()
    }

    /// The region with an address.
    #[must_use]
    pub fn at(&self, address: u64) -> Option<&Region> {
        let one = Range::new(address, 1)?;
        self.regions.iter().find(|region| region.guest().overlaps(one))
    }

    /// The parts of a range in each region.
    pub fn pieces(&self, range: Range) -> impl Iterator<Item = (&Region, Range)> {
        self.regions.iter().filter_map(move |region| Some((region, range.intersection(region.guest())?)))
    }

    /// How much memory there is.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.regions.iter().fold(0, |sum, region| sum.saturating_add(region.guest().length()))
    }

    /// Something that the guest wrote was seen to arrive in the file at this address: the guest sees the file itself,
    /// if it has no name. Which file that is, if this is news.
    ///
    /// With a name it is never known. It may be a template that many guests have mapped privately, and what changes in
    /// it may be another process's doing; a hole in it would be a hole in all of them. Without a name only the VMM has
    /// it, and a guest that has the device write there deceives only itself.
    pub fn seen_to_share(&mut self, address: u64) -> Option<FileId> {
        let region = self.at(address).filter(|region| !region.has_name() && !region.known_shared());
        let file = region.and_then(Region::id)?;
        let others = self.regions.iter_mut().filter(|region| region.id() == Some(file) && !region.has_name());
        others.for_each(Region::set_known_shared);
        Some(file)
    }

    /// Where the rings of the device are. It writes there by itself, so that nothing of it stays zero.
    pub fn set_rings(&mut self, rings: impl IntoIterator<Item = Range>) {
        let rings: Vec<Range> = rings.into_iter().collect();
        if rings != self.rings {
            let old = std::mem::replace(&mut self.rings, rings.clone());
            self.wrote(old.into_iter().chain(rings));
        }
    }

    /// The device has written, or is about to write, to these parts of memory: answers, for example. What requests have
    /// discarded there is not known to be zero any more.
    pub fn wrote(&mut self, parts: impl IntoIterator<Item = Range>) {
        self.doubt(parts, Reason::DeviceMemory);
    }

    /// Which parts of memory are pinned; [`Hold::Pinned`] is for all of it.
    pub fn set_pinned(&mut self, parts: impl IntoIterator<Item = Range>) {
        self.pinned = parts.into_iter().collect();
        self.doubt(self.pinned.clone(), Reason::Pinned);
    }

    fn doubt(&mut self, parts: impl IntoIterator<Item = Range>, reason: Reason) {
        for part in parts {
            for (_, work) in self.work.values_mut() {
                if work.zeros.remove(part) {
                    work.doubt.get_or_insert(reason);
                }
            }
        }
    }

    /// Discard nothing from now on, or go on with it. When a hold begins, requests that are not
    /// answered lose their claims.
    pub fn hold(&mut self, hold: Hold, on: bool) {
        if !on {
            self.holds.remove(&hold);
        } else if self.holds.insert(hold) {
            // What was discarded until now is not in the log or the copy, a device may write there, or
            // the handler of userfaultfd decides what a missing page reads as.
            self.work.values_mut().for_each(|(_, work)| work.forget(hold.reason()));
        }
    }

    /// Why nothing is discarded, if so.
    #[must_use]
    pub fn held(&self) -> Option<Hold> {
        self.holds.first().copied()
    }

    /// The driver poisons pages with another value than zero: it wants to find that there.
    pub fn set_poisoned(&mut self, poisoned: bool) {
        self.poisoned = poisoned;
    }

    /// The first part of a range that lies in one region, or in none, and has at most so many bytes, unless a page of
    /// the host is larger; and what is left. For a device that has others to serve.
    #[must_use]
    pub fn step(&self, range: Range, most: u64) -> (Range, Option<Range>) {
        let end = match self.at(range.start()) {
            Some(region) => {
                let step = most.max(region.host_page());
                // Counted in the host's memory, so that no host page is cut.
                let at = region.to_host(range).map_or(0, Range::start);
                let room = step.saturating_sub(at.checked_rem(step).unwrap_or(0));
                range.start().saturating_add(room).min(region.guest().end())
            }
            None => {
                let starts = self.regions.iter().map(|region| region.guest().start());
                starts.filter(|start| *start > range.start()).min().unwrap_or(u64::MAX)
            }
        };
        let first = Range::new(range.start(), end.saturating_sub(range.start()));
        let first = first.and_then(|first| first.intersection(range)).unwrap_or(range);
        (first, Range::new(first.end(), range.end().saturating_sub(first.end())))
    }

    /// A request of this queue begins. One of the same queue that is not answered is given up.
    pub fn begin(&mut self, queue: QueueKind) -> Request {
        let number = next_number();
        self.work.insert(queue, (number, Work::default()));
        Request { queue, number, table: self.table }
    }

    /// Give a range of the guest's addresses back to the host, for a request. Of one that has
    /// ended, or was begun with other [`Regions`], nothing goes.
    ///
    /// Only whole host pages go; nothing outside of memory is touched.
    pub fn discard(&mut self, request: &Request, range: Range) -> Outcome {
        let is_open = self.work.get(&request.queue).is_some_and(|(number, _)| *number == request.number);
        if is_open { self.give_back(Some(request), range) } else { Outcome::ended() }
    }

    /// Give a range of the memory that `table` identifies back to the host without a request: nothing is claimed. If a
    /// region has come or gone since, or the table is that of other [`Regions`], nothing goes.
    pub fn release(&mut self, table: Table, range: Range) -> Outcome {
        if table == self.table { self.give_back(None, range) } else { Outcome::ended() }
    }

    fn give_back(&mut self, request: Option<&Request>, range: Range) -> Outcome {
        let mut outcome = Outcome::default();
        let mut rest = Some(range);
        while let Some(left) = rest {
            let (piece, next) = self.step(left, u64::MAX);
            rest = next;
            let found = match (self.obstacle(request, piece), self.at(piece.start())) {
                (None, Some(region)) => {
                    let done = region.discard(piece);
                    outcome.discarded = outcome.discarded.saturating_add(done.bytes);
                    outcome.errno = outcome.errno.or(done.errno);
                    done.known
                }
                (Some(reason), _) => Err(reason),
                (None, None) => Err(Reason::OutsideMemory),
            };
            if let Err(reason) = found {
                outcome.doubt.get_or_insert(reason);
            }
            let work = request
                .and_then(|request| self.work.get_mut(&request.queue).filter(|w| w.0 == request.number));
            match (work, found) {
                (Some((_, work)), Ok(backing)) => {
                    work.zeros.insert(piece);
                    work.backing = Some(backing);
                }
                (Some((_, work)), Err(reason)) => {
                    work.doubt.get_or_insert(reason);
                }
                (None, _) => {}
            }
        }
        if self.poisoned {
            outcome.doubt.get_or_insert(Reason::Poison);
        }
        outcome
    }

    /// Why a piece of memory is left alone.
    fn obstacle(&self, request: Option<&Request>, piece: Range) -> Option<Reason> {
        let overlaps = |parts: &[Range]| parts.iter().any(|part| part.overlaps(piece));
        if let Some(hold) = self.held() {
            Some(hold.reason())
        } else if self.poisoned && request.is_some_and(|request| request.queue == QueueKind::Reporting) {
            // The driver expects its own value there, and zeros would look like a write to free memory.
            Some(Reason::Poison)
        } else if overlaps(&self.rings) {
            Some(Reason::DeviceMemory)
        } else if overlaps(&self.pinned) {
            Some(Reason::Pinned)
        } else {
            None
        }
    }

    /// A request is answered now. `writes`: where the device writes the answer, beside its rings.
    ///
    /// Nothing can change while the answer is there.
    pub fn answer(&mut self, request: Request, writes: impl IntoIterator<Item = Range>) -> Answer<'_> {
        self.wrote(writes);
        let is_known = self.work.get(&request.queue).is_some_and(|(number, _)| *number == request.number);
        let work = if is_known { self.work.remove(&request.queue) } else { None };
        Answer { regions: self, work: work.map(|(_, work)| work) }
    }
}

/// A request that is answered: what was discarded for it, and still reads as zero.
#[derive(Debug)]
pub struct Answer<'a> {
    regions: &'a Regions,
    work: Option<Work>,
}

impl Answer<'_> {
    /// Whether all of a range was discarded for this request, and reads as zero.
    pub fn claim(&self, range: Range) -> Claim {
        let Some(work) = &self.work else { return Claim::unproven(Reason::Ended) };
        match work.backing.filter(|_| work.zeros.has(range)) {
            Some(_) if self.regions.poisoned => Claim::unproven(Reason::Poison),
            Some(backing) => Claim::proven(backing),
            None => Claim::unproven(work.doubt.unwrap_or(Reason::OutsideMemory)),
        }
    }
}
