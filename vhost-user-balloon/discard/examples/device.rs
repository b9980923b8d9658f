// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A balloon in a VMM of your own: reports and inflate requests, with the claims that bits 6 and 7 make.
//!
//! The VMM brings queues and memory. Here a memfd is the guest's memory, and requests are plain slices.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;

use balloon_discard::Region;
use balloon_protocol::{
    Bitmap, Claim, Features, MAX_PFNS, PAGE_SHIFT, PAGE_SIZE, QueueMap, Range, Reason, parse_pfns, runs,
};

struct Balloon {
    features: Features,
    /// One for each mapping of guest memory, as they are in the VMM's own table.
    regions: Vec<Region>,
}

impl Balloon {
    /// What the driver has accepted decides about queues and claims.
    fn new(accepted: u64, regions: Vec<Region>) -> Self {
        Self { features: Features::negotiated(Features::from_bits(accepted)), regions }
    }

    /// Discard a range of guest addresses. It may span regions.
    fn discard(&self, range: Range) -> Claim {
        let mut covered = 0;
        let mut claim = None;
        for region in &self.regions {
            let Some(part) = range.intersection(region.guest()) else { continue };
            let found = region.discard(part).claim;
            covered += part.length();
            claim = Some(claim.map_or(found, |before: Claim| before.and(found)));
        }
        match claim {
            Some(claim) if covered == range.length() => claim,
            _ => Claim::Unproven(Reason::OutsideMemory),
        }
    }

    /// A buffer of the reporting queue; returns its used length.
    fn reported(&self, address: u64, length: u32) -> u32 {
        let claim = match Range::new(address, length.into()) {
            Some(range) if range.is_aligned(PAGE_SIZE) => self.discard(range),
            _ => Claim::Unproven(Reason::Misaligned),
        };
        if self.features.contains(Features::DEVICE_INIT_REPORTED) { claim.used_length(length) } else { 0 }
    }

    /// A chain of the inflate queue: its list, and the buffer for the answer. Returns the used length.
    fn inflated(&self, list: &[u8], answer: &mut [u8]) -> Result<usize, Box<dyn Error>> {
        let pfns: Vec<u32> = parse_pfns(list)?.collect();
        let mut bitmap = Bitmap::new(pfns.len());
        for run in runs(&pfns) {
            let start = u64::from(run.first) << PAGE_SHIFT;
            let range = Range::new(start, u64::from(run.pages) << PAGE_SHIFT).ok_or("no pages")?;
            if self.discard(range).is_proven() {
                let pages = pfns.iter().enumerate().filter(|(_, pfn)| run.contains(**pfn));
                pages.for_each(|(n, _)| bitmap.set(n));
            }
        }
        let bytes = bitmap.as_bytes();
        let offered = self.features.contains(Features::DEVICE_INIT_ON_INFLATE) && pfns.len() <= MAX_PFNS;
        match answer.get_mut(..bytes.len()) {
            Some(answer) if offered => answer.copy_from_slice(bytes),
            _ => return Ok(0),
        }
        Ok(bytes.len())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?);
    memory.set_len(64 << 20)?;
    memory.write_all_at(&vec![7; 8 << 20], 0)?;
    let mut region = Region::new(memory.try_clone()?, 0, 0, 64 << 20)?;
    // This VMM has mapped it shared: the guest sees a hole in the file.
    region.set_known_shared();
    let balloon = Balloon::new(0b1110_0011, vec![region]);
    println!("{} queues", QueueMap::new(balloon.features).count());

    assert_eq!(balloon.reported(4 << 20, 4 << 20), 4 << 20);
    assert_eq!(balloon.reported(62 << 20, 4 << 20), 0, "a part of it is no memory");

    let list: Vec<u8> = [3_u32, 2, 0x8000_0000].iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
    let mut answer = [0; 32];
    assert_eq!(balloon.inflated(&list, &mut answer)?, 1);
    assert_eq!(answer[0], 0b011);

    let mut page = [1; 4096];
    memory.read_exact_at(&mut page, 2 << PAGE_SHIFT)?;
    assert!(page.iter().all(|byte| *byte == 0));
    println!("pages 2 and 3 and the report read as zero");
    Ok(())
}
