// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest memory as rust-vmm's `vm-memory` has it.

use std::any::Any;
use std::sync::Arc;

use vm_memory::bitmap::Bitmap;
use vm_memory::{FileOffset, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use crate::claim::{Backing, Reason};
use crate::error::RegionError;
use crate::file::{backing_of, page_size};
use crate::region::Region;
use crate::regions::Regions;

impl Regions {
    /// Have the memory that this VMM has mapped for its guest, instead of what there was. Call it again when memory is
    /// plugged or unplugged: until then the old mappings are kept.
    ///
    /// Private anonymous memory is claimed to be zero, and so are files that are mapped shared. A file that is mapped
    /// private is discarded without a claim.
    ///
    /// Returns why mappings are left out; nothing is discarded there.
    #[must_use = "nothing is discarded of a mapping that is left out"]
    pub fn set_memory<B>(&mut self, memory: &GuestMemoryMmap<B>) -> Vec<RegionError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        let keeps: Arc<dyn Any + Send + Sync> = Arc::new(memory.clone());
        self.clear();
        let made = memory.iter().map(|mapped| region_of(mapped, keeps.clone()));
        made.filter_map(|region| region.and_then(|region| self.insert(region)).err()).collect()
    }
}

fn region_of<B: Bitmap>(
    mapped: &GuestRegionMmap<B>,
    keeps: Arc<dyn Any + Send + Sync>,
) -> Result<Region, RegionError> {
    let (guest, length, flags) = (mapped.start_addr().0, mapped.len(), mapped.flags());
    let file = mapped.file_offset();
    if !mapped.owned() {
        // Its flags are what somebody wrote beside the pointer.
        return Err(RegionError::Mapping { guest });
    }
    if flags & libc::MAP_ANONYMOUS != 0 && file.is_some() {
        // Linux ignores the file of an anonymous mapping, so the guest does not see it.
        return Err(RegionError::Mapping { guest });
    }
    if flags & libc::MAP_SHARED != 0 {
        let file = file.ok_or(RegionError::Mapping { guest })?;
        let mut region = Region::new(file.arc().clone(), file.start(), guest, length)?;
        region.set_known_shared();
        return Ok(region);
    }
    let page = page_of(flags, file).ok_or(RegionError::Mapping { guest })?;
    let reads_as = file.map_or(Ok(Backing::Anonymous), |_| Err(Reason::PrivateFile));
    Region::mapping(mapped.as_ptr(), length, guest, page, reads_as, Some(keeps))
}

/// The page size of a private mapping.
fn page_of(flags: i32, file: Option<&FileOffset>) -> Option<u64> {
    if flags & libc::MAP_HUGETLB != 0 {
        let shift = flags.cast_unsigned() >> libc::MAP_HUGE_SHIFT & 0x3f;
        return 1_u64.checked_shl(shift).filter(|_| shift != 0);
    }
    let Some(file) = file else { return Some(page_size()) };
    let about = rustix::fs::fstatfs(file.file()).ok()?;
    // The types of these fields are not the same on every architecture.
    #[allow(clippy::useless_conversion)]
    let found = backing_of(i64::try_from(about.f_type).ok()?, u64::try_from(about.f_bsize).ok()?);
    Some(match found {
        Some((Backing::Hugetlbfs, block)) => block,
        _ => page_size(),
    })
}
