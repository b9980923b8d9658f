// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device that lies, for tests of guests and of `kz conform`. Never part of a package: the cargo feature
//! `lying` is off by default.

use balloon_protocol::Bitmap;
use clap::ValueEnum;

/// What to lie about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Lie {
    /// Claim zeros and discard nothing
    NoDiscard,
    /// Answer each report (full length) and inflate request, whether or not bits 6 and 7 were negotiated
    FullLength,
    /// Bits of the bitmap begin with the most significant one
    BitOrder,
    /// Return the length of the bitmap and leave what was in it
    StaleBitmap,
    /// Return half of the length of a report, and a bitmap that is one byte short
    ShortLength,
    /// Bit 6 counts pages, and nothing is discarded
    Bit6,
}

/// Whether memory is kept that is claimed.
pub fn keeps(lie: Option<Lie>) -> bool {
    matches!(lie, Some(Lie::NoDiscard | Lie::Bit6))
}

/// What is returned as the used length of a report. `negotiated`: bit 6.
pub fn reported(lie: Option<Lie>, negotiated: bool, length: u32) -> Option<u32> {
    match lie? {
        Lie::FullLength => Some(length),
        Lie::NoDiscard => Some(if negotiated { length } else { 0 }),
        Lie::ShortLength => Some(length / 2),
        Lie::Bit6 => Some(length >> 12),
        Lie::BitOrder | Lie::StaleBitmap => None,
    }
}

/// What is returned as bitmap and used length of an inflate request. `memory`: which of its pages exist.
pub fn inflated(lie: Option<Lie>, bitmap: Bitmap, memory: &[bool], length: u32) -> (Bitmap, u32) {
    match lie {
        Some(Lie::NoDiscard | Lie::Bit6) => {
            let mut all = Bitmap::new(memory.len());
            memory.iter().enumerate().filter(|(_, is)| **is).for_each(|(n, _)| all.set(n));
            (all, length)
        }
        Some(Lie::BitOrder) => {
            let bits = bitmap.as_bytes().len().saturating_mul(8);
            let mut turned = Bitmap::new(bits);
            (0..bits).filter(|n| bitmap.get(*n)).for_each(|n| turned.set(n ^ 7));
            (turned, length)
        }
        // Nothing is written of a bitmap without pages.
        Some(Lie::StaleBitmap) => (Bitmap::new(0), length),
        Some(Lie::ShortLength) => (bitmap, length.saturating_sub(1)),
        _ => (bitmap, length),
    }
}
