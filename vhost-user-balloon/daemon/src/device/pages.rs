// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which pages are in the balloon, where a page of the host has several of them.

use balloon_discard::Reason;
use balloon_protocol::{Features, PAGE_SIZE, Range, Run};

use super::job::{range_of, whole_run};
use super::state::Device;

impl Device {
    /// Whether pages in the balloon stay there until a deflate request. Without that it can be using
    /// other parts of a host page by now, and only what comes in one request counts.
    pub(super) fn remembers(&self) -> bool {
        self.features.contains(Features::MUST_TELL_HOST)
    }

    /// What can be discarded because of a run of pages in the balloon. `seen`: the host page that was looked at
    /// last.
    pub(super) fn targets(&self, run: Run, seen: &mut Option<Range>, targets: &mut Vec<Range>) {
        let Some(range) = range_of(run) else { return };
        let mut outside = range.length();
        for (region, piece) in self.memory.regions.pieces(range) {
            outside = outside.saturating_sub(piece.length());
            if region.host_page() <= PAGE_SIZE {
                targets.push(piece);
            } else if self.remembers() {
                let touched = region.touched_pages(piece);
                let Ok(step) = usize::try_from(region.host_page()) else { continue };
                for start in touched.into_iter().flat_map(|t| (t.start()..t.end()).step_by(step)) {
                    let Some(page) = Range::new(start, region.host_page()) else { continue };
                    // Runs are in order: another part of the same page has just been looked at.
                    if seen.replace(page) != Some(page) && self.is_in_balloon(page) {
                        targets.push(page);
                    }
                }
            } else {
                let whole = region.whole_pages(piece);
                let part = piece.length().saturating_sub(whole.map_or(0, Range::length));
                self.metrics.skipped.add(Reason::PartOfHostPage.label(), part);
                targets.extend(whole);
            }
        }
        self.metrics.skipped.add(Reason::OutsideMemory.label(), outside);
    }

    /// Whether a page of it has left the balloon since its request was read: its host page is in use.
    pub(super) fn came_back(&self, range: Range) -> bool {
        let large =
            self.memory.regions.at(range.start()).is_some_and(|region| region.host_page() > PAGE_SIZE);
        large && self.remembers() && !self.is_in_balloon(range)
    }

    /// Whether all of a range is in the balloon.
    fn is_in_balloon(&self, range: Range) -> bool {
        let is_current = self.pages_of == self.memory.regions.table();
        is_current && whole_run(range).is_some_and(|run| self.in_balloon.contains(run))
    }
}
