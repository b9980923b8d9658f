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
    pub fn new(pages: usize) -> Self {
        Self { bytes: vec![0; Self::bytes_for(pages)], pages }
    }

    /// How many bytes speak of `pages` pages.
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
    pub fn get(&self, n: usize) -> bool {
        self.bytes.get(n / 8).is_some_and(|byte| byte & (1 << (n % 8)) != 0)
    }

    /// As it is written into the driver's buffer.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn least_significant_first() {
        let mut bitmap = Bitmap::new(10);
        bitmap.set(0);
        bitmap.set(9);
        assert_eq!(bitmap.as_bytes(), [0b0000_0001, 0b0000_0010]);
    }

    proptest! {
        #[test]
        fn only_what_was_set(pages in 0_usize..300, wanted in proptest::collection::btree_set(0_usize..400, 0..50)) {
            let mut bitmap = Bitmap::new(pages);
            for n in &wanted {
                bitmap.set(*n);
            }
            prop_assert_eq!(bitmap.as_bytes().len(), pages.div_ceil(8));
            let found: BTreeSet<usize> = (0..500).filter(|n| bitmap.get(*n)).collect();
            let inside: BTreeSet<usize> = wanted.into_iter().filter(|n| *n < pages).collect();
            prop_assert_eq!(found, inside);
        }
    }
}
