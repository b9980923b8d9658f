// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The manual pages in the repository are those of the command line. `WRITE_MAN=1` writes them.

#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::BTreeMap;
use std::path::Path;

use clap_mangen::Man;

fn page(command: &clap::Command, name: &str) -> (String, Vec<u8>) {
    let mut text = b".\\\" SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause\n".to_vec();
    // A date would change a page whose text has not changed.
    Man::new(command.clone()).title(name).date("").render(&mut text).unwrap();
    (format!("{name}.1"), text)
}

#[test]
fn the_pages_are_up_to_date() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/man");
    let mut command = vhost_user_balloon::cli::definition();
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
