// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What fuzzing begins with: ordinary drivers and front ends, and the known tricks.
//!
//! In the order in which `entry` takes its bytes.

type Seeds = Vec<(&'static str, Vec<u8>)>;

/// All features, of which each bit is one.
const ALL: u8 = 0xf7;
const INFLATE: u8 = 0;
const DEFLATE: u8 = 1;
const STATS: u8 = 2;
const REPORTING: u8 = 3;
/// The first page that is neither a ring nor a list.
const FREE: u16 = 20;
/// The page with which the second region begins.
const SECOND: u16 = 64;
const PAGES: u16 = 128;

/// The seeds of each target.
pub fn all() -> [(&'static str, Seeds); 3] {
    [("queues", queues()), ("requests", requests()), ("config", config())]
}

#[derive(Clone, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn byte(mut self, value: u8) -> Self {
        self.0.push(value);
        self
    }
    fn half(mut self, value: u16) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn word(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn long(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn and(mut self, other: Self) -> Self {
        self.0.extend(other.0);
        self
    }
    fn each<T>(self, values: impl IntoIterator<Item = T>, add: impl Fn(Self, T) -> Self) -> Self {
        values.into_iter().fold(self, add)
    }
}

/// Whole pages.
fn pages(page: u16, count: u16, writable: bool) -> Bytes {
    let kind = if writable { 0x80 } else { 0 };
    Bytes::default().byte(kind).byte(3).word(page.into()).byte(2).half(count - 1)
}

/// Any address and length.
fn anywhere(address: u64, length: u32, writable: bool) -> Bytes {
    let kind = if writable { 0x80 } else { 0 };
    Bytes::default().byte(kind).byte(0).word(0).long(address).byte(0).half(0).word(length)
}

fn list(pages: &[u16]) -> Bytes {
    Bytes::default().byte(1).byte(pages.len() as u8).each(pages, |bytes, page| bytes.half(*page))
}

fn answer(length: u8) -> Bytes {
    Bytes::default().byte(3).byte(length)
}

fn chain(ring: u8, parts: Vec<Bytes>) -> Bytes {
    Bytes::default().byte(ring).byte(parts.len() as u8).each(parts, Bytes::and)
}

fn guest(options: u8, features: u8, chains: Vec<Bytes>) -> Bytes {
    let count = chains.len() as u8;
    Bytes::default().byte(options).byte(features).byte(0).byte(count).each(chains, Bytes::and)
}

fn queues() -> Seeds {
    let report = |page, count| chain(REPORTING, vec![pages(page, count, true)]);
    let frames: Vec<u16> = (FREE..FREE + 16).collect();
    let mixed: Vec<u16> = (0..16).map(|n| FREE + n * 7 % 40).chain([FREE, PAGES, PAGES + 1]).collect();
    let named: Vec<(&'static str, Bytes)> = vec![
        ("nothing", guest(0, ALL, Vec::new())),
        ("reports", guest(0, ALL, vec![report(FREE, 8), report(90, 4), report(FREE, 1)])),
        ("report over two regions", guest(0, ALL, vec![report(SECOND - 2, 4)])),
        ("report past the end", guest(2, ALL, vec![report(PAGES - 1, 3), report(40, 1)])),
        (
            "report of several parts",
            guest(0, ALL, vec![chain(REPORTING, vec![pages(30, 2, true), pages(70, 2, true)])]),
        ),
        (
            "report to be read",
            guest(0, ALL, vec![chain(REPORTING, vec![pages(30, 1, false), pages(40, 1, true)])]),
        ),
        ("report of the rings", guest(2, ALL, vec![report(0, 4), report(6, 2), report(40, 2)])),
        (
            "report at the end of the world",
            guest(0, ALL, vec![chain(REPORTING, vec![anywhere(u64::MAX - 0xfff, 0x1000, true)])]),
        ),
        ("report of everything", guest(0, ALL, vec![chain(REPORTING, vec![anywhere(0, u32::MAX, true); 2])])),
        ("report without the bit", guest(0, ALL & !(1 << 6), vec![report(FREE, 8)])),
        ("large pages", guest(4, ALL, vec![chain(INFLATE, vec![list(&frames), answer(8)]), report(33, 6)])),
        (
            "inflate",
            guest(0, ALL, vec![chain(INFLATE, vec![list(&frames)]), chain(DEFLATE, vec![list(&frames)])]),
        ),
        (
            "inflate with answers",
            guest(0, ALL, vec![chain(INFLATE, vec![list(&mixed), answer(8)]), report(50, 2)]),
        ),
        ("an answer without room", guest(0, ALL, vec![chain(INFLATE, vec![list(&mixed), answer(1)])])),
        (
            "an answer in two parts",
            guest(0, ALL, vec![chain(INFLATE, vec![list(&mixed), answer(1), answer(8)])]),
        ),
        (
            "an answer in what is inflated",
            guest(0, ALL, vec![chain(INFLATE, vec![list(&frames), pages(FREE + 1, 1, true)])]),
        ),
        (
            "lists of nothing",
            guest(0, ALL, vec![chain(INFLATE, vec![list(&[]), answer(8)]), chain(DEFLATE, vec![list(&[])])]),
        ),
        (
            "a long list",
            guest(0, ALL, vec![chain(INFLATE, vec![anywhere(super::entry::BASE, 1 << 30, false)])]),
        ),
        (
            "statistics",
            guest(
                0,
                ALL,
                vec![chain(STATS, vec![list(&[0, 1, 2, 3, 4, 5])]), chain(STATS, vec![list(&[1])])],
            ),
        ),
        // Few features: queues have other numbers.
        ("reports alone", guest(0, 1 << 5 | 1 << 6, vec![chain(2, vec![pages(FREE, 8, true)])])),
        ("poison", Bytes::default().byte(0).byte(ALL).byte(7).word(0xaaaa_aaaa).byte(1).and(report(FREE, 8))),
        (
            // The next descriptor is the same one.
            "a loop",
            guest(0, ALL, vec![report(FREE, 1)])
                .byte(2)
                .half(3 * 0x2000 + 12)
                .half(1)
                .half(3 * 0x2000 + 14)
                .half(0),
        ),
        ("a bad index", guest(0, ALL, vec![report(FREE, 1)]).byte(1).half(3 * 0x2000 + 0x802).half(0xffff)),
        ("a bad head", guest(0, ALL, vec![report(FREE, 1)]).byte(1).half(3 * 0x2000 + 0x804).half(0xffff)),
        ("an indirect list", guest(0, ALL, vec![report(FREE, 1)]).byte(1).half(3 * 0x2000 + 12).half(4)),
    ];
    named.into_iter().map(|(name, bytes)| (name, bytes.0)).collect()
}

fn ask(what: u8, index: u8) -> Bytes {
    Bytes::default().byte(what).byte(index)
}

/// The same with something wrong about it.
fn odd(what: u8, index: u8) -> Bytes {
    ask(140 + what, index)
}

fn region(page: u8, count: u8, offset: u8) -> Bytes {
    Bytes::default().byte(1).byte(page).byte(count).byte(offset)
}

fn memory() -> Bytes {
    ask(2, 2).and(region(0, 64, 4)).and(region(64, 64, 68))
}

fn place(page: u32) -> Bytes {
    Bytes::default().byte(3).word(page)
}

fn ring(index: u8) -> Vec<Bytes> {
    let at = u32::from(index) * 4;
    vec![
        ask(5, index).byte(7),
        ask(6, index).half(0),
        ask(7, index).and(place(at)).and(place(at + 2)).and(place(at + 1)),
        ask(8, index).byte(0),
        ask(9, index).byte(0),
        ask(11, index),
    ]
}

fn requests() -> Seeds {
    let features = || ask(0, 0).long(ALL.into());
    let protocol = || ask(1, 0).long(0x2_8229);
    let started = || {
        let mut all = vec![features(), protocol(), memory()];
        all.extend((0..4).flat_map(ring));
        all
    };
    let then = |more: Vec<Bytes>| started().into_iter().chain(more).collect::<Vec<_>>();
    let raw = |number: u8, body: &[u8], kind: u8| {
        let count = body.len() as u8;
        ask(18, 0).byte(number).byte(1).byte(count).each(body, |bytes, byte| bytes.byte(*byte)).byte(kind)
    };
    let named: Vec<(&'static str, Vec<Bytes>)> = vec![
        ("nothing", Vec::new()),
        ("started", started()),
        ("started and stopped", then((0..4).map(|index| ask(12, index)).collect())),
        ("disabled", then((0..4).map(|index| odd(11, index)).collect())),
        ("reset", then(vec![ask(16, 0), features()])),
        (
            "other memory",
            then(vec![memory(), ask(3, 0).and(region(140, 4, 40)), ask(4, 0).and(region(140, 4, 40))]),
        ),
        ("memory that overlaps", vec![features(), ask(2, 2).and(region(0, 8, 4)).and(region(4, 8, 20))]),
        ("memory past the end", vec![features(), ask(2, 1).and(region(0, 255, 4))]),
        ("too few files", vec![features(), odd(2, 1).and(region(0, 8, 4))]),
        (
            "memory without an end",
            vec![features(), ask(2, 1).byte(0).long(u64::MAX).long(u64::MAX).long(1).long(u64::MAX)],
        ),
        ("configuration", then(vec![ask(13, 0).byte(0).byte(16), ask(14, 0).byte(4).byte(4).word(7)])),
        ("a channel", then(vec![ask(15, 0).byte(6), ask(15, 0).byte(1)])),
        ("bad kicks", then((0..8).map(|kind| ask(8, kind % 4).byte(kind)).collect())),
        ("bad calls", then((0..8).map(|kind| ask(9, kind % 4).byte(kind)).collect())),
        ("no descriptors", then(vec![ask(8, 0).byte(0x80), ask(9, 0).byte(0x80), ask(10, 0).byte(0x80)])),
        ("bad rings", vec![features(), memory(), ask(5, 0).byte(11), odd(5, 0).byte(3), ask(11, 5)]),
        ("a file too short", vec![features(), raw(5, &[1, 0, 0, 0, 0, 0, 0, 0], 0x81)]),
        ("unknown", vec![features(), raw(47, &[1; 8], 0), raw(6, &[1; 16], 0x80), raw(31, &[0; 40], 0x80)]),
        ("owner", vec![ask(17, 0), features(), raw(4, &[], 0), raw(17, &[], 0), raw(36, &[], 0)]),
        ("a message too long", vec![odd(18, 0).byte(25).byte(1).byte(0).byte(0).word(u32::MAX)]),
    ];
    let bytes =
        |asked: Vec<Bytes>| Bytes::default().byte(0).byte(asked.len() as u8).each(asked, Bytes::and).0;
    named.into_iter().map(|(name, asked)| (name, bytes(asked))).collect()
}

fn config() -> Seeds {
    let write = |offset: u8, bytes: &[u8]| {
        Bytes::default().byte(offset).byte(bytes.len() as u8).each(bytes, |all, byte| all.byte(*byte))
    };
    let all = |writes: Vec<Bytes>| {
        let count = writes.len() as u8;
        Bytes::default().word(0x1234).byte(count).each(writes, Bytes::and).0
    };
    vec![
        ("nothing", all(Vec::new())),
        ("all of it", all(vec![write(0, &[7; 16])])),
        ("fields", all((0..4).map(|n| write(n * 4, &[n; 4])).collect())),
        ("parts of fields", all((0..4).map(|n| write(n, &[9; 3])).collect())),
        ("past the end", all(vec![write(12, &[1; 8]), write(16, &[1; 4]), write(16, &[])])),
        ("far away", all(vec![Bytes::default().byte(0xff).word(u32::MAX).byte(4).word(1)])),
        ("page frames", all(Vec::new()).into_iter().chain([5, 0, 0, 0, 6, 0, 0, 0, 5, 0, 0, 0]).collect()),
        ("statistics", all(Vec::new()).into_iter().chain([4, 0, 0, 16, 0, 0, 0, 0, 0, 0]).collect()),
    ]
}
