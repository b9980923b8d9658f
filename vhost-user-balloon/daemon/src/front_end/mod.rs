// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The front end: messages of the vhost-user protocol, and what they do to the device.

mod connection;
mod errors;
mod message;
mod requests;

pub use connection::FrontEnd;
pub use errors::ProtocolError;
