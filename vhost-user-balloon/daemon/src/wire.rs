// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages of the vhost-user protocol as bytes.

use vm_memory::ByteValued;

pub const HEADER: usize = 12;
pub const MAX_BODY: usize = 4096;
pub const VERSION: u32 = 1;
pub const REPLY: u32 = 1 << 2;
pub const NEED_REPLY: u32 = 1 << 3;

/// What `bytes` hold, if that is all of a `T`.
pub fn parse<T: ByteValued + Default>(bytes: &[u8]) -> Option<T> {
    let mut value = T::default();
    (bytes.len() == size_of::<T>()).then(|| {
        value.as_mut_slice().copy_from_slice(bytes);
        value
    })
}

pub fn long(value: u64) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

pub fn message(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len()).unwrap_or(0);
    let mut bytes: Vec<u8> = [request, flags, size].into_iter().flat_map(u32::to_ne_bytes).collect();
    bytes.extend(body);
    bytes
}

/// A number of the protocol as an index or a length.
pub fn index(number: u32) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
