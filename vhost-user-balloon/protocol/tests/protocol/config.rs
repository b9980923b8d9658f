// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::Config;
use proptest::prelude::*;

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
