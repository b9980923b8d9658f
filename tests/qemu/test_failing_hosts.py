# SPDX-License-Identifier: GPL-2.0
"""Faults of the daemon and of migrations: the guest continues, and its data stays intact."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lab.bench.session import DELAY, Side
from lab.boot import balloon
from lab.boot.guest import Guest, running
from lab.build.daemon import Daemon
from tests.guest.guests import DIRTY, REPORT, VHOST_USER, Record, expect_at_least
from tests.guest.test_balloon import MB, guest, resize, vmstat
from tests.guest.test_faults import BACK, BAD, CORRUPTED, INTACT, KEEP, NONE, count, flags
from tests.qemu.test_migration import BUSY, MACHINE, arriving, guest_on

pytestmark = [
    pytest.mark.boots,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.matrix,
    pytest.mark.timeout(3600),
]

MEMORY = 768 * MB


def until(holds: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, holds
        time.sleep(0.02)


def goes_on(side: Side) -> None:
    """Data is intact.

    Reported and deflated memory is known zero, is zero, and a program uses it.
    """
    side.sh(f"(set -e; test ! -e /tmp/bad; {INTACT})")
    before = vmstat(side)
    side.sh(f"fillfree --share 60 > /dev/null; {REPORT}")
    for size in (MEMORY - 256 * MB, MEMORY):
        resize(side.guest, size, MEMORY)
    side.json("alloc_once", "--size", "128", "--pages", "thp", "--verify", "--mode", "touch_all")
    after = vmstat(side)
    assert after["pgzeroed_bad"] == 0
    for name in ("pgzeroed_set_reported", "pgzeroed_set_freed", "pgzeroed_skip"):
        expect_at_least(after[name] - before[name], 1000)


FAULTS = ("killed", "stopped", "interrupted", "without files", "without memory")
STATES = ("idle", "reporting", "inflating", "deflating")
ROUNDS = 3
DEVICE = f"{VHOST_USER},memory-is-shared,device-init-on-inflate=on"


def fail(device: Daemon, fault: str, seconds: float) -> bool:
    """Let a daemon fail; afterwards it works, as a new process if it has ended.

    True if the fault showed.
    """
    pid, shows = device.process.pid, True
    if fault == "killed":
        device.kill()
    elif fault == "stopped":
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
    elif fault == "interrupted":  # system calls that wait return EINTR
        for number in range(100):
            os.kill(pid, signal.SIGCONT if number % 2 else signal.SIGSTOP)
            time.sleep(0.002)
    else:
        # Two fewer than it has: the daemon reserves a descriptor, and poll() rejects a limit of 0.
        files = len(os.listdir(f"/proc/{pid}/fd")) - 2
        limit, most = (
            (resource.RLIMIT_NOFILE, files) if "files" in fault else (resource.RLIMIT_AS, 0)
        )
        before = resource.prlimit(pid, limit, (most, resource.prlimit(pid, limit)[1]))
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(0.5)
            client.connect(str(device.control))
            client.sendall(b'{"command": "status"}\n')
            with contextlib.suppress(TimeoutError):
                shows = not client.recv(1)
        # A client needs a descriptor; the memory for it is there already.
        assert shows == ("files" in fault)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, limit, before)
    time.sleep(0.2)
    if device.process.poll() is not None:
        device.restart()
    return shows


@pytest.mark.parametrize("fault", FAULTS)
def test_the_device_fails(fault: str, record_property: Record, tmp_path: Path) -> None:
    """A report in progress ends, the balloon gets its size, and everything works again."""
    faults = dict.fromkeys(STATES, 0)
    with guest(f"{DEVICE},state={tmp_path}/state", cpus=2, memory="768M", timeout=3000.0) as side:
        device = side.guest.daemon
        assert device is not None
        side.sh(f"{KEEP}; echo 3600000 > {DELAY}")
        for turn, state in itertools.product(range(ROUNDS), STATES):
            side.sh("reporter=; fillfree --share 60 >/dev/null")
            if state == "reporting":
                # The reporter waits for the first answer.
                os.kill(device.process.pid, signal.SIGSTOP)
                side.sh(f"({REPORT}) & reporter=$!; sleep 0.3")
                os.kill(device.process.pid, signal.SIGCONT)
            elif state == "inflating":
                device.ask(command="target", bytes=256 * MB)
            elif state == "deflating":
                resize(side.guest, MEMORY - 256 * MB, MEMORY)
                device.ask(command="target", bytes=0)
            time.sleep(0.03 * turn)
            faults[state] += fail(device, fault, 30 if (turn, state) == (1, "reporting") else 2)
            side.sh("wait $reporter")
            resize(side.guest, MEMORY, MEMORY)
            goes_on(side)
        assert device.status()["malformed"] == device.status()["refused"] == 0
    count(faults, record_property, 0 if fault == "without memory" else ROUNDS * len(STATES))


def test_a_page_goes_bad_while_it_is_reported(record_property: Record) -> None:
    """The device has the block; when it answers, the allocator gets the block without the page."""
    with guest(DEVICE, cpus=2, memory="768M", timeout=1500.0) as side:
        device = side.guest.daemon
        assert device is not None
        side.sh(f"{KEEP}; echo 3600000 > {DELAY}; {DIRTY}")
        os.kill(device.process.pid, signal.SIGSTOP)
        side.sh(
            f'({REPORT}) & reporter=$!; sleep 1; pages="{flags(NONE, 333)} {flags(NONE, 0)}"; {BAD}'
        )
        # A page that cannot be isolated is marked as well.
        bad = side.number(CORRUPTED) // 4
        os.kill(device.process.pid, signal.SIGCONT)
        side.sh(f"wait $reporter; (set -e; {BACK})")
        goes_on(side)
    count({"bad": bad}, record_property, 4)


BALLOON = balloon.device(device_init_on_inflate="on", free_page_reporting="on")
CAPABILITIES = ("return-path", "pause-before-switchover", "postcopy-ram")
PHASES = ("setup", "half", "again", "pre-switchover")


def depart(source: Guest, target: Guest, place: Path, speed: int, *more: str) -> None:
    """Begin a migration, with ``speed`` in bytes a second and more capabilities."""
    wanted = [
        {"capability": name, "state": name in ("return-path", *more)} for name in CAPABILITIES
    ]
    for one in (source, target):
        one.qmp("migrate-set-capabilities", capabilities=wanted)
    source.qmp("migrate-set-parameters", **{"max-bandwidth": speed, "downtime-limit": 300})
    target.qmp("migrate-incoming", uri=f"unix:{place}")
    source.qmp("migrate", uri=f"unix:{place}")


def reached(source: Guest, phase: str) -> bool:
    """Whether a migration is in a phase: a status, or a share of its memory."""
    found = source.qmp("query-migrate")
    ram = found.get("ram", {"remaining": 0, "total": 0, "dirty-sync-count": 0})
    # A migration that has completed or failed stays in that state.
    assert found["status"] == phase or found["status"] not in ("completed", "failed"), found
    half = 0 < ram["remaining"] < ram["total"] / 2
    now = {"setup": True, "half": half, "again": ram["dirty-sync-count"] > 2}
    return bool(now.get(phase, found["status"] == phase))


def ended(source: Guest) -> bool:
    """Whether a migration has ended; one that waits before its switchover continues, and fails."""
    status = source.qmp("query-migrate")["status"]
    if status == "pre-switchover":
        source.qmp("migrate-continue", state=status)
    assert status != "completed"
    # Cancelling closes the channel, and the sender may see that first.
    return status in ("cancelled", "failed")


@pytest.mark.parametrize("end", ["precopy", "postcopy"])
def test_migrations_fail(end: str, qemu: Path, tmp_path: Path, record_property: Record) -> None:
    """Migrations are cancelled or lose their destination in each phase.

    The last migration succeeds.
    """
    spec = replace(guest_on(qemu, MACHINE, BALLOON), timeout=3000.0)
    failures = list(itertools.product(("cancelled", "failed"), PHASES))
    with running(spec) as source:
        side = Side("source", source)
        side.sh(f"{KEEP}; {BUSY}")
        for how, phase in failures:
            with arriving(qemu, MACHINE, BALLOON) as target:
                side.sh("fillfree --share 60 > /dev/null")
                fast = phase == "pre-switchover"
                depart(
                    source,
                    target,
                    tmp_path / (how + phase),
                    1 << (40 if fast else 26),
                    CAPABILITIES[1],
                )
                until(partial(reached, source, phase))
                if how == "failed":
                    target.process.kill()
                    target.process.wait()
                else:
                    source.qmp("migrate_cancel")
                until(partial(ended, source))
                until(lambda: source.qmp("query-status")["running"])
            goes_on(side)
        with arriving(qemu, MACHINE, BALLOON) as target:
            side.sh("fillfree --share 60 > /dev/null")
            if end == "postcopy":
                depart(source, target, tmp_path / end, 1 << 26, CAPABILITIES[2])
                until(partial(reached, source, "half"))
                source.qmp("migrate-start-postcopy")
            else:
                depart(source, target, tmp_path / end, 1 << 40)
                source.qmp("migrate-set-parameters", **{"downtime-limit": 5000})
            until(partial(reached, source, "completed"))
            side = Side("target", target)
            goes_on(side)
            assert target.ending().fault() is None
    count({f"{how}, {phase}": 1 for how, phase in failures}, record_property, 8)
