// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What makes a claim false between the discard and the answer.

// Miri has no memfd_create(2).
#![cfg(not(miri))]
#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use balloon_discard::{Backing, Hold, Reason, Region, RegionError, Regions, Request};
use balloon_protocol::{QueueKind, Range};
use rustix::fs::MemfdFlags;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

const MIB: u64 = 1 << 20;
const REPORTING: QueueKind = QueueKind::Reporting;

fn r(start: u64, length: u64) -> Range {
    Range::new(start, length).unwrap()
}

fn filled(bytes: u64) -> File {
    let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(&vec![0x5a; usize::try_from(bytes).unwrap()], 0).unwrap();
    file
}

fn shared(file: &File, offset: u64, guest: u64, length: u64) -> Region {
    let mut region = Region::new(file.try_clone().unwrap(), offset, guest, length).unwrap();
    region.set_known_shared();
    region
}

/// A guest with 8 MiB.
fn guest() -> (Regions, File) {
    let file = filled(8 * MIB);
    let mut regions = Regions::new();
    regions.insert(shared(&file, 0, 0, 8 * MIB)).unwrap();
    (regions, file)
}

fn is_filled(file: &File, at: u64) -> bool {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    byte == [0x5a]
}

/// A report of the first MiB, of which the discard is done.
fn begun(regions: &mut Regions) -> Request {
    let request = regions.begin(REPORTING);
    assert_eq!(regions.discard(&request, r(0, MIB)).discarded, MIB);
    request
}

fn known(regions: &mut Regions, request: Request, range: Range) -> Result<Backing, Reason> {
    regions.answer(request, []).claim(range).known()
}

/// One without anything in between.
fn report(regions: &mut Regions, range: Range) -> (Result<Backing, Reason>, u64) {
    let request = regions.begin(REPORTING);
    let discarded = regions.discard(&request, range).discarded;
    (known(regions, request, range), discarded)
}

#[test]
fn what_was_discarded_is_claimed_and_nothing_else() {
    let (mut regions, _) = guest();
    let request = begun(&mut regions);
    assert_eq!(regions.discard(&request, r(2 * MIB, MIB)).doubt, None);
    let answer = regions.answer(request, []);
    assert_eq!(answer.claim(r(0x1000, 0x1000)).known(), Ok(Backing::Tmpfs));
    for other in [r(MIB, 0x1000), r(MIB - 0x1000, 0x2000), r(0, 3 * MIB), r(2 * MIB - 1, 1)] {
        assert!(!answer.claim(other).is_proven(), "{other:?}");
    }
}

#[test]
fn a_range_over_several_regions() {
    let file = filled(4 * MIB);
    let mut regions = Regions::new();
    // The other way round in the file.
    regions.insert(shared(&file, 0, 2 * MIB, 2 * MIB)).unwrap();
    regions.insert(shared(&file, 2 * MIB, 0, 2 * MIB)).unwrap();
    assert_eq!(regions.total(), 4 * MIB);
    assert_eq!(report(&mut regions, r(MIB, 2 * MIB)), (Ok(Backing::Tmpfs), 2 * MIB));
    assert!(is_filled(&file, MIB) && is_filled(&file, 2 * MIB));
    assert_eq!(report(&mut regions, r(3 * MIB, 2 * MIB)), (Err(Reason::OutsideMemory), MIB));
    assert_eq!(report(&mut regions, r(1 << 40, MIB)), (Err(Reason::OutsideMemory), 0));
    // Steps end at the border, and where a unit of the file ends.
    assert_eq!(regions.step(r(MIB, 2 * MIB), u64::MAX), (r(MIB, MIB), Some(r(2 * MIB, MIB))));
    assert_eq!(
        regions.step(r(MIB + 4096, MIB), MIB / 2),
        (r(MIB + 4096, MIB / 2 - 4096), Some(r(3 * MIB / 2, MIB / 2 + 4096)))
    );
    assert_eq!(regions.step(r(4 * MIB, MIB), MIB), (r(4 * MIB, MIB), None));
    let pieces = regions.pieces(r(MIB, 2 * MIB));
    let starts = |(region, piece): (&Region, Range)| (region.guest().start(), piece);
    let pieces: Vec<(u64, Range)> = pieces.map(starts).collect();
    assert_eq!(pieces, [(0, r(MIB, MIB)), (2 * MIB, r(2 * MIB, MIB))]);
    // A hole in memory ends where the next region starts.
    drop(regions.remove(r(0, 2 * MIB)));
    assert_eq!(regions.step(r(MIB, 2 * MIB), u64::MAX), (r(MIB, MIB), Some(r(2 * MIB, MIB))));
}

#[test]
fn regions_that_overlap_are_refused() {
    let (mut regions, file) = guest();
    let refused = regions.insert(shared(&file, 0, 7 * MIB, MIB));
    assert!(matches!(refused, Err(RegionError::Overlap { guest }) if guest == 7 * MIB), "{refused:?}");
    assert_eq!(report(&mut regions, r(0, MIB)), (Ok(Backing::Tmpfs), MIB), "nothing has changed");
    assert!(regions.remove(r(0, MIB)).is_none());
    assert!(regions.remove(r(0, 8 * MIB)).is_some());
    assert_eq!(regions.total(), 0);
}

#[test]
fn what_is_seen_twice_is_kept() {
    let (mut regions, file) = guest();
    let other = filled(MIB);
    regions.insert(shared(&other, 0, 32 * MIB, MIB)).unwrap();
    assert_eq!(report(&mut regions, r(0, MIB)).0, Ok(Backing::Tmpfs), "another file");
    regions.insert(shared(&file, 8 * MIB - 4096, 16 * MIB, 4096)).unwrap();
    for range in [r(4 * MIB, MIB), r(16 * MIB, 4096)] {
        assert_eq!(report(&mut regions, range), (Err(Reason::Aliased), 0));
    }
    assert!(is_filled(&file, 4 * MIB));
    assert_eq!(report(&mut regions, r(32 * MIB, MIB)).0, Ok(Backing::Tmpfs));
    drop(regions.remove(r(16 * MIB, 4096)));
    assert_eq!(report(&mut regions, r(4 * MIB, MIB)).0, Ok(Backing::Tmpfs));
}

#[test]
fn memory_that_changes_before_the_answer() {
    let (mut regions, file) = guest();
    let request = begun(&mut regions);
    regions.insert(shared(&filled(MIB), 0, 16 * MIB, MIB)).unwrap();
    assert_eq!(known(&mut regions, request, r(0, MIB)), Err(Reason::Ended));
    let request = begun(&mut regions);
    drop(regions.remove(r(16 * MIB, MIB)));
    assert_eq!(known(&mut regions, request, r(0, MIB)), Err(Reason::Ended));
    let request = begun(&mut regions);
    regions.clear();
    regions.insert(shared(&file, 0, 0, 8 * MIB)).unwrap();
    assert_eq!(known(&mut regions, request, r(0, MIB)), Err(Reason::Ended));
}

/// Regions change at any step of requests of both queues, and of memory that is released without one.
#[test]
fn a_table_that_changes_ends_what_was_made_for_it() {
    let mut seed = 11_u64;
    let mut random = |below: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % below
    };
    for round in 0..100 {
        let (mut regions, _old) = guest();
        let new = filled(8 * MIB);
        let requests = [QueueKind::Reporting, QueueKind::Inflate].map(|queue| regions.begin(queue));
        let table = regions.table();
        let (steps, change) = (random(12) + 1, random(12));
        let mut changed = false;
        for step in 0..steps {
            if step == change {
                changed = true;
                match random(3) {
                    0 => regions.clear(),
                    1 => drop(regions.remove(r(0, 8 * MIB))),
                    // A region beside the old one, which then goes.
                    _ => {
                        regions.insert(shared(&new, 0, 16 * MIB, 8 * MIB)).unwrap();
                        regions.clear();
                    }
                }
                regions.insert(shared(&new, 0, 0, 8 * MIB)).unwrap();
            }
            let range = r(random(2000) * 0x1000, (random(48) + 1) * 0x1000);
            let outcome = match random(3) {
                0 => regions.release(table, range),
                n => regions.discard(if n == 1 { &requests[0] } else { &requests[1] }, range),
            };
            assert_eq!(outcome.discarded == 0, changed, "round {round}: {outcome:?}");
            assert_eq!(outcome.doubt == Some(Reason::Ended), changed);
        }
        for request in requests {
            let claim = regions.answer(request, []).claim(r(0, 0x1000));
            assert!(!changed || claim.known() == Err(Reason::Ended));
        }
        let left = new.metadata().unwrap().blocks() * 512;
        assert_eq!(left, 8 * MIB, "round {round}: data of the new table is lost");
    }
}

/// A VMM that makes its table anew, with other memory at the same addresses.
#[test]
fn a_table_of_other_regions_has_ended() {
    let (mut first, _) = guest();
    let old = first.begin(REPORTING);
    let (mut second, file) = guest();
    let new = second.begin(REPORTING);
    assert_eq!(second.release(first.table(), r(0, MIB)).doubt, Some(Reason::Ended));
    assert_eq!(second.discard(&old, r(0, MIB)).doubt, Some(Reason::Ended));
    assert!(is_filled(&file, 0));
    assert_eq!(second.discard(&new, r(0, MIB)).discarded, MIB);
    assert_eq!(known(&mut second, old, r(0, MIB)), Err(Reason::Ended));
    assert_eq!(known(&mut second, new, r(0, MIB)), Ok(Backing::Tmpfs));
}

#[test]
fn rings_and_answers() {
    let (mut regions, file) = guest();
    regions.set_rings([r(4 * MIB + 16, 64)]);
    assert_eq!(report(&mut regions, r(4 * MIB, 4096)), (Err(Reason::DeviceMemory), 0));
    assert!(is_filled(&file, 4 * MIB));
    // A ring that comes, or goes: the device has written to it before.
    let request = begun(&mut regions);
    regions.set_rings([r(0x3010, 64)]);
    let answer = regions.answer(request, []);
    assert_eq!(answer.claim(r(0, MIB)).known(), Err(Reason::DeviceMemory));
    assert!(answer.claim(r(0, 0x3000)).is_proven() && !answer.claim(r(0x3000, 0x1000)).is_proven());
    assert!(answer.claim(r(0x4000, 0x1000)).is_proven());
    // The answer itself, in two parts.
    regions.set_rings([]);
    let request = begun(&mut regions);
    let answer = regions.answer(request, [r(0x1fff, 1), r(0x8000, 2)]);
    let zero = [0x1000, 0x2000, 0x7000, 0x8000, 0x9000].map(|at| answer.claim(r(at, 0x1000)).is_proven());
    assert_eq!(zero, [false, true, true, false, true]);
    // The answer of another queue.
    let request = begun(&mut regions);
    let other = regions.begin(QueueKind::Inflate);
    assert_eq!(regions.answer(other, [r(0x5000, 8)]).claim(r(0, 0x1000)).known(), Err(Reason::OutsideMemory));
    assert_eq!(known(&mut regions, request, r(0x5000, 0x1000)), Err(Reason::DeviceMemory));
}

#[test]
fn pinned_memory() {
    let (mut regions, file) = guest();
    regions.set_pinned([r(MIB, 4096)]);
    assert_eq!(report(&mut regions, r(MIB, 8192)), (Err(Reason::Pinned), 0));
    assert!(is_filled(&file, MIB));
    let request = begun(&mut regions);
    regions.set_pinned([r(0, 4096)]);
    let answer = regions.answer(request, []);
    assert_eq!(answer.claim(r(0, 4096)).known(), Err(Reason::Pinned));
    assert!(answer.claim(r(4096, 4096)).is_proven());
    regions.set_pinned([]);
    assert!(report(&mut regions, r(MIB, 8192)).0.is_ok());
}

#[test]
fn nothing_is_discarded_on_hold() {
    for (hold, reason) in
        [(Hold::Suspended, Reason::Inhibited), (Hold::Logged, Reason::Logged), (Hold::Pinned, Reason::Pinned)]
    {
        let (mut regions, file) = guest();
        let request = begun(&mut regions);
        assert_eq!(regions.held(), None);
        regions.hold(hold, true);
        assert_eq!(regions.held(), Some(hold));
        assert_eq!(regions.discard(&request, r(MIB, MIB)).doubt, Some(reason));
        assert_eq!(regions.release(regions.table(), r(MIB, MIB)).doubt, Some(reason));
        assert!(is_filled(&file, MIB));
        let answer = regions.answer(request, []);
        assert_eq!(answer.claim(r(0, 2 * MIB)).known(), Err(reason));
        assert_eq!(answer.claim(r(0, MIB)).known(), Err(reason), "it was discarded before the hold");
        regions.hold(hold, false);
        assert_eq!(report(&mut regions, r(MIB, MIB)), (Ok(Backing::Tmpfs), MIB));
    }
}

#[test]
fn poison() {
    let (mut regions, file) = guest();
    let request = begun(&mut regions);
    regions.set_poisoned(true);
    assert_eq!(known(&mut regions, request, r(0, MIB)), Err(Reason::Poison));
    assert_eq!(report(&mut regions, r(MIB, MIB)), (Err(Reason::Poison), 0));
    assert!(is_filled(&file, MIB));
    // Inflated pages are not poisoned while they are in the balloon.
    let request = regions.begin(QueueKind::Inflate);
    assert_eq!(regions.discard(&request, r(MIB, MIB)).discarded, MIB);
    assert_eq!(known(&mut regions, request, r(MIB, MIB)), Err(Reason::Poison));
    regions.set_poisoned(false);
    assert!(report(&mut regions, r(MIB, MIB)).0.is_ok());
}

#[test]
fn a_request_that_was_given_up() {
    let (mut regions, _) = guest();
    let old = begun(&mut regions);
    let new = regions.begin(REPORTING);
    assert_eq!(regions.discard(&old, r(0, MIB)).discarded, 0);
    assert_eq!(known(&mut regions, old, r(0, MIB)), Err(Reason::Ended));
    assert_eq!(regions.discard(&new, r(0, MIB)).discarded, MIB);
    assert_eq!(known(&mut regions, new, r(0, MIB)), Ok(Backing::Tmpfs));
    let released = regions.release(regions.table(), r(MIB, MIB));
    assert_eq!((released.discarded, released.doubt), (MIB, None));
    let request = regions.begin(REPORTING);
    assert!(known(&mut regions, request, r(MIB, MIB)).is_err(), "released for no request");
}
