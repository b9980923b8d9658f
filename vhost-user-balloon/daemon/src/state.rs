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

/// What survives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// The size the balloon shall have, in bytes.
    pub target: u64,
    /// Whether memory is given back.
    pub discard: bool,
}

/// A state file that cannot be used.
#[derive(Debug, Error)]
pub enum StateError {
    #[error("cannot use the state file {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} holds {found:?}, which is no state ({error}); remove it to begin with the options")]
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

    /// Write the state.
    pub fn save(&self, state: State) -> Result<(), StateError> {
        let failed = |source| StateError::File { path: self.path.clone(), source };
        let text = serde_json::to_string(&state).map_err(|error| failed(error.into()))?;
        self.file.write_all_at(format!("{text:<SIZE$}\n").as_bytes(), 0).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        let (file, nothing) = StateFile::open(&path).unwrap();
        assert_eq!(nothing, None);
        for state in [State { target: u64::MAX, discard: false }, State { target: 0, discard: true }] {
            file.save(state).unwrap();
            assert_eq!(StateFile::open(&path).unwrap().1, Some(state));
        }
        std::fs::write(&path, "{}").unwrap();
        assert!(matches!(StateFile::open(&path), Err(StateError::Content { .. })));
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        assert!(matches!(StateFile::open(&link), Err(StateError::File { .. })));
    }
}
