// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A queue of the device and the descriptors that go with it.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use balloon_discard::rings_of;
use balloon_protocol::Range;
use rustix::io::Errno;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use crate::call::Call;
use crate::signals;
use crate::threads::Foreign;

/// The largest ring that a front end may ask for. It bounds the time that one chain can take.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// What a driver has put into a ring.
#[derive(Debug, Default)]
pub struct Chain {
    pub head: u16,
    /// What the device may read: address and length.
    pub readable: Vec<(u64, u32)>,
    /// What the device may write.
    pub writable: Vec<(u64, u32)>,
    /// It has no end, too many parts, or parts in the wrong order.
    pub malformed: bool,
}

/// What came of looking at a ring's kick.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kick {
    Yes,
    No,
    /// The descriptor is at its end: no kick follows.
    Hangup,
}

#[derive(Debug)]
pub struct Ring {
    queue: Queue,
    kick: Option<Foreign<File>>,
    call: Option<Call>,
    error: Option<Call>,
    enabled: bool,
    broken: bool,
    addressed: bool,
    /// It may hold entries without a later kick: it has been started or enabled since it was looked at.
    pending: bool,
    /// The index of the available ring when it was looked at last, since it was set up.
    index: Option<u16>,
}

impl Ring {
    pub fn new() -> Result<Self, virtio_queue::Error> {
        Ok(Self {
            queue: Queue::new(MAX_QUEUE_SIZE)?,
            kick: None,
            call: None,
            error: None,
            enabled: false,
            broken: false,
            addressed: false,
            pending: false,
            index: None,
        })
    }

    /// Back to the state before it was set up.
    pub fn reset(&mut self) {
        self.stop();
        self.queue.reset();
        self.addressed = false;
        self.enabled = false;
        self.call = None;
        self.error = None;
    }

    /// Use nothing of it any more; what was set up stays.
    pub fn stop(&mut self) {
        self.queue.set_ready(false);
        self.kick = None;
        self.index = None;
        self.broken = false;
        self.pending = false;
    }

    pub fn set_size(&mut self, size: u32) -> bool {
        match u16::try_from(size) {
            Ok(size) if size != 0 && size <= MAX_QUEUE_SIZE && size.is_power_of_two() => {
                self.queue.set_size(size);
                true
            }
            _ => false,
        }
    }

    /// Until [`Ring::take_up`] nothing is read or written there.
    pub fn set_addresses(
        &mut self,
        descriptors: u64,
        available: u64,
        used: u64,
    ) -> Result<(), virtio_queue::Error> {
        self.addressed = false;
        self.queue.set_ready(false);
        self.queue.try_set_desc_table_address(GuestAddress(descriptors))?;
        self.queue.try_set_avail_ring_address(GuestAddress(available))?;
        self.queue.try_set_used_ring_address(GuestAddress(used))?;
        self.broken = false;
        self.index = None;
        self.addressed = true;
        Ok(())
    }

    /// Begin where the used ring ends, which is known only there: after a stop, or when another device has
    /// used it before.
    pub fn take_up(&mut self, memory: &GuestMemoryMmap<()>) -> Result<(), virtio_queue::Error> {
        let index = self.queue.used_idx(memory, std::sync::atomic::Ordering::Acquire)?;
        self.queue.set_next_used(index.0);
        self.start();
        Ok(())
    }

    pub fn set_base(&mut self, base: u16) {
        self.queue.set_next_avail(base);
    }

    pub fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Allow or forbid its use.
    pub fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
        self.pending |= enabled;
    }

    /// Whether it has been started, is enabled and makes sense.
    pub fn is_running(&self) -> bool {
        self.queue.ready() && self.enabled && !self.broken
    }

    pub fn is_started(&self) -> bool {
        self.queue.ready()
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// For people.
    pub fn state(&self) -> &'static str {
        match (self.broken, self.is_started(), self.enabled) {
            (true, _, _) => "broken",
            (_, false, _) => "stopped",
            (_, _, false) => "disabled",
            _ => "running",
        }
    }

    /// Look at the index of the available ring. Where it is, if it is another one than before: then
    /// a writer changes it, while what a file held when the ring was set up is always the same.
    pub fn watch(&mut self, memory: &GuestMemoryMmap<()>) -> Option<u64> {
        if !self.is_started() {
            return None;
        }
        let index = self.queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire).ok()?.0;
        let before = self.index.replace(index)?;
        // Behind the flags.
        self.queue.avail_ring().checked_add(2).filter(|_| before != index)
    }

    /// The memory it is in may be another file now.
    pub fn forget_index(&mut self) {
        self.index = None;
    }

    fn start(&mut self) {
        if self.addressed && self.kick.is_some() {
            self.queue.set_ready(true);
            self.pending = true;
        }
    }

    /// Whether to look at it without a kick: once after it was started or enabled, and not
    /// before it is running. A kick from before that may have been taken, and a driver that waits for an
    /// answer makes no other.
    pub fn take_pending(&mut self) -> bool {
        self.is_running() && std::mem::take(&mut self.pending)
    }

    /// What the driver kicks; an eventfd that does not block.
    pub fn set_kick(&mut self, file: Option<Foreign<File>>) {
        self.kick = file;
        self.broken = false;
        self.index = None;
        self.start();
    }

    /// What the driver is called by. It is called at once: a device that was here before may have ended
    /// between the last answer and the call.
    pub fn set_call(&mut self, file: Option<Call>) {
        self.call = file;
        self.call();
    }

    pub fn set_error(&mut self, file: Option<Call>) {
        self.error = file;
    }

    pub fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    /// Take the kick, without waiting.
    pub fn take_kick(&mut self) -> Kick {
        let Some(kick) = self.kick.as_ref().filter(|_| signals::may_touch_events()) else { return Kick::No };
        let mut counter = [0; 8];
        match rustix::io::read(&**kick, &mut counter) {
            Ok(8) => Kick::Yes,
            Err(Errno::AGAIN) => Kick::No,
            Err(Errno::INTR) => {
                signals::note_interrupted_call();
                Kick::No
            }
            _ => {
                self.kick = None;
                Kick::Hangup
            }
        }
    }

    pub fn pop(&mut self, memory: &GuestMemoryMmap<()>) -> Result<Option<Chain>, virtio_queue::Error> {
        if !self.is_running() {
            return Ok(None);
        }
        let head = match self.queue.iter(memory) {
            Ok(mut available) => available.next().map(|chain| chain.head_index()),
            Err(error) => {
                self.fail();
                return Err(error);
            }
        };
        let Some(head) = head else { return Ok(None) };
        let mut chain = Chain { head, ..Chain::default() };
        let mut next = head;
        for _ in 0..self.queue.size() {
            // Only the table itself is read: indirect ones were not offered, and could be in holes of memory.
            let entry = (next < self.queue.size())
                .then(|| self.queue.desc_table().checked_add(u64::from(next) * 16))
                .flatten()
                .and_then(|at| memory.read_obj::<Descriptor>(GuestAddress(at)).ok());
            let Some(entry) = entry else { break };
            let writable = entry.is_write_only();
            if entry.refers_to_indirect_table() || (!writable && !chain.writable.is_empty()) {
                break;
            }
            let parts = if writable { &mut chain.writable } else { &mut chain.readable };
            parts.push((entry.addr().0, entry.len()));
            if !entry.has_next() {
                return Ok(Some(chain));
            }
            next = entry.next();
        }
        chain.malformed = true;
        Ok(Some(chain))
    }

    pub fn step_back(&mut self) {
        self.queue.go_to_previous_position();
    }

    pub fn push(
        &mut self,
        memory: &GuestMemoryMmap<()>,
        head: u16,
        length: u32,
    ) -> Result<(), virtio_queue::Error> {
        let done = self.queue.add_used(memory, head, length);
        if done.is_err() {
            self.fail();
        }
        done
    }

    /// Call the driver, without waiting.
    pub fn call(&mut self) {
        if let Some(call) = &self.call
            && !call.send()
        {
            self.call = None;
        }
    }

    /// Stop looking at it until it is set up anew.
    pub fn fail(&mut self) {
        self.broken = true;
        if let Some(error) = &self.error {
            error.send();
        }
    }

    pub fn areas(&self) -> impl Iterator<Item = Range> {
        let addressed = self.addressed;
        rings_of(&self.queue).filter(move |_| addressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> Option<Foreign<File>> {
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let event = File::from(rustix::event::eventfd(0, flags).unwrap());
        let (closes, peer) = (crate::threads::Closes::Descriptors, crate::threads::Peer::new());
        Some(Foreign::new(event, closes, peer))
    }

    /// If it were pending twice, the serving thread would loop for ever.
    #[test]
    fn a_ring_is_pending_once_and_only_while_it_runs() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
        let mut ring = Ring::new().unwrap();
        ring.set_size(128);
        assert!(!ring.take_pending());
        ring.set_enabled(true);
        assert!(!ring.take_pending(), "not started");
        ring.set_addresses(0, 0x1000, 0x2000).unwrap();
        ring.take_up(&memory).unwrap();
        ring.set_kick(None);
        assert!(!ring.take_pending(), "not started without a kick");
        ring.set_kick(event());
        assert!(ring.take_pending(), "started");
        assert!(!ring.take_pending());
        ring.set_enabled(false);
        assert!(!ring.take_pending(), "disabled");
        // A kick that is lost changes nothing about what is in the ring.
        ring.set_kick(None);
        ring.set_enabled(true);
        assert!(ring.take_pending(), "enabled");
        assert!(!ring.take_pending());
        ring.set_enabled(true);
        ring.stop();
        assert!(!ring.take_pending(), "stopped");
        ring.set_kick(event());
        assert!(ring.take_pending(), "started again");
        ring.reset();
        assert!(!ring.take_pending(), "reset");
    }
}
