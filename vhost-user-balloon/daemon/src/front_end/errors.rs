// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a front end does wrong.

use balloon_protocol::ConfigError;
use rustix::io::Errno;
use thiserror::Error;

use crate::foreign::DescriptorError;
use crate::memory::MemoryError;

/// How many descriptors a message may have.
pub const MAX_DESCRIPTORS: usize = 32;

/// The front end breaks the protocol, and the connection ends.
#[derive(Debug, Error)]
pub enum ProtocolError {
    #[error("its socket: {0}")]
    Socket(Errno),
    #[error("it hung up after {0} bytes of a message")]
    Hangup(usize),
    #[error("it sent {0} bytes of a message, and not the rest within a second")]
    Slow(usize),
    #[error("it left {0} bytes of replies unread for a second")]
    Unread(usize),
    #[error("request {request} has flags {flags:#x}, which are not those of a request of version 1")]
    Flags { request: u32, flags: u32 },
    #[error("request {request} cannot have {size} bytes")]
    Size { request: u32, size: usize },
    #[error("a message has {0} descriptors, more than {MAX_DESCRIPTORS}")]
    Descriptors(usize),
    #[error("too many descriptors of it, or of front ends before it, wait to be closed")]
    Waiting,
    #[error("an event that it sent blocks: it has taken its O_NONBLOCK away")]
    Blocks,
    #[error(
        "it sent a descriptor of mode {mode:#o} on a device with major number {device}, which is neither an \
         eventfd, a pipe, a unix socket nor a file in memory or on a disk"
    )]
    Kind { mode: u32, device: u32 },
    #[error("request {request} is not supported")]
    Unsupported { request: u32 },
    #[error("there is no ring {0} whose index could be returned")]
    NoAnswer(u32),
}

/// Why a request is refused. Its effect is that of a request that was not made.
#[derive(Debug, Error)]
pub enum Refusal {
    /// The connection ends as well.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("there is no ring {0}")]
    NoRing(u32),
    #[error("ring {ring} cannot have {size} entries now")]
    RingSize { ring: u32, size: u32 },
    #[error("address {address:#x} of ring {ring} is outside of memory")]
    RingAddress { ring: u32, address: u64 },
    #[error("ring {ring}: {error}")]
    Ring { ring: u32, error: virtio_queue::Error },
    #[error("ring {0} is in memory that was never touched, as too many rings before")]
    Untouched(u32),
    #[error("index {index} of ring {ring} is more than 65535")]
    Index { ring: u32, index: u32 },
    #[error("ring {ring} cannot be enabled by {value}")]
    Enable { ring: u32, value: u32 },
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("{count} descriptors came, not {wanted}")]
    Count { count: usize, wanted: usize },
    #[error(transparent)]
    Descriptor(#[from] DescriptorError),
}
