# SPDX-License-Identifier: GPL-2.0
"""The crates' own tests under Miri and ThreadSanitizer, which find what no assertion sees."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable

import pytest

from lab.build import daemon
from lab.core import lock, paths, run

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(3600)]

TRIPLE = f"{os.uname().machine}-unknown-linux-gnu"
RESULT = re.compile(r"^test result: ok\. (\d+) passed; 0 failed; (\d+) ignored", re.M)
Record = Callable[[str, object], None]


def need(*components: str) -> None:
    """Skip if rustup, its nightly toolchain or one of these components is missing."""
    rustup = shutil.which("rustup")
    if rustup is None:
        pytest.skip("rustup is missing: apt-get install rustup")
    listed = run.ask([rustup, "component", "list", "--toolchain", "nightly", "--installed"])
    if listed.returncode:
        pytest.skip("the nightly toolchain is missing: rustup toolchain install nightly")
    installed = listed.stdout.split()
    # Most names of components end with the platform.
    missing = [one for one in components if not {one, f"{one}-{TRIPLE}"} & set(installed)]
    if missing:
        words = " ".join(missing)
        pytest.skip(f"{words} is missing: rustup component add --toolchain nightly {words}")


def count_passed(
    name: str, arguments: list[str], environment: dict[str, str], record: Record
) -> int:
    """Run tests with the nightly cargo in a folder of its own; how many have passed."""
    log, began = paths.log_file(name), time.monotonic()
    env = {**os.environ, "CARGO_TARGET_DIR": str(paths.sub("obj", f"rust-{name}")), **environment}
    with lock.locked(f"cargo-{name}"):
        run.logged(
            ["cargo", "+nightly", *arguments],
            log,
            f"{name} finds fault with a test",
            "read the first report in the log",
            cwd=daemon.WORKSPACE,
            env=env,
        )
    results = RESULT.findall(log.read_text())
    passed, ignored = (sum(int(result[n]) for result in results) for n in (0, 1))
    text = f"{passed} passed, {ignored} ignored, {time.monotonic() - began:.0f} s with the build"
    print(f"{name}: {text}")
    record(name, text)
    return passed


def test_miri(record_property: Record) -> None:
    """The protocol, and of discards what needs no system call.

    The tests of memory itself are left out: Miri has no memfd_create(2) and no fallocate(2).
    """
    need("miri", "rust-src")
    crates = ["-p", "balloon-protocol", "-p", "balloon-discard"]
    arguments = ["miri", "test", "--locked", *crates, "--lib", "--tests"]
    assert count_passed("miri", arguments, {}, record_property) >= 28


def test_threads(record_property: Record) -> None:
    """The daemon's unit tests, and its device against a front end in another thread."""
    need("rust-src")
    flags = {
        "RUSTFLAGS": "-Zsanitizer=thread",
        # One of many reports is enough, and none may pass.
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    arguments = ["test", "--locked", "-Zbuild-std", "--target", TRIPLE, "-p", daemon.NAME]
    arguments += ["--lib", "--test", "device"]
    assert count_passed("tsan", arguments, flags, record_property) >= 60
