# SPDX-License-Identifier: GPL-2.0
"""Finding out whether an accelerator runs a kernel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.boot import accel, argv, resolve
from lab.boot.argv import APPEND_TCG
from lab.core.errors import LabError
from lab.machine import stock
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


@pytest.mark.images
def test_a_kernel_that_does_not_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accel, "PROBE_SECONDS", 1)
    qemu = tmp_path / "qemu"
    qemu.write_text("#!/bin/sh\nexec sleep 60\n")
    qemu.chmod(0o755)
    why = accel._probe(qemu, tmp_path / "kernel")
    assert "within 1 s" in why
    monkeypatch.setattr(accel, "PROBE_SECONDS", 60)
    qemu.write_text("#!/bin/sh\necho no such machine >&2\nexit 1\n")
    assert accel._probe(qemu, tmp_path / "kernel") == "no such machine"


@pytest.fixture
def machine_with_kvm(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """/dev/kvm opens; the list gets each kernel that is tried, of which only Debian's runs."""
    tried: list[Path] = []

    def probe(qemu: Path, kernel: Path) -> str:
        tried.append(kernel)
        return "" if kernel == Path("/debian/vmlinuz") else "it does not run"

    monkeypatch.setattr(os.path, "exists", lambda _: True)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(accel, "_probe", probe)
    monkeypatch.setattr(stock, "kernel", lambda: (Path("/debian/vmlinuz"), []))
    monkeypatch.setattr(accel, "module", lambda: "kvm_intel")
    return tried


def test_kvm_is_tried_with_debians_kernel_once(machine_with_kvm: list[Path]) -> None:
    """A kernel under test that fails only under KVM must fail its test there."""
    for _ in range(3):
        assert accel.choose("auto", Path(sys.executable)).name == "kvm"
    assert machine_with_kvm == [Path("/debian/vmlinuz")]


def test_a_busy_machine_is_tried_again(
    machine_with_kvm: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [f"{accel.LATE} 20 s", ""]
    monkeypatch.setattr(accel, "_probe", lambda *_: answers.pop(0))
    chosen = [accel.choose("auto", Path(sys.executable)).name for _ in range(3)]
    assert chosen == ["tcg", "kvm", "kvm"]


def test_the_reason_for_an_accelerator(
    machine_with_kvm: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = Path(sys.executable)
    assert "Debian's kernel" in accel.choose("auto", qemu).reason
    assert accel.choose("tcg", qemu) == accel.Choice("tcg", "--accel tcg")
    assert accel.choose("auto", qemu, "arm64") == accel.Choice("tcg", "the kernel is for arm64")
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    assert accel.choose("auto", qemu) == accel.Choice("tcg", "there is no /dev/kvm")
    with pytest.raises(LabError, match="KVM cannot be used here") as caught:
        accel.choose("kvm", qemu)
    assert caught.value.why == "there is no /dev/kvm"
