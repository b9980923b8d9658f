// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device's answer to an inflate request.

use alloc::vec;
use alloc::vec::Vec;

/// One bit for each page of a request, least significant bit first in each byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    bytes: Vec<u8>,
    pages: usize,
}

impl Bitmap {
    /// No page is zero yet.
    #[must_use]
    pub fn new(pages: usize) -> Self {
        Self { bytes: vec![0; Self::bytes_for(pages)], pages }
    }

    /// How many bytes speak of `pages` pages.
    #[must_use]
    pub const fn bytes_for(pages: usize) -> usize {
        pages.div_ceil(8)
    }

    /// Page `n` of the request reads as zero. A page that is not in the request changes nothing.
    pub fn set(&mut self, n: usize) {
        if n < self.pages
            && let Some(byte) = self.bytes.get_mut(n / 8)
        {
            *byte |= 1 << (n % 8);
        }
    }

    /// Whether page `n` is claimed to read as zero.
    #[must_use]
    pub fn get(&self, n: usize) -> bool {
        self.bytes.get(n / 8).is_some_and(|byte| byte & (1 << (n % 8)) != 0)
    }

    /// As it is written into the driver's buffer.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}
