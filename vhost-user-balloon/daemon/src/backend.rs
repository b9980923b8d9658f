// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requests of the front end.

use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use balloon_protocol::{Config, QueueMap};
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandler};

use crate::device::Device;
use crate::limited;
use crate::memory::{Description, MAX_REGIONS};

const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// What is understood of the protocol's extensions.
pub const PROTOCOL: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(VhostUserProtocolFeatures::RESET_DEVICE);

/// The device, as the `vhost` crate wants to have it.
pub struct Backend {
    device: Mutex<Device>,
    protocol: Mutex<u64>,
}

impl Backend {
    pub fn new(device: Device) -> Self {
        Self { device: Mutex::new(device), protocol: Mutex::new(0) }
    }

    /// The device. Only one thread ever asks, so this does not wait.
    pub fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether requests can ask for a reply.
    pub fn replies(&self) -> bool {
        let accepted = self.protocol.lock().unwrap_or_else(PoisonError::into_inner);
        *accepted & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0
    }

    fn refuse<T>(&self, what: &str, why: impl std::fmt::Display) -> Result<T> {
        let mut device = self.device();
        device.metrics().refused();
        limited!(device.limiter(), %why, "refused {what}");
        Err(Error::ReqHandlerError(io::Error::new(io::ErrorKind::InvalidInput, format!("{what}: {why}"))))
    }

    fn offered(&self) -> u64 {
        self.device().options().features.bits() | VERSION_1 | PROTOCOL_FEATURES
    }

    fn no_ring<T>(&self, what: &str, index: impl std::fmt::Display) -> Result<T> {
        self.refuse(what, format_args!("there is no ring {index}"))
    }

    fn with_ring(
        &self,
        what: &str,
        index: u8,
        file: Option<File>,
        set: impl FnOnce(
            &mut crate::ring::Ring,
            usize,
            Option<File>,
        ) -> std::result::Result<(), crate::ring::RingError>,
    ) -> Result<()> {
        let number = usize::from(index);
        let done = self.device().ring_mut(number).map(|ring| set(ring, number, file));
        match done {
            Some(Ok(())) => Ok(()),
            Some(Err(error)) => self.refuse(what, error),
            None => self.no_ring(what, index),
        }
    }
}

fn description(region: &VhostUserMemoryRegion) -> Description {
    Description {
        guest: region.guest_phys_addr,
        length: region.memory_size,
        user: region.user_addr,
        offset: region.mmap_offset,
    }
}

fn number(index: u32) -> usize {
    usize::try_from(index).unwrap_or(usize::MAX)
}

impl VhostUserBackendReqHandler for Backend {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        self.device().reset();
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        self.device().reset();
        Ok(())
    }

    fn get_features(&self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&self, features: u64) -> Result<()> {
        let unknown = features & !self.offered();
        if unknown != 0 {
            return self.refuse("SET_FEATURES", format_args!("{unknown:#x} was not offered"));
        }
        self.device().accept(features);
        Ok(())
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let told = regions.iter().map(description).zip(files);
        let done = self.device().change_memory(|memory| memory.replace(told));
        match done {
            Ok(()) => Ok(None),
            Err(error) => self.refuse("SET_MEM_TABLE", error),
        }
    }

    fn set_vring_num(&self, index: u32, size: u32) -> Result<()> {
        let done = self.device().ring_mut(number(index)).map(|ring| ring.set_size(size));
        match done {
            Some(true) => Ok(()),
            Some(false) => {
                self.refuse("SET_VRING_NUM", format_args!("ring {index} cannot have {size} entries"))
            }
            None => self.no_ring("SET_VRING_NUM", index),
        }
    }

    fn set_vring_addr(
        &self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let done = {
            let mut device = self.device();
            let at = |user| device.memory().from_user(user);
            let places = (at(descriptors), at(available), at(used));
            match (device.ring_and_memory(number(index)), places) {
                (Some((ring, memory)), (Some(descriptors), Some(available), Some(used))) => Some(
                    ring.set_addresses(descriptors, available, used, memory.map()).map_err(|e| e.to_string()),
                ),
                (Some(_), _) => Some(Err(format!("ring {index} is outside of memory"))),
                (None, _) => None,
            }
        };
        match done {
            Some(Ok(())) => {
                self.device().watch(number(index));
                Ok(())
            }
            Some(Err(error)) => self.refuse("SET_VRING_ADDR", error),
            None => self.no_ring("SET_VRING_ADDR", index),
        }
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        let Ok(base) = u16::try_from(base) else {
            return self.refuse("SET_VRING_BASE", format_args!("index {base} of ring {index}"));
        };
        let done = self.device().ring_mut(number(index)).map(|ring| ring.set_base(base));
        done.map_or_else(|| self.no_ring("SET_VRING_BASE", index), Ok)
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        let mut device = self.device();
        device.ring_stopped(number(index));
        // Without an answer the front end would wait for ever: end the connection instead.
        let ring = device.ring_mut(number(index)).ok_or(Error::InvalidParam)?;
        ring.stop();
        let next = ring.next_available();
        Ok(VhostUserVringState::new(index, u32::from(next)))
    }

    fn set_vring_kick(&self, index: u8, file: Option<File>) -> Result<()> {
        self.device().ring_starts();
        self.with_ring("SET_VRING_KICK", index, file, crate::ring::Ring::set_kick)?;
        let mut device = self.device();
        // Before the driver has had the time to put something into it.
        device.watch(usize::from(index));
        // Without the protocol's extensions a ring is enabled by being started.
        if device.accepted() & PROTOCOL_FEATURES == 0
            && let Some(ring) = device.ring_mut(usize::from(index))
        {
            ring.set_enabled(true);
        }
        Ok(())
    }

    fn set_vring_call(&self, index: u8, file: Option<File>) -> Result<()> {
        self.with_ring("SET_VRING_CALL", index, file, crate::ring::Ring::set_call)
    }

    fn set_vring_err(&self, index: u8, file: Option<File>) -> Result<()> {
        self.with_ring("SET_VRING_ERR", index, file, crate::ring::Ring::set_error)
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL)
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        *self.protocol.lock().unwrap_or_else(PoisonError::into_inner) = features;
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(u64::try_from(QueueMap::MAX).unwrap_or(0))
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        let mut device = self.device();
        let done = device.ring_mut(number(index)).map(|ring| ring.set_enabled(enable));
        if !enable {
            // For some front ends this is the only word about a ring that stops.
            device.ring_stopped(number(index));
        }
        drop(device);
        done.map_or_else(|| self.no_ring("SET_VRING_ENABLE", index), Ok)
    }

    fn get_config(&self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let size = usize::try_from(size).unwrap_or(Config::SIZE);
        Ok(self.device().config().read(offset, size).collect())
    }

    fn set_config(&self, offset: u32, bytes: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let done = self.device().config_mut().write(offset, bytes);
        match done {
            Ok(_) => {
                self.device().update_sizes();
                Ok(())
            }
            Err(error) => self.refuse("SET_CONFIG", error),
        }
    }

    fn set_gpu_socket(&self, _socket: GpuBackend) -> Result<()> {
        self.refuse("GPU_SET_SOCKET", "this is no display")
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        self.refuse("GET_SHARED_OBJECT", "there are none")
    }

    fn get_inflight_fd(&self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        self.refuse("GET_INFLIGHT_FD", "not offered")
    }

    fn set_inflight_fd(&self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        self.refuse("SET_INFLIGHT_FD", "not offered")
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        Ok(u64::try_from(MAX_REGIONS).unwrap_or(0))
    }

    fn add_mem_region(
        &self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let done = self.device().change_memory(|memory| memory.add(description(region), file));
        match done {
            Ok(()) => Ok(None),
            Err(error) => self.refuse("ADD_MEM_REG", error),
        }
    }

    fn remove_mem_region(&self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let done = self.device().change_memory(|memory| memory.remove(description(region)));
        match done {
            Ok(()) => Ok(()),
            Err(error) => self.refuse("REM_MEM_REG", error),
        }
    }

    fn set_device_state_fd(
        &self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        self.refuse("SET_DEVICE_STATE_FD", "not offered")
    }

    fn check_device_state(&self) -> Result<()> {
        self.refuse("CHECK_DEVICE_STATE", "not offered")
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        self.refuse("GET_SHMEM_CONFIG", "not offered")
    }

    fn set_log_base(&self, _log: &VhostUserLog, _file: File) -> Result<()> {
        // No reply is sent for an error, and the front end would wait for ever.
        Err(Error::InvalidParam)
    }
}
