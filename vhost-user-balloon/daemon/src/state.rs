// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an operator has commanded, in a file: it survives the daemon.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Written as a whole, in one call: a reader sees the old state or the new one.
const SIZE: usize = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    pub target: u64,
    pub discard: bool,
}

#[derive(Debug, Error)]
pub enum StateError {
    #[error("cannot use the state file {path}: {source}; choose a file that this user may write")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "cannot use the state file {path}: {found:?} is no state ({error}); remove it to begin with the options"
    )]
    Content { path: PathBuf, found: String, error: serde_json::Error },
}

/// The file, which stays open: the sandbox has no way to open it again.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    path: PathBuf,
}

impl StateFile {
    /// Open or create it, and read what is in there.
    pub fn open(path: &Path) -> Result<(Self, Option<State>), StateError> {
        let failed = |source| StateError::File { path: path.to_owned(), source };
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).map_err(failed)?;
        let mut text = String::new();
        (&file).take(4096).read_to_string(&mut text).map_err(failed)?;
        let state = match text.trim() {
            "" => None,
            state => Some(serde_json::from_str(state).map_err(|error| StateError::Content {
                path: path.to_owned(),
                found: state.chars().take(80).collect(),
                error,
            })?),
        };
        Ok((Self { file, path: path.to_owned() }, state))
    }

    pub fn save(&self, state: State) -> Result<(), StateError> {
        let failed = |source| StateError::File { path: self.path.clone(), source };
        let text = serde_json::to_string(&state).map_err(|error| failed(error.into()))?;
        self.file.write_all_at(format!("{text:<SIZE$}\n").as_bytes(), 0).map_err(failed)
    }
}
