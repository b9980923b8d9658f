// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program `vhost-user-balloon`.

use std::process::ExitCode;

fn main() -> ExitCode {
    vhost_user_balloon::main()
}
