// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a driver has put into a chain.

use balloon_protocol::parse_pfns;

use super::job::total;
use super::state::Device;
use crate::malformed;
use crate::ring::Chain;

/// The most a list of page frames may have, in bytes: 16 times as much as Linux sends. In the worst case
/// each of them is a hole of its own.
const MAX_LIST_BYTES: usize = 1 << 14;

impl Device {
    /// The readable bytes of a chain, at most `limit`; `None` if they are not in memory.
    pub(super) fn read(&mut self, chain: &Chain, limit: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for (address, length) in &chain.readable {
            let room = limit.saturating_sub(bytes.len());
            let mut part = vec![0; usize::try_from(*length).unwrap_or(usize::MAX).min(room)];
            if let Err(error) = self.memory.read(*address, &mut part) {
                malformed!(self, %error, address, "a list of page frames or statistics outside of memory");
                return None;
            }
            bytes.extend(part);
        }
        Some(bytes)
    }

    /// The page frames in a chain: of the whole chain, or `None` if it is not a list of page frames.
    pub(super) fn list(&mut self, chain: &Chain) -> Option<Vec<u32>> {
        let length = usize::try_from(total(&chain.readable)).unwrap_or(usize::MAX);
        if chain.malformed || length > MAX_LIST_BYTES {
            malformed!(self, length, "a list of page frames that is too long or malformed");
            return None;
        }
        match parse_pfns(&self.read(chain, length)?) {
            Ok(pfns) => Some(pfns.collect()),
            Err(error) => {
                malformed!(self, %error, "cannot read a list of page frames");
                None
            }
        }
    }
}
