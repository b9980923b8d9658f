// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's memory: mapped for the rings, and as files whose parts can be discarded.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use crate::charge::Charges;
use crate::signals;
use crate::threads::{Closes, Foreign};
use balloon_discard::{FileId, Outcome, Region, RegionError};
use balloon_protocol::{Backing, Claim, Range, Reason};
use thiserror::Error;
use vhost::vhost_user::message::VhostUserMemoryRegion as Description;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

pub const MAX_REGIONS: usize = 256;
/// The most that is discarded by one system call, unless a page of the host is larger.
pub const STEP: u64 = 32 << 20;
#[derive(Debug, Error)]
pub enum MemoryError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("the region at {guest:#x} cannot be mapped: {source}")]
    Map { guest: u64, source: io::Error },
    #[error("the region at {guest:#x} overlaps another one")]
    Overlap { guest: u64 },
    #[error("{count} regions are more than {MAX_REGIONS}")]
    TooMany { count: usize },
    #[error("there is no region of {length:#x} bytes at {guest:#x}")]
    Missing { guest: u64, length: u64 },
}

struct Slot {
    region: Region,
    user: Range,
    mapping: GuestRegionMmapArc,
    /// Dropped with the mapping.
    _guard: signals::Guard,
    /// Dropped last, and after the map: the last descriptor of guest memory frees all of it.
    _held: Held,
}

type GuestRegionMmapArc = Arc<GuestRegionMmap<()>>;

/// A file of guest memory that a thread closes, unless others hold it as well.
struct Held(Option<Arc<File>>);

impl Held {
    fn new(file: Foreign<File>) -> (Self, Arc<File>) {
        let file = Arc::new(file.into_inner());
        (Self(Some(file.clone())), file)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(file) = self.0.take().and_then(Arc::into_inner) {
            drop(Foreign::new(file, Closes::Known));
        }
    }
}

#[derive(Default)]
pub struct Memory {
    slots: Vec<Slot>,
    map: GuestMemoryMmap<()>,
    all_shared: bool,
    unit: u64,
    /// Files without a name of which the guest is known to see the same content.
    shared: Vec<FileId>,
    charges: Charges,
}

impl Memory {
    /// No memory yet. `all_shared`: the operator states that no mapping of it is private.
    /// `unit`: nothing smaller is discarded.
    pub fn new(all_shared: bool, unit: u64) -> Self {
        Self { all_shared, unit, ..Self::default() }
    }

    pub fn map(&self) -> &GuestMemoryMmap<()> {
        &self.map
    }

    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.slots.iter().map(|slot| &slot.region)
    }

    pub fn total(&self) -> u64 {
        self.regions().fold(0, |sum, region| sum.saturating_add(region.guest().length()))
    }

    /// Bytes that the host has for the files of the guest, each counted once.
    pub fn held(&self) -> u64 {
        let mut seen = Vec::new();
        let files = self.regions().filter(|region| {
            let first = !seen.contains(&region.id());
            seen.push(region.id());
            first
        });
        let blocks = files.map(|region| region.file().metadata().map_or(0, |about| about.blocks()));
        blocks.fold(0, |sum: u64, blocks| sum.saturating_add(blocks.saturating_mul(512)))
    }

    /// Take other memory. On an error there is none: what there was is no longer the guest's, so nothing of
    /// it may be discarded or claimed to be zero.
    pub fn replace(
        &mut self,
        mut regions: impl Iterator<Item = (Description, Foreign<File>)>,
    ) -> Result<(), MemoryError> {
        let mut slots = Vec::new();
        regions
            .try_for_each(|(description, file)| self.insert(&mut slots, description, file))
            .and_then(|()| self.adopt(slots))
            .inspect_err(|_| self.clear())
    }

    /// Take one more region. On an error the memory stays as it was, or is lost if it cannot be mapped.
    pub fn add(&mut self, description: Description, file: Foreign<File>) -> Result<(), MemoryError> {
        let mut slots = std::mem::take(&mut self.slots);
        let result = self.insert(&mut slots, description, file);
        if result.is_err() {
            self.slots = slots;
            return result;
        }
        self.adopt(slots)
    }

    pub fn remove(&mut self, description: Description) -> Result<(), MemoryError> {
        let (guest, length) = (description.guest_phys_addr, description.memory_size);
        let range = Range::new(guest, length);
        let found = self.slots.iter().position(|slot| Some(slot.region.guest()) == range);
        let index = found.ok_or(MemoryError::Missing { guest, length })?;
        let mut slots = std::mem::take(&mut self.slots);
        let removed = slots.remove(index);
        let adopted = self.adopt(slots);
        drop(removed);
        adopted
    }

    pub fn clear(&mut self) {
        self.map = GuestMemoryMmap::default();
        self.slots.clear();
        self.shared.clear();
    }

    fn insert(
        &self,
        slots: &mut Vec<Slot>,
        given: Description,
        file: Foreign<File>,
    ) -> Result<(), MemoryError> {
        // Made before all that holds the file, so that it is dropped after that.
        let (held, file) = Held::new(file);
        let (guest, length, offset) = (given.guest_phys_addr, given.memory_size, given.mmap_offset);
        let overlap = MemoryError::Overlap { guest };
        let map = |source: io::Error| MemoryError::Map { guest, source };
        if slots.len() >= MAX_REGIONS {
            return Err(MemoryError::TooMany { count: slots.len().saturating_add(1) });
        }
        let mut region = Region::new(file, offset, guest, length)?;
        let host_page = region.host_page();
        region.coarsen(self.unit);
        let Some(user) = Range::new(given.user_addr, length) else { return Err(overlap) };
        if slots.iter().any(|s| s.region.guest().overlaps(region.guest()) || s.user.overlaps(user)) {
            return Err(overlap);
        }
        let length = usize::try_from(length).map_err(|e| map(io::Error::other(e)))?;
        let backing = FileOffset::from_arc(region.file().clone(), offset);
        let mapped = MmapRegion::from_file(backing, length).map_err(|error| map(io::Error::other(error)))?;
        let start = mapped.as_ptr();
        // SAFETY: the mapping was made above and has this length; the advice affects core dumps only.
        let advised = unsafe { libc::madvise(start.cast(), length, libc::MADV_DONTDUMP) };
        if advised != 0 {
            return Err(map(io::Error::last_os_error()));
        }
        // What mmap(2) has made of the length, and no byte of a neighbour.
        let page = match region.backing() {
            Backing::Hugetlbfs => usize::try_from(host_page).unwrap_or(usize::MAX),
            _ => rustix::param::page_size(),
        };
        let whole = length.checked_next_multiple_of(page).unwrap_or(length);
        let guard =
            signals::Guard::new(start.addr(), whole).ok_or_else(|| map(io::Error::other("no slot")))?;
        let mapping = GuestRegionMmap::new(mapped, GuestAddress(guest)).ok_or(overlap)?;
        slots.push(Slot { region, user, mapping: mapping.into(), _guard: guard, _held: held });
        Ok(())
    }

    fn adopt(&mut self, mut slots: Vec<Slot>) -> Result<(), MemoryError> {
        slots.sort_by_key(|slot| slot.region.guest());
        let mappings: Vec<GuestRegionMmapArc> = slots.iter().map(|slot| slot.mapping.clone()).collect();
        self.map = if mappings.is_empty() {
            GuestMemoryMmap::default()
        } else {
            GuestMemoryMmap::from_arc_regions(mappings).map_err(|e| {
                self.clear();
                MemoryError::Map { guest: 0, source: io::Error::other(e) }
            })?
        };
        // The map above has gone: the old slots are the last that hold their mappings.
        self.slots = slots;
        // A file that is no longer there, and comes back, has to be seen again.
        self.shared.retain(|id| self.slots.iter().any(|slot| slot.region.id() == *id));
        let aliased: Vec<bool> = self
            .regions()
            .map(|one| self.regions().filter(|other| one.is_alias_of(other)).count() > 1)
            .collect();
        for (slot, aliased) in self.slots.iter_mut().zip(aliased) {
            let seen = !slot.region.has_name() && self.shared.contains(&slot.region.id());
            if self.all_shared || seen {
                slot.region.set_known_shared();
            }
            slot.region.set_aliased(aliased);
        }
        Ok(())
    }

    /// What is at this address was seen to change, so the guest does see the file: if it has no name.
    ///
    /// With a name it is never known. It may be a template that many guests have mapped privately, and what
    /// changes in it may be another process's doing; a hole in it would be a hole in all of them. Without
    /// a name only the VMM has it, and a guest that has the device write its own index (as a part of
    /// another ring or answer) deceives only itself.
    pub fn written_by_guest(&mut self, address: u64) {
        let Some(id) = self
            .region_at(address)
            .filter(|region| !region.has_name() && !region.known_shared())
            .map(Region::id)
        else {
            return;
        };
        for slot in &mut self.slots {
            if slot.region.id() == id && !slot.region.has_name() {
                slot.region.set_known_shared();
            }
        }
        self.shared.push(id);
    }

    /// The guest's address for an address of the front end.
    pub fn guest_address(&self, address: u64) -> Option<u64> {
        self.slots.iter().find_map(|slot| {
            let at = address.checked_sub(slot.user.start()).filter(|at| *at < slot.user.length())?;
            slot.region.guest().start().checked_add(at)
        })
    }

    /// Read guest memory from its file: a hole reads as zeros and stays a hole.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> io::Result<()> {
        let outside = || io::Error::new(io::ErrorKind::NotFound, "outside of memory");
        let mut at = address;
        let mut rest = bytes;
        while !rest.is_empty() {
            let length = u64::try_from(rest.len()).unwrap_or(u64::MAX);
            let wanted = Range::new(at, length).ok_or_else(outside)?;
            let region = self.region_at(at).ok_or_else(outside)?;
            let place = region.to_file(wanted).ok_or_else(outside)?;
            let (part, later) = rest.split_at_mut(usize::try_from(place.length()).unwrap_or(0));
            region.file().read_exact_at(part, place.start())?;
            at = at.checked_add(place.length()).ok_or_else(outside)?;
            rest = later;
        }
        Ok(())
    }

    /// Whether these ranges may be touched. Holes in them become memory that this process is charged for,
    /// which is bounded for all files that exist.
    pub fn may_touch(&mut self, ranges: impl Iterator<Item = Range>) -> bool {
        for range in ranges {
            for Slot { region, .. } in &self.slots {
                let Some(mut rest) = range.intersection(region.guest()) else { continue };
                let unit = region.fault_size();
                loop {
                    let at = region.to_file(rest).map_or(0, Range::start);
                    let room = unit.saturating_sub(at.checked_rem(unit).unwrap_or(0));
                    let part = Range::new(rest.start(), rest.length().min(room)).unwrap_or(rest);
                    let number = at.checked_div(unit).unwrap_or(0);
                    let counted = self.charges.has(unit, (region.id(), number));
                    if !counted && region.has_hole(part) && !self.charges.add(region, number) {
                        return false;
                    }
                    let left = rest.length().saturating_sub(room);
                    let Some(next) = Range::new(rest.start().saturating_add(room), left) else { break };
                    rest = next;
                }
            }
        }
        true
    }

    pub fn region_at(&self, address: u64) -> Option<&Region> {
        self.regions().find(|region| {
            let guest = region.guest();
            guest.start() <= address && address < guest.end()
        })
    }

    /// Why a region could not be touched.
    pub fn loss(&self) -> &'static str {
        let cut = |region: &Region| {
            let size = region.file().metadata().map_or(0, |about| about.len());
            region.in_file().end() > size
        };
        if self.regions().any(cut) {
            "cannot touch guest memory: its file was truncated by the front end; restart the VMM"
        } else {
            "cannot touch guest memory: its pool of huge pages or its filesystem is full; enlarge that, and restart the VMM"
        }
    }

    /// The first part of a range that can be discarded by one call, and what is left of it.
    pub fn step(&self, range: Range) -> (Range, Option<Range>) {
        let end = match self.region_at(range.start()) {
            Some(region) => {
                let step = STEP.max(region.host_page());
                // Counted in the file, so that no host page is cut.
                let at = region.to_file(range).map_or(0, Range::start);
                let room = step.saturating_sub(at % step);
                range.start().saturating_add(room).min(region.guest().end())
            }
            None => {
                let starts = self.regions().map(|region| region.guest().start());
                starts.filter(|start| *start > range.start()).min().unwrap_or(u64::MAX)
            }
        };
        let first = Range::new(range.start(), end.saturating_sub(range.start()));
        let first = first.and_then(|first| first.intersection(range)).unwrap_or(range);
        (first, Range::new(first.end(), range.end().saturating_sub(first.end())))
    }

    /// Give a range that [`Memory::step`] has returned back to the host.
    pub fn discard(&self, range: Range) -> Outcome {
        match self.region_at(range.start()) {
            Some(region) => region.discard(range),
            None => Outcome { claim: Claim::Unproven(Reason::OutsideMemory), discarded: 0, errno: None },
        }
    }

    /// The parts of a range in each region.
    pub fn pieces(&self, range: Range) -> impl Iterator<Item = (&Region, Range)> {
        self.regions().filter_map(move |region| Some((region, range.intersection(region.guest())?)))
    }
}
