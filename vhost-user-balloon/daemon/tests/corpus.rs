// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the fuzzers run, without a fuzzer: their seeds, what they have found, and some noise.

#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![allow(clippy::indexing_slicing, clippy::cast_possible_truncation)]

#[path = "../../fuzz/src/entry.rs"]
mod entry;
#[path = "../../fuzz/src/seeds.rs"]
mod seeds;

use std::path::Path;

type Target = fn(&[u8]);

fn target(name: &str) -> Target {
    match name {
        "queues" => entry::queues,
        "requests" => entry::requests,
        "config" => entry::config,
        _ => panic!("no target is called {name}"),
    }
}

#[test]
fn seeds_and_what_was_found() {
    for (name, seeds) in seeds::all() {
        assert!(seeds.len() >= 8, "{name} begins with next to nothing");
        for (seed, bytes) in seeds {
            println!("{name}: {seed}");
            target(name)(&bytes);
        }
        // Each file there is an input that went wrong once.
        let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/found").join(name);
        for entry in std::fs::read_dir(found).into_iter().flatten() {
            let path = entry.unwrap().path();
            println!("{}", path.display());
            target(name)(&std::fs::read(path).unwrap());
        }
    }
}

/// Seeds with a few bytes changed, the same ones every time.
#[test]
fn noise() {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    for (name, seeds) in seeds::all() {
        for (_, seed) in seeds {
            for _ in 0..20 {
                let mut bytes = seed.clone();
                for _ in 0..=next() % 4 {
                    let at = next() % bytes.len();
                    bytes[at] = next() as u8;
                }
                if next() % 4 == 0 {
                    bytes.extend((0..next() % 64).map(|n| (n * 37) as u8));
                }
                target(name)(&bytes);
            }
        }
    }
}
