// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::Config;
use proptest::prelude::*;

/// The six fields in their order.
fn config(words: [u32; 6]) -> Config {
    let mut config = Config::default();
    [
        config.num_pages,
        config.actual,
        config.free_page_hint_cmd_id,
        config.poison_val,
        config.report_now_cmd,
        config.report_now_done,
    ] = words;
    config
}

#[test]
fn a_whole_write_sets_what_is_the_drivers() {
    let mut written = config([7, 0, 0, 0, 0, 0]);
    written.write(0, &config([1, 2, 3, 4, 5, 6]).to_bytes()).unwrap();
    assert_eq!(written, config([7, 2, 0, 4, 0, 6]));
    // A front end that knows 16 bytes.
    let mut written = config([7, 0, 0, 0, 8, 9]);
    written.write(0, config([1, 2, 3, 4, 5, 6]).to_bytes().get(..16).unwrap()).unwrap();
    assert_eq!(written, config([7, 2, 0, 4, 8, 9]));
}

#[test]
fn one_field_alone() {
    let mut written = Config::default();
    written.write(4, &5_u32.to_le_bytes()).unwrap();
    assert_eq!(written, config([0, 5, 0, 0, 0, 0]));
}

#[test]
fn reading_beyond_the_end_gives_zeros() {
    let config = config([0, 0, 0, 0, 0, 0x1122_3344]);
    assert_eq!(config.read(20, 8).collect::<Vec<u8>>(), [0x44, 0x33, 0x22, 0x11, 0, 0, 0, 0]);
    assert!(config.read(u32::MAX, 16).all(|b| b == 0));
}

proptest! {
    #![proptest_config(crate::cases())]

    #[test]
    fn a_write_that_is_refused_changes_nothing(offset: u32, bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
        let before = config([1, 2, 0, 4, 5, 6]);
        let mut config = before;
        if config.write(offset, &bytes).is_err() {
            prop_assert_eq!(config, before);
        }
        prop_assert_eq!(config.num_pages, 1);
        prop_assert_eq!((config.free_page_hint_cmd_id, config.report_now_cmd), (0, 5));
    }

    #[test]
    fn near_offsets_too(offset in 0_u32..32, bytes in proptest::collection::vec(any::<u8>(), 0..32)) {
        let mut config = Config::default();
        let fits = offset as usize + bytes.len() <= 24 && offset.is_multiple_of(4) && bytes.len().is_multiple_of(4);
        let before = config.to_bytes();
        prop_assert_eq!(config.write(offset, &bytes).is_ok(), fits);
        let covers = |field: usize| offset as usize <= field && offset as usize + bytes.len() >= field + 4;
        for (n, byte) in config.to_bytes().iter().enumerate() {
            let theirs = fits && matches!(n / 4, 1 | 3 | 5) && covers(n / 4 * 4);
            prop_assert_eq!(*byte, if theirs { bytes[n - offset as usize] } else { before[n] });
        }
    }

    #[test]
    fn what_is_read_is_the_configuration(offset in 0_u32..28, length in 0_usize..40) {
        let config = config([0x0403_0201, 0x0807_0605, 0x0c0b_0a09, 0x100f_0e0d, 0x1413_1211, 0x1817_1615]);
        let read: Vec<u8> = config.read(offset, length).collect();
        prop_assert_eq!(read.len(), length);
        for (n, byte) in read.iter().enumerate() {
            let at = offset as usize + n;
            prop_assert_eq!(*byte, if at < 24 { u8::try_from(at).unwrap() + 1 } else { 0 });
        }
    }
}
