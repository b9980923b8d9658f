// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon with the option lie, under a name of its own: tests use both beside each other.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_user_balloon::main()
}
