// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an operator has commanded, in a file: it survives the daemon.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Written as a whole, in one call: a reader sees the old state or the new one. The first one takes the block of the disk
/// that all others need.
const SIZE: usize = 128;
/// The same with the end of the line.
const TEXT: u64 = SIZE as u64 + 1;

/// What was commanded. `None`: nothing, so the option of the next daemon counts. The file has both
/// fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    #[serde(deserialize_with = "Option::deserialize")]
    pub target: Option<u64>,
    #[serde(deserialize_with = "Option::deserialize")]
    pub discard: Option<bool>,
}

#[derive(Debug, Error)]
pub enum StateError {
    #[error("cannot use the state file {path}: {source}; choose a file that this user may write")]
    File { path: PathBuf, source: io::Error },
    #[error(
        "cannot use the state file {path}: \"{found}\" is no state ({error}); remove it to begin \
         with the options"
    )]
    Content { path: PathBuf, found: String, error: serde_json::Error },
    #[error(
        "cannot use the state file {path}: {size} bytes are no state, which has {most} at most; \
         remove it to begin with the options",
        most = TEXT
    )]
    Long { path: PathBuf, size: u64 },
}

/// The file, which stays open: the sandbox has no way to open it again.
///
/// An empty one is of a command that could not be saved, or of a daemon that ended before it had saved anything: then
/// discarding starts suspended.
#[derive(Debug)]
pub struct StateFile {
    file: File,
    path: PathBuf,
}

/// What is known of the last command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// There was none.
    Nothing,
    State(State),
    /// The file is empty.
    InDoubt,
}

impl StateFile {
    /// Open or create it, and read what is in there.
    pub fn open(path: &Path) -> Result<(Self, Kept), StateError> {
        let failed = |source| StateError::File { path: path.to_owned(), source };
        let mut options = File::options();
        options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = match options.create_new(true).open(path) {
            Ok(file) => return Ok((Self { file, path: path.to_owned() }, Kept::Nothing)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                options.create_new(false).open(path).map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
        };
        let size = file.metadata().map_err(failed)?.len();
        if size > TEXT {
            // The next state would be written over its begin only.
            return Err(StateError::Long { path: path.to_owned(), size });
        }
        let mut bytes = Vec::new();
        (&file).take(TEXT).read_to_end(&mut bytes).map_err(failed)?;
        let text = bytes.trim_ascii();
        let content = |error| {
            let found = text.iter().take(80).flat_map(|byte| std::ascii::escape_default(*byte));
            let found = found.map(char::from).collect();
            StateError::Content { path: path.to_owned(), found, error }
        };
        let kept = match text {
            [] => Kept::InDoubt,
            state => serde_json::from_slice::<Option<State>>(state)
                .map_err(content)?
                .map_or(Kept::Nothing, Kept::State),
        };
        Ok((Self { file, path: path.to_owned() }, kept))
    }

    /// Its number, for the sandbox.
    pub fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Save the last command, or that there was none. On an error the file is empty, as far as that is possible: the next
    /// daemon does not take an older command for the last one.
    pub fn save(&self, state: Option<State>) -> Result<(), StateError> {
        let failed = |source| StateError::File { path: self.path.clone(), source };
        let text = serde_json::to_string(&state).map_err(|error| failed(error.into()))?;
        self.file.write_all_at(format!("{text:<SIZE$}\n").as_bytes(), 0).map_err(|error| {
            let _ = self.file.set_len(0);
            failed(error)
        })
    }
}
