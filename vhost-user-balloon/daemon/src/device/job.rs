// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A request of the driver that is being worked on.

use balloon_discard::Request;
use balloon_protocol::{PAGE_SHIFT, QueueKind, Range, Run};

use crate::ring::Chain;

/// How far a chain is done.
pub enum Progress {
    More,
    /// The device keeps it.
    Held,
    /// It goes back with this used length.
    Used(u32),
}

/// A chain that is being worked on.
pub struct Job {
    pub kind: QueueKind,
    pub chain: Chain,
    /// What is known of the memory that is discarded for it.
    pub request: Option<Request>,
    pub pfns: Vec<u32>,
    /// How much memory the driver has named; what is outside of memory is none.
    pub received: u64,
    /// What is still to be discarded, the next one last.
    pub todo: Vec<Range>,
    pub discarded: u64,
    /// Nothing is claimed: it is malformed, or not all of it was to be discarded.
    pub refused: bool,
}

impl Job {
    pub fn new(kind: QueueKind, chain: Chain) -> Self {
        let (request, pfns, todo) = (None, Vec::new(), Vec::new());
        Self { kind, chain, request, pfns, received: 0, todo, discarded: 0, refused: false }
    }
}

pub fn total(parts: &[(u64, u32)]) -> u64 {
    parts.iter().fold(0, |sum, (_, length)| sum.saturating_add(u64::from(*length)))
}

/// The memory of a run of pages.
pub fn range_of(run: Run) -> Option<Range> {
    Range::new(u64::from(run.first) << PAGE_SHIFT, u64::from(run.pages) << PAGE_SHIFT)
}

/// The pages of a range, if they have page frame numbers.
pub fn whole_run(range: Range) -> Option<Run> {
    let first = u32::try_from(range.start() >> PAGE_SHIFT).ok()?;
    Some(Run { first, pages: u32::try_from(range.length() >> PAGE_SHIFT).ok()? })
}
