// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the fuzzers run, without a fuzzer: their seeds, and some noise.

#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, clippy::cast_possible_truncation)]

#[path = "../../fuzz/src/lib.rs"]
mod entry;

type Target = fn(&[u8]);

fn target(name: &str) -> Target {
    match name {
        "queues" => entry::queues,
        "requests" => entry::requests,
        _ => panic!("there is no target {name}"),
    }
}

fn seeds() -> impl Iterator<Item = (Target, &'static str, Vec<u8>)> {
    let lines = include_str!("../../fuzz/seeds.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let mut words = line.split(' ');
        let (run, name, hex) = (target(words.next().unwrap()), words.next().unwrap(), words.next().unwrap());
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        (run, name, (0..hex.len()).step_by(2).map(byte).collect())
    })
}

#[test]
fn every_seed() {
    let mut count = 0;
    for (run, name, bytes) in seeds() {
        println!("{name}");
        run(&bytes);
        count += 1;
    }
    assert!(count >= 40, "{count} seeds");
}

/// Seeds with a few bytes changed, the same ones every time.
#[test]
fn noise() {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    for (run, _, seed) in seeds() {
        for _ in 0..20 {
            let mut bytes = seed.clone();
            for _ in 0..=next() % 4 {
                let at = next() % bytes.len();
                bytes[at] = next() as u8;
            }
            if next() % 4 == 0 {
                bytes.extend((0..next() % 64).map(|n| (n * 37) as u8));
            }
            run(&bytes);
        }
    }
}
