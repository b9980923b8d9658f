// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory of the guest for which the kernel charges this process: what it takes from the host by touching holes.
//!
//! The charge lasts as long as the file, which the front end can keep after it has sent another table or has
//! connected again. So a file counts until it is deleted, which inotify(7) reports: a watch does not keep a file.
//!
//! Of a file that has a name, or had one, the kernel can report that too early: at the first close
//! without a link, while another descriptor still keeps the file. So it also counts for
//! [`AT_LEAST`] after its last use.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::holes::FilePart;
use balloon_discard::FileId;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{AtFlags, MemfdFlags, StatxFlags};

/// The most memory, in units of each size, for which this process is charged because it touches holes in guest
/// memory: rings and answers, which the guest may have placed in memory that it never wrote.
const MAX_FAULTED: u64 = 16 << 20;
/// How many units of each size these are at least: rings must fit where the host has huge pages only.
const MIN_FAULTED_UNITS: u64 = 64;
/// How long a file counts after its last use, where its deletion is unknown or may have been
/// reported too early.
const AT_LEAST: Duration = Duration::from_secs(600);

pub struct Charges {
    /// Units of files that this process took from the host by touching them: by size, the number of
    /// the file and that of the unit. A unit is counted once: however often it is discarded and
    /// touched, it is charged once at a time.
    units: BTreeMap<u64, BTreeSet<(u64, u64)>>,
    /// The files of these units, by numbers that are used once.
    files: BTreeMap<u64, Counted>,
    next: u64,
    /// Reports files that are deleted.
    inotify: Option<OwnedFd>,
    /// The devices of filesystems in which no file has a name.
    nameless: Vec<(u32, u32)>,
}

/// A file that counts.
struct Counted {
    id: FileId,
    /// The number of its watch, which belongs to this inode only: another file can have the same id
    /// later. `None`: this process may not watch it, or the watch has ended.
    watch: Option<i32>,
    /// Its watch ends with the file.
    nameless: bool,
    used: Instant,
}

impl Default for Charges {
    fn default() -> Self {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).ok();
        Self { units: BTreeMap::new(), files: BTreeMap::new(), next: 0, inotify, nameless: nameless() }
    }
}

impl Charges {
    /// Count one unit of a region's file. `false`: there are too many, and it must not be touched.
    pub fn add(&mut self, part: &mut FilePart, unit: u64) -> bool {
        let size = part.fault_size;
        if self.is_full(size) {
            self.forget_deleted();
        }
        // Without room for its first unit a file is not watched: of these there is no bound.
        if self.is_full(size) && !self.files.values().any(|file| file.id == part.id) {
            return false;
        }
        let watch = self.watch(part);
        let same = self.files.iter().find(|(_, file)| (file.id, file.watch) == (part.id, watch));
        part.counted = same.map(|(number, _)| *number);
        if self.has(part, unit) {
            return true;
        }
        if self.is_full(size) {
            return false;
        }
        let number = part.counted.unwrap_or(self.next);
        if part.counted.replace(number).is_none() {
            self.next = self.next.saturating_add(1);
            let nameless = self.nameless.contains(&part.device);
            self.files.insert(number, Counted { id: part.id, watch, nameless, used: Instant::now() });
        }
        self.units.entry(size).or_default().insert((number, unit))
    }

    /// Whether a unit is counted, of a file that is in use.
    pub fn has(&mut self, part: &FilePart, unit: u64) -> bool {
        let Some(number) = part.counted else { return false };
        let Some(file) = self.files.get_mut(&number) else { return false };
        file.used = Instant::now();
        self.units.get(&part.fault_size).is_some_and(|units| units.contains(&(number, unit)))
    }

    fn is_full(&self, size: u64) -> bool {
        let count = self.units.get(&size).map_or(0, BTreeSet::len);
        let limit = MAX_FAULTED.checked_div(size).unwrap_or(0).max(MIN_FAULTED_UNITS);
        u64::try_from(count).unwrap_or(u64::MAX) >= limit
    }

    /// The number of the watch of a file, which is the same for each of its descriptors.
    fn watch(&self, part: &FilePart) -> Option<i32> {
        let path = format!("/proc/self/fd/{}", part.file.as_raw_fd());
        let watch = |inotify: &OwnedFd| inotify::add_watch(inotify, path, WatchFlags::DELETE_SELF).ok();
        self.inotify.as_ref().and_then(watch)
    }

    fn forget_deleted(&mut self) {
        let mut ended = BTreeSet::new();
        if let Some(inotify) = &self.inotify {
            let mut buffer = [MaybeUninit::uninit(); 4096];
            let mut events = inotify::Reader::new(inotify.as_fd(), &mut buffer);
            while let Ok(event) = events.next() {
                if event.events().contains(ReadFlags::IGNORED) {
                    ended.insert(event.wd());
                }
            }
        }
        self.files.retain(|_, file| {
            let has_ended = file.watch.take_if(|watch| ended.contains(watch)).is_some();
            file.watch.is_some() || (!(has_ended && file.nameless) && file.used.elapsed() < AT_LEAST)
        });
        let files = &self.files;
        self.units.values_mut().for_each(|units| units.retain(|(file, _)| files.contains_key(file)));
    }
}

/// The devices of the filesystems that have all memfds: one of small pages, and one of each size of
/// huge pages.
fn nameless() -> Vec<(u32, u32)> {
    let sizes = (16..=34).map(|shift: u32| libc::MFD_HUGETLB | shift << libc::MFD_HUGE_SHIFT);
    let device = |flags| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::from_bits_retain(flags);
        let file = rustix::fs::memfd_create(c"vhost-user-balloon", flags).ok()?;
        let about = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).ok()?;
        Some((about.stx_dev_major, about.stx_dev_minor))
    };
    std::iter::once(0).chain(sizes).filter_map(device).collect()
}
