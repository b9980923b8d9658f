# SPDX-License-Identifier: GPL-2.0
"""The Rust workspace: formatted, without a warning, and every test of its own."""

from __future__ import annotations

import re

import pytest

from lab.build import daemon
from lab.core import paths

pytestmark = pytest.mark.slow


def test_formatted() -> None:
    log = paths.log_file("rustfmt")
    daemon.cargo(["fmt", "--all", "--check"], log, "the Rust sources are not formatted", 120)


def test_no_warnings() -> None:
    log = paths.log_file("clippy")
    arguments = ["clippy", "--locked", "--workspace", "--all-targets", "--", "-D", "warnings"]
    daemon.cargo(arguments, log, "clippy finds fault with the Rust sources", 800)


def test_its_own_tests() -> None:
    log = paths.log_file("cargo-test")
    daemon.cargo(["test", "--locked", "--workspace"], log, "a test of the Rust workspace fails", 800)
    results = re.findall(r"^test result: ok\. (\d+) passed; 0 failed; (\d+) ignored", log.read_text(), re.M)
    assert sum(int(ignored) for _, ignored in results) == 0
    # The protocol's properties and doctest, discarding, the device, hostile peers, the program, the pages.
    assert sum(int(passed) for passed, _ in results) >= 100
    assert "Doc-tests balloon_protocol" in log.read_text()


def test_the_crates_for_vmm_authors() -> None:
    log = paths.log_file("cargo-package")
    crates = ["-p", "balloon-protocol", "-p", "balloon-discard"]
    daemon.cargo(["package", "--offline", "--allow-dirty", *crates], log, "a crate cannot be packaged", 400)
    example = ["run", "--locked", "-p", "balloon-discard", "--example", "device"]
    daemon.cargo(example, log, "the example of a VMM's device fails", 400)
    assert "pages 2 and 3 and the report read as zero" in log.read_text()


def test_the_daemon_is_built_and_runs() -> None:
    with daemon.running(["--target", "1M"]) as device:
        status = device.status()
        assert status["ok"] is True
        assert status["problems"] == ["no front end is connected"]
        assert status["sandbox"].startswith("seccomp, ")
    assert device.process.returncode == 0
