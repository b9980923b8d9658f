# SPDX-License-Identifier: GPL-2.0
"""The commands of docs/how-to/sandboxes.md, in their order: libvirt's are in tests/operators."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from lab.bench.session import LATE, resident
from lab.boot import resolve
from lab.machine import debs
from tests.documents import (
    READY,
    SANDBOXES,
    commands_under,
    environment,
    machine,
    qemu_arguments,
    started,
    wait_until_ready,
)
from tests.guest.guests import expect_at_least
from tests.lab.test_documented_commands import RUN
from tests.operators.hosts import eventually

pytestmark = pytest.mark.boots

__all__ = ["machine"]  # the fixture

MIB = 1 << 20
USED = 512 * MIB
USE = f"fillfree --size {USED // MIB} > /dev/null"
JOB = "alloc_once --size 256 --pages thp --verify > /dev/null"
SKIPPED = "sed -n 's/^pgzeroed_skip //p' /proc/vmstat"
BAD = "sed -n 's/^pgzeroed_bad //p' /proc/vmstat"
# A shell on the second serial port, which says when a command has ended.
PORT = "/dev/ttyS1"
LISTENS = (
    f"exec < {PORT} > {PORT} 2>&1; stty raw -echo; echo {READY} > /dev/console; "
    'while read -r line; do eval "$line"; echo "ended $?"; done'
)


def under(title: str) -> list[str]:
    return commands_under(SANDBOXES, title)


class Shell:
    """The shell of a guest."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(str(folder / "shell"))

    def run(self, line: str) -> str:
        """What a command prints; AssertionError when it fails."""
        self._socket.sendall(line.encode() + b"\n")
        said = b""
        while not (end := re.search(rb"ended (\d+)\r?\n", said)):
            piece = self._socket.recv(1 << 16)
            assert piece, f"QEMU has ended: {said!r}"
            said += piece
        assert end[1] == b"0", said
        return said[: end.start()].decode().strip()


def arguments(folder: Path) -> str:
    shell = f"unix:{folder / 'shell'},server=on,wait=off"
    return f"{qemu_arguments(folder, LISTENS)} -serial {shell}"


def ask(line: str, folder: Path) -> str:
    """Run a command of the page, and return what it prints."""
    path = f"{folder / 'bin'}:{environment()['PATH']}"
    done = subprocess.run(
        ["sh", "-c", line.replace("/run/vm1", str(folder))],
        env=environment(PATH=path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def with_socat(folder: Path) -> None:
    """Put Debian's socat into the folder of programs."""
    files = debs.with_dependencies("socat", "usr/bin/socat")
    words = shlex.join([*debs.loader(files), str(files / "usr" / "bin" / "socat")])
    program = folder / "bin" / "socat"
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def test_plain_qemu(machine: Path) -> None:
    """Boot, park, save, restore, resume; the guest still knows its zeros."""
    with_socat(machine)
    begin, park, state, save, saved, leave, restore, resume = under("Plain QEMU")
    (drop,) = under("Before parking: free the page cache")
    more = arguments(machine)
    with started(begin.replace("…", more), machine) as qemu:
        wait_until_ready(qemu, machine / "console")
        shell = Shell(machine)
        shell.run(f"{LATE}; {USE}")
        full = resident(qemu.pid)
        shell.run(drop)
        ask(park, machine)
        assert eventually(lambda: "status=completed" in ask(state, machine))
        expect_at_least(full - resident(qemu.pid), 0.9 * USED)
        ask(save, machine)
        assert eventually(lambda: "completed" in ask(saved, machine))
        ask(leave, machine)
        assert qemu.wait(60) == 0
    size = (machine / "saved").stat().st_blocks * 512
    print(f"the saved file has {size / MIB:.0f} MiB, the guest had {full / MIB:.0f}")
    assert 0 < size < full - USED
    with started(restore.replace("…", more), machine) as qemu:
        assert eventually((machine / "monitor").exists)
        ask(resume, machine)
        # QEMU loses input that arrives before the state of the serial port is loaded.
        status = state.replace("balloon", "status")
        assert eventually(lambda: "running" in ask(status, machine))
        shell = Shell(machine)
        before = int(shell.run(SKIPPED))
        shell.run(JOB)
        assert int(shell.run(SKIPPED)) - before >= 0.9 * (256 * MIB >> 12)
        assert shell.run(BAD) == "0"


def test_the_daemon(machine: Path) -> None:
    """Boot under stock QEMU, and park."""
    run, report = under("With the daemon")
    assert run == RUN
    qemu = machine / "bin" / "qemu-system-x86_64"
    qemu.unlink()
    qemu.symlink_to(resolve.qemu("stock"))
    with started(run.replace("…", arguments(machine)), machine) as process:
        wait_until_ready(process, machine / "console")
        shell = Shell(machine)
        shell.run(f"{LATE}; {USE}")
        said = ask(report, machine)
        print(said)
        reported = re.search(r"(\d+) MiB", said)
        assert reported
        expect_at_least(int(reported[1]) * MIB, 0.9 * USED)
        before = int(shell.run(SKIPPED))
        shell.run(JOB)
        assert int(shell.run(SKIPPED)) - before >= 0.9 * (256 * MIB >> 12)
        assert shell.run(BAD) == "0"
