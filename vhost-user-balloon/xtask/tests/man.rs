// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The manual pages in the repository are those of the program.

#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;

#[test]
fn the_pages_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/man");
    let there: BTreeMap<String, Vec<u8>> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    let made: BTreeMap<String, Vec<u8>> = xtask::pages().unwrap().into_iter().collect();
    assert_eq!(there.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
    for (name, text) in &made {
        assert!(there[name] == *text, "{name} is old: cargo run -p xtask -- man ../packaging/man");
    }
    assert!(made.len() >= 7);
}
