// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Writes the seeds into a folder, one folder for each target.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(std::io::Error::other("usage: seeds FOLDER"));
    };
    for (target, seeds) in vhost_user_balloon_fuzz::seeds::all() {
        let folder = folder.join(target);
        std::fs::create_dir_all(&folder)?;
        for (name, bytes) in seeds {
            std::fs::write(folder.join(name), bytes)?;
        }
    }
    Ok(())
}
