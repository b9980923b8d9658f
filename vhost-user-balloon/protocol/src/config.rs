// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration space: four little-endian words.

use core::fmt;

/// The device's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Config {
    /// How many pages the device wants in the balloon.
    pub num_pages: u32,
    /// How many pages the driver has put into the balloon.
    pub actual: u32,
    /// The command of free page hinting; always zero where that is not offered.
    pub free_page_hint_cmd_id: u32,
    /// The value the driver poisons free pages with.
    pub poison_val: u32,
}

/// A write that is not accepted: outside of the configuration space, or of a part of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Where it begins.
    pub offset: u32,
    /// Its length.
    pub length: usize,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self { offset, length }, size) = (self, Config::SIZE);
        write!(
            f,
            "{length} bytes at offset {offset} are not whole fields of the {size} bytes of configuration"
        )
    }
}

impl core::error::Error for ConfigError {}

impl Config {
    /// The size of the configuration space.
    pub const SIZE: usize = 16;

    /// The whole of it, as the driver sees it.
    pub fn to_bytes(&self) -> [u8; Self::SIZE] {
        let words = [self.num_pages, self.actual, self.free_page_hint_cmd_id, self.poison_val];
        let mut bytes = [0; Self::SIZE];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `length` bytes from `offset`; what is beyond the end reads as zero.
    ///
    /// Front ends ask for more than there is (their own idea of the size), and `length` has been
    /// bounded by the size of a message before it comes here; it is bounded once more.
    pub fn read(&self, offset: u32, length: usize) -> impl Iterator<Item = u8> {
        let skip = usize::try_from(offset).unwrap_or(usize::MAX);
        self.to_bytes()
            .into_iter()
            .chain(core::iter::repeat(0))
            .skip(skip.min(Self::SIZE))
            .take(length.min(4096))
    }

    /// Take what the driver may write: `actual` and `poison_val`.
    ///
    /// Some front ends write the one field that changed and others all 16 bytes, with an old
    /// `num_pages`: that one is the device's, and a write of it is ignored.
    ///
    /// # Errors
    ///
    /// The write does not lie inside of the configuration, or covers parts of fields.
    pub fn write(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError> {
        let length = bytes.len();
        let wrong = ConfigError { offset, length };
        let begin = usize::try_from(offset).map_err(|_| wrong)?;
        let end = begin.checked_add(length).filter(|end| *end <= Self::SIZE).ok_or(wrong)?;
        if !begin.is_multiple_of(4) || !end.is_multiple_of(4) {
            return Err(wrong);
        }
        for (index, word) in bytes.chunks_exact(4).enumerate() {
            let value = word.try_into().map(u32::from_le_bytes).unwrap_or_default();
            match begin / 4 + index {
                1 => self.actual = value,
                3 => self.poison_val = value,
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn a_whole_write_cannot_set_the_target() {
        let mut config = Config { num_pages: 7, ..Config::default() };
        let stale = Config { num_pages: 1, actual: 2, free_page_hint_cmd_id: 3, poison_val: 4 };
        config.write(0, &stale.to_bytes()).unwrap();
        assert_eq!(config, Config { num_pages: 7, actual: 2, free_page_hint_cmd_id: 0, poison_val: 4 });
    }

    #[test]
    fn one_field_alone() {
        let mut config = Config::default();
        config.write(4, &5_u32.to_le_bytes()).unwrap();
        assert_eq!(config, Config { actual: 5, ..Config::default() });
    }

    #[test]
    fn reading_beyond_the_end_gives_zeros() {
        let config = Config { poison_val: 0x1122_3344, ..Config::default() };
        assert_eq!(config.read(12, 8).collect::<Vec<u8>>(), [0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0]);
        assert!(config.read(u32::MAX, 16).all(|b| b == 0));
    }

    proptest! {
        #[test]
        fn a_write_that_is_refused_changes_nothing(offset: u32, bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let before = Config { num_pages: 1, actual: 2, free_page_hint_cmd_id: 0, poison_val: 4 };
            let mut config = before;
            if config.write(offset, &bytes).is_err() {
                prop_assert_eq!(config, before);
            }
            prop_assert_eq!(config.num_pages, 1);
            prop_assert_eq!(config.free_page_hint_cmd_id, 0);
        }

        #[test]
        fn near_offsets_too(offset in 0_u32..24, bytes in proptest::collection::vec(any::<u8>(), 0..24)) {
            let mut config = Config::default();
            let fits = offset as usize + bytes.len() <= 16 && offset.is_multiple_of(4) && bytes.len().is_multiple_of(4);
            let before = config.to_bytes();
            prop_assert_eq!(config.write(offset, &bytes).is_ok(), fits);
            let covers = |field: usize| offset as usize <= field && offset as usize + bytes.len() >= field + 4;
            for (n, byte) in config.to_bytes().iter().enumerate() {
                let theirs = fits && matches!(n / 4, 1 | 3) && covers(n / 4 * 4);
                prop_assert_eq!(*byte, if theirs { bytes[n - offset as usize] } else { before[n] });
            }
        }

        #[test]
        fn what_is_read_is_the_configuration(offset in 0_u32..20, length in 0_usize..40) {
            let config = Config { num_pages: 0x0403_0201, actual: 0x0807_0605, free_page_hint_cmd_id: 0x0c0b_0a09, poison_val: 0x100f_0e0d };
            let read: Vec<u8> = config.read(offset, length).collect();
            prop_assert_eq!(read.len(), length);
            for (n, byte) in read.iter().enumerate() {
                let at = offset as usize + n;
                prop_assert_eq!(*byte, if at < 16 { u8::try_from(at).unwrap() + 1 } else { 0 });
            }
        }
    }
}
