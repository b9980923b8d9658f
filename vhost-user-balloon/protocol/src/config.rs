// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The configuration space: six little-endian words.

use core::fmt;

/// The device's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Config {
    /// How many pages the device wants in the balloon.
    pub num_pages: u32,
    /// How many pages the driver has put into the balloon.
    pub actual: u32,
    /// The command of free page hinting; always zero where that is not offered.
    pub free_page_hint_cmd_id: u32,
    /// The value the driver poisons free pages with.
    pub poison_val: u32,
    /// The number of the device's newest command to report all free memory.
    pub report_now_cmd: u32,
    /// The newest of these numbers for which the driver has done so. One that differs from `report_now_cmd` has the
    /// driver report all free memory, and then write that number here.
    pub report_now_done: u32,
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
    pub const SIZE: usize = 24;

    /// The whole of it, as the driver sees it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::SIZE] {
        let words = [
            self.num_pages,
            self.actual,
            self.free_page_hint_cmd_id,
            self.poison_val,
            self.report_now_cmd,
            self.report_now_done,
        ];
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

    /// Take what the driver may write: `actual`, `poison_val` and `report_now_done`.
    ///
    /// Some front ends write the one field that changed and others all bytes that they know, with an old
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
                5 => self.report_now_done = value,
                _ => {}
            }
        }
        Ok(())
    }
}
