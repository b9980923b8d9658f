// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's memory: mapped for the rings, and as files whose parts can be discarded.

use std::fs::File;
use std::io;
use std::time::Instant;

use balloon_discard::{FileId, Region, RegionError};
use balloon_protocol::{Claim, Range, Reason, clip};
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// The most regions a guest may have.
pub const MAX_REGIONS: usize = 256;

/// Memory that is not taken over.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// A region cannot be one.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A region cannot be mapped.
    #[error("the region at {guest:#x} cannot be mapped: {source}")]
    Map {
        /// Where it begins in the guest.
        guest: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// Two regions have addresses in common.
    #[error("the region at {guest:#x} overlaps another one")]
    Overlap {
        /// Where the later one begins in the guest.
        guest: u64,
    },
    /// There are too many.
    #[error("{count} regions are more than {MAX_REGIONS}")]
    TooMany {
        /// How many there would be.
        count: usize,
    },
    /// A region that is to go does not exist.
    #[error("there is no region of {length:#x} bytes at {guest:#x}")]
    Missing {
        /// Where it would begin in the guest.
        guest: u64,
        /// Its length.
        length: u64,
    },
}

/// What a front end tells of a region.
#[derive(Debug, Clone, Copy)]
pub struct Description {
    /// Where it begins in the guest.
    pub guest: u64,
    /// Its length.
    pub length: u64,
    /// Where it begins in the front end.
    pub user: u64,
    /// Where it begins in the file.
    pub offset: u64,
}

struct Slot {
    region: Region,
    user: Range,
    mapping: GuestRegionMmapArc,
}

type GuestRegionMmapArc = std::sync::Arc<GuestRegionMmap<()>>;

/// All of the guest's memory.
#[derive(Default)]
pub struct Memory {
    slots: Vec<Slot>,
    map: GuestMemoryMmap<()>,
    all_shared: bool,
    unit: u64,
    /// Files without a name of which the guest is known to see the same content.
    shared: Vec<FileId>,
}

/// What became of a range that may span regions.
#[derive(Debug, Clone, Copy)]
pub struct Discarded {
    /// Whether all of it reads as zero now.
    pub claim: Claim,
    /// How many bytes went back to the host.
    pub bytes: u64,
    /// What the call that failed said.
    pub errno: Option<i32>,
}

impl Memory {
    /// No memory yet. `all_shared`: whoever runs the VMM vouches that no mapping of it is private.
    /// `unit`: nothing smaller is discarded.
    pub fn new(all_shared: bool, unit: u64) -> Self {
        Self { all_shared, unit, ..Self::default() }
    }

    /// The mapped memory, for rings.
    pub fn map(&self) -> &GuestMemoryMmap<()> {
        &self.map
    }

    /// The regions.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.slots.iter().map(|slot| &slot.region)
    }

    /// A region by its number.
    pub fn region(&self, index: usize) -> Option<&Region> {
        self.slots.get(index).map(|slot| &slot.region)
    }

    /// How much memory the guest has, in bytes.
    pub fn total(&self) -> u64 {
        self.regions().fold(0, |sum, region| sum.saturating_add(region.guest().length()))
    }

    /// Take other memory. On an error there is none: what there was is no longer the guest's, so nothing of
    /// it may be discarded or claimed to be zero.
    ///
    /// # Errors
    ///
    /// A region is not usable, or they overlap.
    pub fn replace(&mut self, regions: impl Iterator<Item = (Description, File)>) -> Result<(), MemoryError> {
        let result = self.try_replace(regions);
        if result.is_err() {
            self.clear();
        }
        result
    }

    fn try_replace(&mut self, regions: impl Iterator<Item = (Description, File)>) -> Result<(), MemoryError> {
        let mut slots = Vec::new();
        for (description, file) in regions {
            self.insert(&mut slots, description, file)?;
        }
        self.adopt(slots)
    }

    /// Take one more region. On an error the memory stays as it was, or is gone if it cannot be mapped.
    ///
    /// # Errors
    ///
    /// The region is not usable, or overlaps another one.
    pub fn add(&mut self, description: Description, file: File) -> Result<(), MemoryError> {
        let mut slots = std::mem::take(&mut self.slots);
        let before = slots.len();
        let result = self.insert(&mut slots, description, file);
        if result.is_err() {
            slots.truncate(before);
            self.slots = slots;
            return result;
        }
        self.adopt(slots)
    }

    /// Let a region go.
    ///
    /// # Errors
    ///
    /// There is none like it.
    pub fn remove(&mut self, description: Description) -> Result<(), MemoryError> {
        let missing = MemoryError::Missing { guest: description.guest, length: description.length };
        let range = Range::new(description.guest, description.length);
        let found = self.slots.iter().position(|slot| Some(slot.region.guest()) == range);
        let Some(index) = found else { return Err(missing) };
        let mut slots = std::mem::take(&mut self.slots);
        slots.remove(index);
        self.adopt(slots)
    }

    /// Let all of it go.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.map = GuestMemoryMmap::default();
        self.shared.clear();
    }

    fn insert(&self, slots: &mut Vec<Slot>, told: Description, file: File) -> Result<(), MemoryError> {
        let guest = told.guest;
        let overlap = MemoryError::Overlap { guest };
        let map = |source: io::Error| MemoryError::Map { guest, source };
        if slots.len() >= MAX_REGIONS {
            return Err(MemoryError::TooMany { count: slots.len().saturating_add(1) });
        }
        let mut region = Region::new(file, told.offset, told.guest, told.length)?;
        region.coarsen(self.unit);
        let Some(user) = Range::new(told.user, told.length) else { return Err(overlap) };
        if slots.iter().any(|s| s.region.guest().overlaps(region.guest()) || s.user.overlaps(user)) {
            return Err(overlap);
        }
        let length = usize::try_from(told.length).map_err(|e| map(io::Error::other(e)))?;
        let file = region.file().try_clone().map_err(map)?;
        let mapped = MmapRegion::from_file(FileOffset::new(file, told.offset), length)
            .map_err(|error| map(io::Error::other(error)))?;
        let mapping = GuestRegionMmap::new(mapped, GuestAddress(guest)).ok_or(overlap)?;
        slots.push(Slot { region, user, mapping: mapping.into() });
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
        self.slots = slots;
        // A file that is no longer there, and comes back, has to be seen again.
        self.shared.retain(|id| self.slots.iter().any(|slot| slot.region.id() == *id));
        for slot in &mut self.slots {
            let seen = !slot.region.has_name() && self.shared.contains(&slot.region.id());
            if self.all_shared || seen {
                slot.region.set_known_shared();
            }
        }
        Ok(())
    }

    /// What is at this address was seen to change, so the guest does see the file: if it has no name.
    ///
    /// With a name it is never known. It may be a template that many guests have mapped privately, and what
    /// changes in it may be another process's doing; a hole in it would be a hole in all of them. Without
    /// a name nobody but the VMM has it, and a guest that has the device write its own index (as a part of
    /// another ring or answer) deceives only itself.
    pub fn written_by_guest(&mut self, address: u64) {
        let place = self.regions().find(|region| {
            let guest = region.guest();
            guest.start() <= address && address < guest.end()
        });
        let Some(id) = place.filter(|region| !region.has_name() && !region.known_shared()).map(Region::id)
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
    pub fn from_user(&self, address: u64) -> Option<u64> {
        self.slots.iter().find_map(|slot| {
            let at = address.checked_sub(slot.user.start()).filter(|at| *at < slot.user.length())?;
            slot.region.guest().start().checked_add(at)
        })
    }

    /// Give a range back to the host, as far as it is the guest's; `observe` is told how long it took.
    pub fn discard(&self, range: Range, observe: impl Fn(Instant)) -> Discarded {
        let mut covered = 0_u64;
        let mut total = Discarded { claim: Claim::Unproven(Reason::OutsideMemory), bytes: 0, errno: None };
        let mut claim: Option<Claim> = None;
        for piece in clip(range, self.regions().map(Region::guest)) {
            let Some(region) = self.region(piece.region) else { continue };
            let began = Instant::now();
            let outcome = region.discard(piece.range);
            observe(began);
            covered = covered.saturating_add(piece.range.length());
            total.bytes = total.bytes.saturating_add(outcome.discarded);
            total.errno = total.errno.or(outcome.errno);
            claim = Some(claim.map_or(outcome.claim, |before| before.and(outcome.claim)));
        }
        match claim {
            Some(claim) if covered == range.length() => total.claim = claim,
            _ => {}
        }
        total
    }
}
