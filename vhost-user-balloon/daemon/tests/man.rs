// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line, and its manual pages in the repository. `WRITE_MAN=1` writes them.

#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::path::Path;

use balloon_protocol::Features;
use clap::Parser;
use clap_mangen::Man;
use vhost_user_balloon::cli::{Cli, definition, parse_size};

fn page(command: &clap::Command, name: &str) -> (String, Vec<u8>) {
    let mut text = b".\\\" SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause\n".to_vec();
    // A date would change a page whose text has not changed.
    Man::new(command.clone()).title(name).date("").render(&mut text).unwrap();
    (format!("{name}.1"), text)
}

#[test]
fn the_pages_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/man");
    let mut command = definition();
    command.build();
    let name = command.get_name().to_owned();
    let subcommands = command.get_subcommands().filter(|sub| sub.get_name() != "help");
    let mut made: BTreeMap<String, Vec<u8>> =
        subcommands.map(|sub| page(sub, &format!("{name}-{}", sub.get_name()))).collect();
    made.extend([page(&command, &name)]);
    if std::env::var_os("WRITE_MAN").is_some() {
        made.iter().for_each(|(name, text)| std::fs::write(folder.join(name), text).unwrap());
    }
    let there: BTreeMap<String, Vec<u8>> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(&path).unwrap()))
        .collect();
    assert_eq!(there.keys().collect::<Vec<_>>(), made.keys().collect::<Vec<_>>());
    for (name, text) in &made {
        assert!(there[name] == *text, "{name} is old: WRITE_MAN=1 cargo test --test man");
    }
    assert!(made.len() >= 7);
}

#[test]
fn the_definition_is_consistent() {
    definition().debug_assert();
}

#[test]
fn sizes() {
    assert_eq!(parse_size("0"), Ok(0));
    assert_eq!(parse_size("4096"), Ok(4096));
    assert_eq!(parse_size("3k"), Ok(3072));
    assert_eq!(parse_size("2G"), Ok(2 << 30));
    assert_eq!(parse_size("1T"), Ok(1 << 40));
    for wrong in
        ["", "K", "-1", "+1", "1.5G", "1GB", "0x10", " 1", "18446744073709551616", "99999999999T", "1é"]
    {
        assert!(parse_size(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn switches_take_features_away() {
    let features = |arguments: &[&str]| {
        Cli::try_parse_from([&["x", "--socket-path", "s"], arguments].concat())
            .unwrap()
            .daemon
            .options()
            .features
    };
    assert!(features(&[]).contains(Features::DEVICE_INIT_REPORTED));
    assert!(!features(&[]).contains(Features::DEVICE_INIT_ON_INFLATE));
    assert!(features(&["--device-init-on-inflate", "on"]).contains(Features::DEVICE_INIT_ON_INFLATE));
    assert!(!features(&["--free-page-reporting", "off"]).contains(Features::DEVICE_INIT_REPORTED));
    assert!(!features(&[]).contains(Features::FREE_PAGE_HINT));
}
