// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a driver is called: by an eventfd, or for User-Mode Linux by a socket.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::signals;
use crate::threads::{self, Foreign};

const ONE: [u8; 8] = 1_u64.to_ne_bytes();

#[derive(Debug)]
pub enum Call {
    /// Its lock is held for a few instructions only. If the front end takes its O_NONBLOCK away and fills it, a
    /// timer interrupts the call, and the connection ends.
    Event(Foreign<File>),
    /// Another thread sends the call: the front end has a copy of the socket.
    Socket(Arc<Socket>),
}

#[derive(Debug)]
pub struct Socket {
    file: Foreign<OwnedFd>,
    /// A call waits for the thread: another one would say the same.
    waits: AtomicBool,
}

impl Call {
    pub fn event(file: Foreign<OwnedFd>) -> Self {
        Self::Event(file.into())
    }

    pub fn socket(file: Foreign<OwnedFd>) -> Self {
        Self::Socket(Arc::new(Socket { file, waits: AtomicBool::new(false) }))
    }

    /// Call, without waiting for anything that another process holds. `false`: there is no reader any more.
    pub fn send(&self) -> bool {
        match self {
            Self::Event(_) if !signals::may_touch_events() => true,
            Self::Event(event) => match rustix::io::write(&**event, &ONE) {
                // One that is full has been raised, and not been looked at yet.
                Ok(_) | Err(Errno::AGAIN) => true,
                Err(Errno::INTR) => {
                    signals::note_interrupted_call();
                    true
                }
                Err(_) => false,
            },
            Self::Socket(socket) => {
                let again = socket.clone();
                socket.waits.swap(true, Ordering::SeqCst)
                    || threads::call_elsewhere(move || {
                        again.waits.store(false, Ordering::SeqCst);
                        let _ =
                            rustix::net::send(&*again.file, &ONE, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
                    })
            }
        }
    }
}
