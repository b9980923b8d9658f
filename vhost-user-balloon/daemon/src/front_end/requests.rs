// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What requests do to the device.

use balloon_protocol::{ConfigError, QueueMap};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfig, VhostUserProtocolFeatures as Protocol, VhostUserVringAddr,
    VhostUserVringState,
};
use vm_memory::ByteValued;

use super::errors::{ProtocolError, Refusal};
use super::message::{Message, files};
use crate::call::Call;
use crate::channel::Channel;
use crate::device::{Device, LOG_ALL};
use crate::foreign::{Descriptor, Kind, pair};
use crate::memory::MAX_REGIONS;
use crate::wire::{MAX_BODY, index, long};

const VERSION_1: u64 = 1 << 32;
const PROTOCOL_FEATURES: u64 = 1 << 30;

const PROTOCOL: Protocol = Protocol::MQ
    .union(Protocol::CONFIG)
    .union(Protocol::REPLY_ACK)
    .union(Protocol::BACKEND_REQ)
    .union(Protocol::CONFIGURE_MEM_SLOTS)
    .union(Protocol::RESET_DEVICE);

/// Do what is asked; returns the reply of a request that has one. `acknowledges`: the front end may ask for replies
/// to requests that have none.
pub fn handle(
    device: &mut Device,
    acknowledges: &mut bool,
    request: FrontendReq,
    asked: &mut Message,
) -> Result<Option<Vec<u8>>, Refusal> {
    let offered = device.options.features.bits() | VERSION_1 | PROTOCOL_FEATURES;
    match request {
        // QEMU sends the latter two when it begins to log writes. There is no log of this device.
        FrontendReq::SET_OWNER | FrontendReq::SET_LOG_BASE | FrontendReq::SET_LOG_FD => {}
        FrontendReq::RESET_OWNER | FrontendReq::RESET_DEVICE => device.reset(),
        FrontendReq::GET_FEATURES => return Ok(Some(long(offered))),
        FrontendReq::SET_FEATURES => {
            let features = asked.number()?;
            let unknown = features & !(offered | LOG_ALL);
            if unknown != 0 {
                return Err(Refusal::Features(unknown));
            }
            device.accept(features);
        }
        FrontendReq::GET_PROTOCOL_FEATURES => return Ok(Some(long(PROTOCOL.bits()))),
        FrontendReq::SET_PROTOCOL_FEATURES => {
            *acknowledges = asked.number()? & Protocol::REPLY_ACK.bits() != 0;
        }
        FrontendReq::GET_QUEUE_NUM => return Ok(Some(long(u64::try_from(QueueMap::MAX).unwrap_or(0)))),
        FrontendReq::GET_MAX_MEM_SLOTS => return Ok(Some(long(u64::try_from(MAX_REGIONS).unwrap_or(0)))),
        FrontendReq::SET_MEM_TABLE | FrontendReq::ADD_MEM_REG | FrontendReq::REM_MEM_REG => {
            change_memory(device, request, asked)?;
        }
        FrontendReq::GET_CONFIG => return get_config(device, asked).map(Some),
        FrontendReq::SET_CONFIG => set_config(device, asked)?,
        FrontendReq::SET_BACKEND_REQ_FD => device.set_channel(Channel::new(pair(asked.one()?)?)?),
        FrontendReq::GET_VRING_BASE => return stop(device, asked).map(Some),
        FrontendReq::SET_VRING_NUM | FrontendReq::SET_VRING_BASE | FrontendReq::SET_VRING_ENABLE => {
            let state: VhostUserVringState = asked.body()?;
            set_state(device, request, state.index, state.num)?;
        }
        FrontendReq::SET_VRING_ADDR => set_addresses(device, asked.body()?)?,
        FrontendReq::SET_VRING_KICK | FrontendReq::SET_VRING_CALL | FrontendReq::SET_VRING_ERR => {
            let calls = request != FrontendReq::SET_VRING_KICK;
            let (ring, event) = asked.event(calls && device.options.user_mode_linux)?;
            set_event(device, request, ring, event)?;
        }
        _ => return Err(ProtocolError::Unsupported { request: asked.request }.into()),
    }
    Ok(None)
}

fn change_memory(device: &mut Device, request: FrontendReq, asked: &mut Message) -> Result<(), Refusal> {
    if request == FrontendReq::SET_MEM_TABLE {
        let regions = asked.regions()?;
        let files = files(&mut asked.descriptors, regions.len());
        return device.change_memory(|memory| match files {
            Ok(files) => Ok(memory.replace(regions.into_iter().zip(files))?),
            Err(refusal) => {
                memory.clear();
                Err(refusal)
            }
        });
    }
    let region = asked.region()?;
    if request == FrontendReq::REM_MEM_REG {
        return Ok(device.change_memory(|memory| memory.remove(region))?);
    }
    for file in files(&mut asked.descriptors, 1)? {
        device.change_memory(|memory| memory.add(region, file))?;
    }
    Ok(())
}

fn get_config(device: &mut Device, asked: &Message) -> Result<Vec<u8>, Refusal> {
    let (range, _) = asked.config()?;
    let size = index(range.size);
    if size > MAX_BODY - size_of::<VhostUserConfig>() {
        return Err(asked.wrong_size().into());
    }
    device.report_now.seen = device.report_now.seen.max(range.offset.saturating_add(range.size));
    let read = device.config.read(range.offset, size);
    Ok(range.as_slice().iter().copied().chain(read).collect())
}

fn set_config(device: &mut Device, asked: &Message) -> Result<(), Refusal> {
    let (range, bytes) = asked.config()?;
    let (offset, length) = (range.offset, bytes.len());
    if length != index(range.size) {
        return Err(ConfigError { offset, length }.into());
    }
    Ok(device.configure(offset, bytes)?)
}

/// Stop a ring; the reply is where.
fn stop(device: &mut Device, asked: &Message) -> Result<Vec<u8>, Refusal> {
    let ring = asked.body::<VhostUserVringState>()?.index;
    device.ring_stopped(index(ring));
    // Without an answer the front end would wait for ever.
    let stopped = device.ring_mut(index(ring)).ok_or(ProtocolError::NoAnswer(ring))?;
    stopped.stop();
    let state = VhostUserVringState::new(ring, stopped.next_available().into());
    Ok(state.as_slice().to_vec())
}

fn set_state(device: &mut Device, request: FrontendReq, ring: u32, value: u32) -> Result<(), Refusal> {
    let found = device.ring_mut(index(ring)).ok_or(Refusal::NoRing(ring))?;
    match (request, value) {
        (FrontendReq::SET_VRING_NUM, size) if found.set_size(size) => {}
        (FrontendReq::SET_VRING_NUM, size) => return Err(Refusal::RingSize { ring, size }),
        (FrontendReq::SET_VRING_BASE, base) => {
            let base = u16::try_from(base).map_err(|_| Refusal::Index { ring, index: base })?;
            found.set_base(base);
        }
        (_, 1) => found.set_enabled(true),
        (_, 0) => {
            found.set_enabled(false);
            // For some front ends this is the only request for a ring that stops.
            device.ring_stopped(index(ring));
        }
        (_, value) => return Err(Refusal::Enable { ring, value }),
    }
    device.check_ring(index(ring));
    Ok(())
}

fn set_addresses(device: &mut Device, places: VhostUserVringAddr) -> Result<(), Refusal> {
    let ring = places.index;
    let (found, memory) = device.ring_and_memory(index(ring)).ok_or(Refusal::NoRing(ring))?;
    let at = |address| memory.guest_address(address).ok_or(Refusal::RingAddress { ring, address });
    let (descriptors, available, used) = (at(places.descriptor)?, at(places.available)?, at(places.used)?);
    let invalid = |error| Refusal::Ring { ring, error };
    found.set_addresses(descriptors, available, used).map_err(invalid)?;
    if !memory.may_touch(found.areas()) {
        found.fail();
        return Err(Refusal::Untouched(ring));
    }
    found.take_up(memory.map()).map_err(invalid)?;
    device.check_ring(index(ring));
    Ok(())
}

fn set_event(
    device: &mut Device,
    request: FrontendReq,
    number: u32,
    event: Option<Descriptor>,
) -> Result<(), Refusal> {
    let call = |event: Descriptor| match event.kind {
        Kind::UnixSocket => Call::socket(event.file),
        _ => Call::event(event.file),
    };
    // Without the protocol's extensions a ring is enabled by being started.
    let enables = device.accepted & PROTOCOL_FEATURES == 0;
    if request == FrontendReq::SET_VRING_KICK {
        device.ring_starts();
    }
    let ring = device.ring_mut(index(number)).ok_or(Refusal::NoRing(number))?;
    match request {
        FrontendReq::SET_VRING_CALL => ring.set_call(event.map(call)),
        FrontendReq::SET_VRING_ERR => ring.set_error(event.map(call)),
        _ => {
            ring.set_kick(event.map(|event| event.file.into()));
            if enables {
                ring.set_enabled(true);
            }
            device.check_ring(index(number));
        }
    }
    Ok(())
}
