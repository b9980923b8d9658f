// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A balloon in a VMM of your own: reports and inflate requests, with the claims that bits 6 and 7 make.
//!
//! The VMM brings queues and memory. Here a memfd is the guest's memory, mapped shared at address 0, and requests are
//! plain slices. The list of what a device must do is in docs/how-to/your-vmm.md.

use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;

use balloon_discard::{Claim, Hold, Reason, Region, Regions};
use balloon_protocol::{
    Bitmap, Config, Features, MAX_PFNS, PAGE_SHIFT, PAGE_SIZE, QueueKind, QueueMap, Range, parse_pfns, runs,
};

struct Balloon {
    features: Features,
    config: Config,
    /// One for each mapping of guest memory, as they are in the VMM's own table.
    regions: Regions,
    memory: File,
}

impl Balloon {
    /// The driver has written to its configuration.
    fn configure(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
        self.config.write(offset, bytes)?;
        let poison = self.features.contains(Features::PAGE_POISON);
        self.regions.set_poisoned(poison && self.config.poison_val != 0);
        Ok(())
    }

    /// A buffer of the reporting queue: its parts. Returns its used length.
    fn reported(&mut self, parts: &[(u64, u32)]) -> u32 {
        let ranges: Vec<Option<Range>> =
            parts.iter().map(|(at, len)| Range::new(*at, (*len).into())).collect();
        let request = self.regions.begin(QueueKind::Reporting);
        for range in ranges.iter().flatten().filter(|range| range.is_aligned(PAGE_SIZE)) {
            self.regions.discard(&request, *range);
        }
        let answer = self.regions.answer(request, []);
        let claims = ranges.into_iter().map(|range| match range {
            Some(range) if range.is_aligned(PAGE_SIZE) => answer.claim(range),
            _ => Claim::unproven(Reason::Misaligned),
        });
        let claim = claims.reduce(Claim::and).unwrap_or(Claim::unproven(Reason::Malformed));
        let length = parts.iter().try_fold(0_u32, |sum, (_, length)| sum.checked_add(*length)).unwrap_or(0);
        if self.features.contains(Features::DEVICE_INIT_REPORTED) { claim.used_length(length) } else { 0 }
    }

    /// A chain of the inflate queue: its list, and address and length of the buffer for the answer. Returns the used
    /// length.
    fn inflated(&mut self, list: &[u8], (at, room): (u64, u32)) -> Result<u32, Box<dyn Error>> {
        let pfns: Vec<u32> = parse_pfns(list)?.collect();
        let request = self.regions.begin(QueueKind::Inflate);
        for run in runs(&pfns) {
            let range = Range::new(u64::from(run.first) << PAGE_SHIFT, u64::from(run.pages) << PAGE_SHIFT);
            if let Some(range) = range {
                self.regions.discard(&request, range);
            }
        }
        let length = u32::try_from(Bitmap::bytes_for(pfns.len()))?;
        let offered = self.features.contains(Features::DEVICE_INIT_ON_INFLATE) && pfns.len() <= MAX_PFNS;
        let Some(place) = Range::new(at, length.into()).filter(|_| offered && length <= room) else {
            return Ok(0);
        };
        let mut bitmap = Bitmap::new(pfns.len());
        let answer = self.regions.answer(request, [place]);
        for (n, pfn) in pfns.iter().enumerate() {
            let page = Range::new(u64::from(*pfn) << PAGE_SHIFT, PAGE_SIZE).ok_or("no page")?;
            if answer.claim(page).is_proven() {
                bitmap.set(n);
            }
        }
        self.memory.write_all_at(bitmap.as_bytes(), place.start())?;
        Ok(length)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let memory = File::from(rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC)?);
    memory.write_all_at(&vec![7; 64 << 20], 0)?;
    let mut region = Region::new(memory.try_clone()?, 0, 0, 64 << 20)?;
    region.set_known_shared();
    let mut regions = Regions::new();
    regions.insert(region)?;
    regions.set_rings(Range::new(0x10_0000, 0x3000));
    let features = Features::negotiated(Features::from_bits(0b1111_0011));
    let mut balloon = Balloon { features, config: Config::default(), regions, memory };
    println!("{} queues", QueueMap::new(features).count());

    assert_eq!(balloon.reported(&[(4 << 20, 2 << 20), (8 << 20, 2 << 20)]), 4 << 20);
    assert_eq!(balloon.reported(&[(62 << 20, 4 << 20)]), 0, "a part of it is no memory");
    assert_eq!(balloon.reported(&[(0x10_0000, 1 << 20)]), 0, "a ring is in there");
    balloon.configure(12, &[0xaa; 4])?;
    assert_eq!(balloon.reported(&[(16 << 20, 1 << 20)]), 0, "the driver poisons pages");
    balloon.configure(12, &[0; 4])?;
    balloon.regions.hold(Hold::Pinned, true);
    assert_eq!(balloon.reported(&[(16 << 20, 1 << 20)]), 0, "a device is passed through");
    balloon.regions.hold(Hold::Pinned, false);

    let list: Vec<u8> = [3_u32, 2, 0x8000_0000, 4].iter().flat_map(|pfn| pfn.to_le_bytes()).collect();
    // The answer is in page 4.
    assert_eq!(balloon.inflated(&list, (4 << PAGE_SHIFT, 32))?, 1);
    let mut pages = [1; 0x2001];
    balloon.memory.read_exact_at(&mut pages, 2 << PAGE_SHIFT)?;
    assert!(pages.iter().take(0x2000).all(|byte| *byte == 0) && pages.last() == Some(&0b0011));
    println!("pages 2 and 3 and the reports read as zero");
    Ok(())
}
