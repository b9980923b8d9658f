// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's memory: mapped for the rings, and as files whose parts can be discarded.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use balloon_discard::{Backing, FileId, Region, RegionError, Regions};
use balloon_protocol::Range;
use thiserror::Error;
use vhost::vhost_user::message::VhostUserMemoryRegion as Description;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::charge::Charges;
use crate::holes::FilePart;
use crate::signals;
use crate::threads::{Closes, Foreign, Peer};

pub const MAX_REGIONS: usize = 256;
/// The most that is discarded by one system call, unless a page of the host is larger.
pub const STEP: u64 = 32 << 20;

#[derive(Debug, Error)]
pub enum MemoryError {
    #[error(transparent)]
    Region(#[from] RegionError),
    #[error("the region at {guest:#x} cannot be mapped: {source}")]
    Map { guest: u64, source: io::Error },
    #[error(
        "the region at {guest:#x} cannot have {length:#x} bytes at {user:#x} of the front end: \
         they pass the end of the address space"
    )]
    User { guest: u64, user: u64, length: u64 },
    #[error("memory cannot be mapped: {0}")]
    Table(vm_memory::GuestRegionCollectionError),
    #[error("{count} regions are more than {MAX_REGIONS}")]
    TooMany { count: usize },
    #[error("there is no region of {length:#x} bytes at {guest:#x}")]
    Missing { guest: u64, length: u64 },
}

struct Slot {
    guest: Range,
    user: Range,
    part: FilePart,
    mapping: GuestRegionMmapArc,
    /// Dropped with the mapping.
    _guard: signals::Guard,
    /// Dropped last, and after the map and the region: the last descriptor of guest memory frees all of it.
    _held: Held,
}

type GuestRegionMmapArc = Arc<GuestRegionMmap<()>>;

/// A file of guest memory that a thread closes, unless others hold it as well.
struct Held {
    file: Option<Arc<File>>,
    peer: Peer,
}

impl Held {
    fn new(file: Foreign<File>) -> (Self, Arc<File>) {
        let peer = file.peer();
        let file = Arc::new(file.into_inner());
        (Self { file: Some(file.clone()), peer }, file)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(file) = self.file.take().and_then(Arc::into_inner) {
            drop(Foreign::new(file, Closes::Memory, self.peer));
        }
    }
}

#[derive(Default)]
pub struct Memory {
    /// What can be discarded.
    pub regions: Regions,
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

    /// Bytes that the host has for the files of the guest, each counted once.
    pub fn held(&self) -> u64 {
        let mut seen = Vec::new();
        let files = self.slots.iter().map(|slot| &slot.part).filter(|part| {
            let first = !seen.contains(&part.id);
            seen.push(part.id);
            first
        });
        let blocks = files.map(|part| part.file.metadata().map_or(0, |about| about.blocks()));
        blocks.fold(0, |sum: u64, blocks| sum.saturating_add(blocks.saturating_mul(512)))
    }

    /// Take other memory. On an error there is none: what there was is no longer the guest's, so nothing of
    /// it may be discarded or claimed to be zero.
    pub fn replace(
        &mut self,
        mut regions: impl Iterator<Item = (Description, Foreign<File>)>,
    ) -> Result<(), MemoryError> {
        self.forget();
        regions
            .try_for_each(|(description, file)| self.insert(description, file))
            .and_then(|()| self.map_again())
            .inspect_err(|_| self.clear())
    }

    /// Take one more region. On an error the memory stays as it was, or is lost if it cannot be mapped.
    pub fn add(&mut self, description: Description, file: Foreign<File>) -> Result<(), MemoryError> {
        self.insert(description, file)?;
        self.map_again()
    }

    pub fn remove(&mut self, description: Description) -> Result<(), MemoryError> {
        let (guest, length) = (description.guest_phys_addr, description.memory_size);
        let missing = MemoryError::Missing { guest, length };
        let Some(range) = Range::new(guest, length) else { return Err(missing) };
        let Some(index) = self.slots.iter().position(|slot| slot.guest == range) else { return Err(missing) };
        drop(self.regions.remove(range));
        let removed = self.slots.remove(index);
        let mapped = self.map_again();
        drop(removed);
        mapped
    }

    pub fn clear(&mut self) {
        self.forget();
        self.shared.clear();
    }

    /// Have no memory, and remember which files the guest was seen to share.
    fn forget(&mut self) {
        self.map = GuestMemoryMmap::default();
        self.regions.clear();
        self.slots.clear();
    }

    fn insert(&mut self, given: Description, file: Foreign<File>) -> Result<(), MemoryError> {
        // Made before all that holds the file, so that it is dropped after that.
        let (held, file) = Held::new(file);
        let (guest, length, offset) = (given.guest_phys_addr, given.memory_size, given.mmap_offset);
        let map = |source: io::Error| MemoryError::Map { guest, source };
        if self.slots.len() >= MAX_REGIONS {
            return Err(MemoryError::TooMany { count: self.slots.len().saturating_add(1) });
        }
        let mut region = Region::new(file.clone(), offset, guest, length)?;
        let part = FilePart::new(file.clone(), &region).map_err(map)?;
        let range = region.guest();
        let unmapped = Mapped::new(file, offset, length, &region).map_err(map)?;
        region.coarsen(self.unit)?;
        if self.all_shared || (!region.has_name() && self.shared.contains(&part.id)) {
            region.set_known_shared();
        }
        let user = given.user_addr;
        let user = Range::new(user, length).ok_or(MemoryError::User { guest, user, length })?;
        if self.slots.iter().any(|slot| slot.user.overlaps(user)) {
            return Err(RegionError::Overlap { guest }.into());
        }
        let Mapped { mapping, guard } = unmapped;
        let extent = RegionError::Extent { guest, length, offset };
        let mapping = GuestRegionMmap::new(mapping, GuestAddress(guest)).ok_or(extent)?;
        self.regions.insert(region)?;
        let mapping = mapping.into();
        self.slots.push(Slot { guest: range, user, part, mapping, _guard: guard, _held: held });
        Ok(())
    }

    /// Map what is there now, in the order of the guest's addresses.
    fn map_again(&mut self) -> Result<(), MemoryError> {
        self.slots.sort_by_key(|slot| slot.guest);
        let mappings: Vec<GuestRegionMmapArc> = self.slots.iter().map(|slot| slot.mapping.clone()).collect();
        self.map = if mappings.is_empty() {
            GuestMemoryMmap::default()
        } else {
            GuestMemoryMmap::from_arc_regions(mappings).map_err(|e| {
                self.clear();
                MemoryError::Table(e)
            })?
        };
        // A file that is no longer there, and comes back, has to be seen again.
        self.shared.retain(|id| self.slots.iter().any(|slot| slot.part.id == *id));
        Ok(())
    }

    /// What is at this address was seen to change, so the guest does see the file: if it has no name.
    pub fn written_by_guest(&mut self, address: u64) {
        self.shared.extend(self.regions.seen_to_share(address));
    }

    /// The guest's address for an address of the front end.
    pub fn guest_address(&self, address: u64) -> Option<u64> {
        self.slots.iter().find_map(|slot| {
            let at = address.checked_sub(slot.user.start()).filter(|at| *at < slot.user.length())?;
            slot.guest.start().checked_add(at)
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
            let part_of = |slot: &Slot| Some((slot.part.file.clone(), slot.part.to_file(wanted)?));
            let begins = Range::new(at, 1).ok_or_else(outside)?;
            let slot = self.slots.iter().find(|slot| slot.guest.overlaps(begins));
            let (file, place) = slot.and_then(part_of).ok_or_else(outside)?;
            let (part, later) = rest.split_at_mut(usize::try_from(place.length()).unwrap_or(0));
            file.read_exact_at(part, place.start())?;
            at = at.checked_add(place.length()).ok_or_else(outside)?;
            rest = later;
        }
        Ok(())
    }

    /// Whether these ranges may be touched. Holes in them become memory that this process is charged for,
    /// which is bounded: see charge.rs.
    pub fn may_touch(&mut self, ranges: impl Iterator<Item = Range>) -> bool {
        for range in ranges {
            for Slot { guest, part: file, .. } in &mut self.slots {
                let Some(mut rest) = range.intersection(*guest) else { continue };
                let unit = file.fault_size;
                loop {
                    let at = file.to_file(rest).map_or(0, Range::start);
                    let room = unit.saturating_sub(at.checked_rem(unit).unwrap_or(0));
                    let part = Range::new(rest.start(), rest.length().min(room)).unwrap_or(rest);
                    let number = at.checked_div(unit).unwrap_or(0);
                    let counted = self.charges.has(file, number);
                    if !counted && file.has_hole(part) && !self.charges.add(file, number) {
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

    /// Why a region could not be touched.
    pub fn loss(&self) -> &'static str {
        let cut = |slot: &Slot| {
            let size = slot.part.file.metadata().map_or(0, |about| about.len());
            slot.part.in_file.end() > size
        };
        if self.slots.iter().any(cut) {
            "cannot touch guest memory: its file was truncated by the front end; restart the VMM"
        } else {
            "cannot touch guest memory: its pool of huge pages or its filesystem is full; enlarge that, and restart the VMM"
        }
    }
}

/// A region's memory in this process.
struct Mapped {
    mapping: MmapRegion<()>,
    guard: signals::Guard,
}

impl Mapped {
    fn new(file: Arc<File>, offset: u64, length: u64, region: &Region) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let mapping =
            MmapRegion::from_file(FileOffset::from_arc(file, offset), length).map_err(io::Error::other)?;
        let start = mapping.as_ptr();
        let advise = |advice| {
            // SAFETY: the mapping was made above and has this length; both pieces of advice keep
            // its content.
            match unsafe { libc::madvise(start.cast(), length, advice) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        };
        advise(libc::MADV_DONTDUMP)?;
        // A touched hole is charged as one block, also where Linux gives files huge pages: the
        // kernel asks the mapping that faults (vma_thp_disabled()). A kernel without huge pages
        // does not know this advice.
        advise(libc::MADV_NOHUGEPAGE).or_else(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => Ok(()),
            _ => Err(error),
        })?;
        // What mmap(2) has made of the length, and no byte of a neighbour.
        let page = match region.backing() {
            Some(Backing::Hugetlbfs) => usize::try_from(region.host_page()).unwrap_or(usize::MAX),
            _ => rustix::param::page_size(),
        };
        let whole = length.checked_next_multiple_of(page).unwrap_or(length);
        let guard = signals::Guard::new(start.addr(), whole).ok_or_else(|| io::Error::other("no slot"))?;
        Ok(Self { mapping, guard })
    }
}
