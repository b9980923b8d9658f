// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `cargo run -p xtask -- man FOLDER`: write the manual pages.

use std::io;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [task, folder] = arguments.as_slice() else { return usage() };
    if task != "man" {
        return usage();
    }
    match xtask::write_pages(Path::new(folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _: io::Result<()> = io::Write::write_fmt(&mut io::stderr(), format_args!("xtask: {error}\n"));
            ExitCode::FAILURE
        }
    }
}

fn usage() -> ExitCode {
    let _: io::Result<()> = io::Write::write_all(&mut io::stderr(), b"usage: xtask man FOLDER\n");
    ExitCode::from(2)
}
