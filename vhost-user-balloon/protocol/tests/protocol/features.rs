// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::{Features, QueueKind, QueueMap};

#[test]
fn numbers_follow_what_was_negotiated() {
    let table: [(u64, &[QueueKind]); 6] = [
        (0, &[QueueKind::Inflate, QueueKind::Deflate]),
        (1 << 1, &[QueueKind::Inflate, QueueKind::Deflate, QueueKind::Stats]),
        (1 << 5, &[QueueKind::Inflate, QueueKind::Deflate, QueueKind::Reporting]),
        (0b10_0010, &[QueueKind::Inflate, QueueKind::Deflate, QueueKind::Stats, QueueKind::Reporting]),
        (0b10_1000, &[QueueKind::Inflate, QueueKind::Deflate, QueueKind::Hinting, QueueKind::Reporting]),
        (
            0b10_1010,
            &[
                QueueKind::Inflate,
                QueueKind::Deflate,
                QueueKind::Stats,
                QueueKind::Hinting,
                QueueKind::Reporting,
            ],
        ),
    ];
    for (bits, kinds) in table {
        let map = QueueMap::new(Features::from_bits(bits));
        assert_eq!(map.count(), kinds.len());
        for (index, kind) in kinds.iter().enumerate() {
            assert_eq!(map.kind(index), Some(*kind));
            assert_eq!(map.index(*kind), Some(index));
        }
        assert_eq!(map.kind(kinds.len()), None);
    }
}

#[test]
fn bits_6_and_16_need_reporting() {
    let both = Features::REPORTING | Features::DEVICE_INIT_REPORTED;
    assert_eq!((both.bits(), both | both), (0b110_0000, both));
    assert_eq!(Features::negotiated(both), both);
    assert_eq!(Features::negotiated(Features::DEVICE_INIT_REPORTED), Features::default());
    assert_eq!(Features::negotiated(Features::REPORT_NOW | Features::STATS_VQ), Features::STATS_VQ);
    assert_eq!(Features::negotiated(both | Features::REPORT_NOW).bits(), 0x1_0060);
}

#[test]
fn bits_of_others_are_dropped() {
    assert_eq!(Features::from_bits(u64::MAX).bits(), 0x1_00ff);
}
