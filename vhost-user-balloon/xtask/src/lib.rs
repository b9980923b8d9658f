// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Manual pages, made from the definition of the command line.

use std::io;
use std::path::Path;

use clap_mangen::Man;

/// Name and content of each page.
///
/// # Errors
///
/// A page cannot be written, not even into memory.
pub fn pages() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut command = vhost_user_balloon::cli::definition();
    command.build();
    let mut pages = Vec::new();
    let mut add = |command: &clap::Command, name: &str| -> io::Result<()> {
        let mut text = b".\\\" SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause\n".to_vec();
        // The date of a page would change it without anybody having changed it.
        Man::new(command.clone()).title(name).date("").render(&mut text)?;
        pages.push((format!("{name}.1"), text));
        Ok(())
    };
    let name = command.get_name().to_owned();
    add(&command, &name)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        add(sub, &format!("{name}-{}", sub.get_name()))?;
    }
    Ok(pages)
}

/// Write them into a folder.
///
/// # Errors
///
/// A page cannot be written.
pub fn write_pages(folder: &Path) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for (name, text) in pages()? {
        std::fs::write(folder.join(name), text)?;
    }
    Ok(())
}
