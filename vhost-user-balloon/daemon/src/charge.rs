// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of the guest for which the kernel charges this process: what it takes from the host by touching holes.
//!
//! The charge lasts as long as the file, which the front end can keep after it has sent another table or has
//! connected again. So a file counts until it is deleted, which inotify(7) reports: a watch does not keep a file.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::holes::FilePart;
use balloon_discard::FileId;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

/// The most memory, in units of each size, for which this process is charged because it touches holes in guest
/// memory: rings and answers, which the guest may have placed in memory that it never wrote.
const MAX_FAULTED: u64 = 16 << 20;
/// How many units of each size these are at least: rings must fit where the host has huge pages only.
const MIN_FAULTED_UNITS: u64 = 64;
/// How long a file counts that cannot be watched, because this process may not read it.
const UNWATCHED: Duration = Duration::from_secs(600);

pub struct Charges {
    /// Units of files that this process took from the host by touching them: by size, each by its number.
    /// A unit is counted once: however often it is discarded and touched, it is charged once at a time.
    units: BTreeMap<u64, BTreeSet<(FileId, u64)>>,
    /// Reports files that are deleted.
    inotify: Option<OwnedFd>,
    /// The files that are watched, by the number of the watch.
    watches: BTreeMap<i32, FileId>,
    /// Those that this process may not watch, and since when they count.
    unwatched: BTreeMap<FileId, Instant>,
}

impl Default for Charges {
    fn default() -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        Self { units: BTreeMap::new(), inotify, watches: BTreeMap::new(), unwatched: BTreeMap::new() }
    }
}

impl Charges {
    /// Count one unit of a region's file. `false`: there are too many, and it must not be touched.
    pub fn add(&mut self, part: &FilePart, unit: u64) -> bool {
        let size = part.fault_size;
        let name = (part.id, unit);
        if self.has(size, name) {
            return true;
        }
        if self.is_full(size) {
            self.forget_deleted();
        }
        if self.is_full(size) {
            return false;
        }
        self.watch(part);
        self.units.entry(size).or_default().insert(name)
    }

    /// Whether a unit is counted.
    pub fn has(&self, size: u64, name: (FileId, u64)) -> bool {
        self.units.get(&size).is_some_and(|units| units.contains(&name))
    }

    fn is_full(&self, size: u64) -> bool {
        let count = self.units.get(&size).map_or(0, BTreeSet::len);
        let limit = MAX_FAULTED.checked_div(size).unwrap_or(0).max(MIN_FAULTED_UNITS);
        u64::try_from(count).unwrap_or(u64::MAX) >= limit
    }

    fn watch(&mut self, part: &FilePart) {
        let file = part.id;
        if self.watches.values().any(|watched| *watched == file) || self.unwatched.contains_key(&file) {
            return;
        }
        let path = format!("/proc/self/fd/{}", part.file.as_raw_fd());
        let watch = |inotify: &OwnedFd| inotify::add_watch(inotify, path, WatchFlags::DELETE_SELF).ok();
        match self.inotify.as_ref().and_then(watch) {
            Some(number) => drop(self.watches.insert(number, file)),
            None => drop(self.unwatched.insert(file, Instant::now())),
        }
    }

    fn forget_deleted(&mut self) {
        let mut gone: Vec<FileId> = Vec::new();
        if let Some(inotify) = &self.inotify {
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(inotify.as_fd(), &mut buffer);
            while let Ok(event) = events.next() {
                if event.events().contains(ReadFlags::IGNORED) {
                    gone.extend(self.watches.remove(&event.wd()));
                }
            }
        }
        let old = self.unwatched.iter().filter(|(_, since)| since.elapsed() >= UNWATCHED);
        gone.extend(old.map(|(file, _)| *file));
        self.unwatched.retain(|file, _| !gone.contains(file));
        self.units.values_mut().for_each(|units| units.retain(|(file, _)| !gone.contains(file)));
    }
}
