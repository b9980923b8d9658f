// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One request: its body and its descriptors.

use std::fs::File;

use vhost::vhost_user::message::{VhostUserConfig, VhostUserMemoryRegion, VhostUserU64};
use vm_memory::ByteValued;

use super::errors::{ProtocolError, Refusal};
use crate::foreign::{Descriptor, DescriptorError, Kind, pair};
use crate::threads::Foreign;
use crate::wire::parse;

const NO_DESCRIPTOR: u64 = 1 << 8;

pub struct Message {
    pub request: u32,
    pub flags: u32,
    pub body: Vec<u8>,
    pub descriptors: Vec<Descriptor>,
}

impl Message {
    pub fn wrong_size(&self) -> ProtocolError {
        ProtocolError::Size { request: self.request, size: self.body.len() }
    }

    /// The body, which is a `T` and nothing else.
    pub fn body<T: ByteValued + Default>(&self) -> Result<T, ProtocolError> {
        parse(&self.body).ok_or_else(|| self.wrong_size())
    }

    /// The number in the body.
    pub fn number(&self) -> Result<u64, ProtocolError> {
        self.body::<VhostUserU64>().map(|body| body.value)
    }

    /// A range of the configuration space, and what is behind it.
    pub fn config(&self) -> Result<(VhostUserConfig, &[u8]), ProtocolError> {
        let parts = self.body.split_at_checked(size_of::<VhostUserConfig>());
        parts.and_then(|(range, rest)| Some((parse(range)?, rest))).ok_or_else(|| self.wrong_size())
    }

    /// Descriptions of regions, behind their number.
    pub fn regions(&self) -> Result<Vec<VhostUserMemoryRegion>, ProtocolError> {
        let regions = self.body.get(8..).map(|body| body.chunks(size_of::<VhostUserMemoryRegion>()));
        regions.and_then(|regions| regions.map(parse).collect()).ok_or_else(|| self.wrong_size())
    }

    /// The only region.
    pub fn region(&self) -> Result<VhostUserMemoryRegion, ProtocolError> {
        let [region] = self.regions()?.try_into().map_err(|_| self.wrong_size())?;
        Ok(region)
    }

    /// The number of a ring, and an eventfd, or a socket if that is allowed; it never blocks from now on.
    pub fn event(&mut self, sockets: bool) -> Result<(u32, Option<Descriptor>), Refusal> {
        let word = self.number()?;
        let ring = u32::try_from(word & 0xff).unwrap_or(0);
        if word & NO_DESCRIPTOR != 0 {
            return Ok((ring, None));
        }
        let event = self.one()?;
        let wanted = match (event.kind, sockets) {
            (Kind::Event, _) => {
                event.never_block()?;
                return Ok((ring, Some(event)));
            }
            (Kind::UnixSocket, true) => return Ok((ring, Some(pair(event)?))),
            (_, true) => "an eventfd or a unix socket",
            (_, false) => "an eventfd; sockets need --user-mode-linux",
        };
        Err(DescriptorError::Kind { found: event.kind.name(), wanted }.into())
    }

    pub fn one(&mut self) -> Result<Descriptor, Refusal> {
        let count = self.descriptors.len();
        self.descriptors.pop().filter(|_| count == 1).ok_or(Refusal::Count { count, wanted: 1 })
    }
}

/// The files of guest memory.
pub fn files(descriptors: &mut Vec<Descriptor>, wanted: usize) -> Result<Vec<Foreign<File>>, Refusal> {
    let count = descriptors.len();
    if count != wanted {
        return Err(Refusal::Count { count, wanted });
    }
    let file = |descriptor: Descriptor| match descriptor.kind {
        Kind::File => Ok(descriptor.file.into()),
        other => Err(DescriptorError::Kind { found: other.name(), wanted: "a file" }.into()),
    };
    descriptors.drain(..).map(file).collect()
}
