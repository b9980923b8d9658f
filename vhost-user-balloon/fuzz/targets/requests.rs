// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vhost_user_balloon_fuzz::requests(data));
