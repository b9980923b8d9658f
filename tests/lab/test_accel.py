# SPDX-License-Identifier: GPL-2.0
"""Finding out whether an accelerator runs a kernel."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.boot import accel, argv, resolve
from lab.boot.argv import APPEND_TCG
from tests.guest.guests import expect_at_most


@pytest.mark.boots
def test_a_kernel_that_runs_is_seen_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation in place of KVM, which few machines have that run these tests."""
    emulated, run = argv.cpu("tcg"), subprocess.run
    said: list[bytes] = []

    def kept(*arguments: Any, **more: Any) -> subprocess.CompletedProcess[bytes]:
        done: subprocess.CompletedProcess[bytes] = run(*arguments, **more)
        said.append(done.stdout)
        return done

    monkeypatch.setattr(argv, "cpu", lambda name: emulated)
    monkeypatch.setattr(accel, "APPEND", f"{accel.APPEND} no_timer_check {APPEND_TCG}")
    # On a busy machine it takes longer than it may under KVM.
    monkeypatch.setattr(accel, "PROBE_SECONDS", 120)
    kernel, _ = resolve.kernel("knownzero")
    qemu = resolve.qemu(None)
    monkeypatch.setattr(subprocess, "run", kept)
    assert accel._probe(qemu, kernel) == ""
    # It was once kept waiting, 20 s in all, for channels that nobody had given it.
    started, ended = (
        float(seconds)
        for seconds in re.findall(rb"\[ *(\d+\.\d+)\] (?:Run /init|ACPI: PM: Preparing)", said[0])
    )
    expect_at_most(ended - started, 15)


def test_a_kernel_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accel, "PROBE_SECONDS", 1)
    qemu = tmp_path / "qemu"
    qemu.write_text("#!/bin/sh\nexec sleep 60\n")
    qemu.chmod(0o755)
    why = accel._probe(qemu, tmp_path / "kernel")
    assert "within 1 s" in why
    monkeypatch.setattr(accel, "PROBE_SECONDS", 60)
    qemu.write_text("#!/bin/sh\necho no such machine >&2\nexit 1\n")
    assert accel._probe(qemu, tmp_path / "kernel") == "no such machine"
