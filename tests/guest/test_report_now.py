# SPDX-License-Identifier: GPL-2.0
"""The host has all free memory reported: feature bit 16 of the balloon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.bench.session import LATE, LOOP, Side, resident
from lab.boot import balloon
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from lab.core.errors import LabError
from tests.guest.guests import (
    BALLOON,
    CHECK,
    CHECKED,
    DIRTY,
    OutOfLuck,
    expect_at_least,
    expect_at_most,
)

pytestmark = pytest.mark.boots

MB = 1 << 20
# How long a run may take before the host gives up, and before a test does.
TIMEOUT_MS = 300_000
PATIENCE_S = 330.0
DRIVER = "/sys/bus/virtio/drivers/virtio_balloon"
USE_ALL = "alloc_once --size 512 --pages thp --verify --mode touch_all > /dev/null"
# Free memory in single pages, each a block to report, so that a run takes some seconds.
PIECES = "page_reporting.page_reporting_order=0"
SCATTER = (
    "mkfifo /tmp/pieces; scatter --size 400 --group 2 < /tmp/pieces > /tmp/scattered & "
    "exec 5> /tmp/pieces; echo '1 0' >&5; "
    "until [ $(wc -l < /tmp/scattered) -ge 2 ]; do sleep 0.1; done"
)


@contextmanager
def guest(append: str = "", device: str = BALLOON, **more: Any) -> Iterator[Side]:
    """A running guest in which nothing is reported but on request."""
    fields: dict[str, Any] = {
        "kernel": CHECKED,
        "devices": [device],
        "memory": "1G",
        "cpus": 2,
        "append": f"{CHECK} {append}",
        "timeout": 900.0,
        "command": ["sh", "-c", LOOP],
    }
    with running(BootSpec(**(fields | more))) as one:
        side = Side("ours", one)
        side.sh(LATE)
        yield side


def last(guest: Guest) -> dict[str, Any]:
    found: dict[str, Any] = guest.qmp("query-balloon")["report-now"]
    return found


def start(guest: Guest, timeout_ms: int = TIMEOUT_MS) -> int:
    return int(guest.qmp("balloon-report-now", timeout=timeout_ms)["id"])


def ended(guest: Guest) -> dict[str, Any]:
    """The result of the last command once it has one."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := last(guest))["status"] == "running":
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def report(guest: Guest) -> dict[str, Any]:
    """Have all free memory reported; the guest must do it."""
    number = start(guest)
    found = ended(guest)
    assert (found["id"], found["status"]) == (number, "completed")
    return found


def busy(side: Side, timeout_ms: int = TIMEOUT_MS) -> int:
    """Start a run that takes a while, and see it under way."""
    side.sh(SCATTER)
    number = start(side.guest, timeout_ms)
    deadline = time.monotonic() + PATIENCE_S
    while not (found := last(side.guest))["reported"]:
        assert time.monotonic() < deadline, found
    if found["status"] != "running":
        raise OutOfLuck("the pass ended before it was seen")
    return number


def test_the_host_gets_the_memory_back() -> None:
    with guest() as side:
        report(side.guest)
        side.sh(USE_ALL)
        full = resident(side.guest.pid)
        before = side.vmstat()["pgzeroed_set_reported"]
        found = report(side.guest)
        back = full - resident(side.guest.pid)
        marked = (side.vmstat()["pgzeroed_set_reported"] - before) * 4096
        print(f"{back / MB:.0f} MiB came back: {found}, {marked / MB:.0f} MiB are newly known")
        # The rest of the 512 MiB: what a pass that waited already has reported before.
        expect_at_least(found["zero"], 448 * MB)
        expect_at_least(back, 430 * MB)
        # All of it is zero, and both sides say so. A block that was known before and has merged
        # since is reported again, but counts only once as known.
        assert found["reported"] == found["discarded"] == found["zero"]
        expect_at_most(marked, found["zero"])
        expect_at_least(marked, 448 * MB)
        # What has not been used since is not reported again.
        expect_at_most(report(side.guest)["reported"], 64 * MB)
        skipped = side.vmstat()["pgzeroed_skip"]
        side.sh(USE_ALL)
        expect_at_least((side.vmstat()["pgzeroed_skip"] - skipped) * 4096, 480 * MB)
        assert side.vmstat()["pgzeroed_bad"] == 0


def test_without_bit_6() -> None:
    """The two bits do not need each other."""
    with guest(device=f"{BALLOON},x-device-init-reported=off") as side:
        side.sh(DIRTY)
        found = report(side.guest)
        expect_at_least(found["discarded"], 400 * MB)
        assert found["reported"] == found["discarded"]
        assert found["zero"] == 0


def test_a_driver_that_refuses() -> None:
    with guest("virtio_balloon.report_now=0") as side:
        with pytest.raises(LabError, match="no balloon driver that reports on request"):
            start(side.guest)
        assert "report-now" not in side.guest.qmp("query-balloon")
        log = "\n".join(side.sh("dmesg | grep 'not using'"))
        assert "not using REPORT_NOW: refused by parameter" in log


def test_a_guest_that_is_stopped() -> None:
    """The time-out ends the command, and the guest does it when it goes on."""
    with guest() as side:
        side.sh(DIRTY)
        side.guest.qmp("stop")
        number = start(side.guest, 300)
        found = ended(side.guest)
        assert (found["id"], found["status"], found["reported"]) == (number, "timeout", 0)
        assert 300 <= found["milliseconds"] < 30_000
        counted = side.guest.qmp("query-balloon")["reported"]["discarded"]
        side.guest.qmp("cont")
        deadline = time.monotonic() + PATIENCE_S
        while side.guest.qmp("query-balloon")["reported"]["discarded"] < counted + 400 * MB:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert last(side.guest)["status"] == "timeout"
        report(side.guest)


def test_while_the_balloon_inflates() -> None:
    """A command that comes with the start of an inflation: both come to their end."""
    with guest() as side:
        side.sh(DIRTY)
        target = 512 * MB
        # Else a fast guest has inflated before the command comes.
        side.guest.qmp("stop")
        side.guest.qmp("balloon", value=target)
        number = start(side.guest)
        side.guest.qmp("cont")
        found = ended(side.guest)
        assert (found["id"], found["status"]) == (number, "completed")
        balloon.resize(side.guest, target)
        # The balloon's pages are not free: what is reported from now on leaves them out.
        side.sh(USE_ALL.replace("512", "256"))
        expect_at_most(report(side.guest)["reported"], 512 * MB)
        assert side.guest.qmp("query-balloon")["actual"] == target
        assert side.vmstat()["pgzeroed_bad"] == 0


def test_newer_commands_and_other_changes() -> None:
    """A newer number ends the run, and interrupts about the balloon's size do not."""
    with guest(PIECES) as side:
        first = busy(side)
        for size in range(1000, 1024, 4):
            side.guest.qmp("balloon", value=size * MB)
        numbers = [start(side.guest) for _ in range(5)]
        assert numbers == list(range(first + 1, first + 6))
        found = ended(side.guest)
        assert (found["id"], found["status"]) == (numbers[-1], "completed")
        side.guest.qmp("balloon", value=1024 * MB)
        # Nothing is left of the pieces: the last run has done all of it.
        expect_at_most(report(side.guest)["reported"], 64 * MB)


def test_the_driver_goes_and_comes_back() -> None:
    """Unbinding waits for a few blocks, not for a run that takes seconds."""
    with guest(PIECES) as side:
        number = busy(side)
        side.sh(f"cd {DRIVER}; d=$(ls -d virtio*); echo $d > unbind")
        found = last(side.guest)
        assert (found["id"], found["status"]) == (number, "reset")
        with pytest.raises(LabError, match="no balloon driver that reports on request"):
            start(side.guest)
        side.sh("echo $d > bind")
        report(side.guest)
        side.sh("exec 5>&-; wait")
        side.sh(USE_ALL)
        assert side.vmstat()["pgzeroed_bad"] == 0


# The lab's channels do not survive the suspend: the guest speaks on its serial console.
REPORTED = "$(sed -n 's/^pgzeroed_set_reported //p' /proc/vmstat)"
SUSPEND = f"""
exec > /dev/ttyS0 2>&1
{LATE}; {SCATTER}
n={REPORTED}; echo ready-for-reports; until [ {REPORTED} -gt $n ]; do :; done
echo mem > /sys/power/state
n={REPORTED}; echo ready-after-sleep; until [ {REPORTED} -gt $n ]; do sleep 0.1; done; sleep 3
{USE_ALL}
grep pgzeroed_bad /proc/vmstat
echo suspend-test-done
"""


def said(one: Guest, what: str) -> str:
    """The console of a guest once it has said something."""
    deadline = time.monotonic() + PATIENCE_S
    while what not in (text := one.console.read_text(errors="replace")):
        assert "-test-failed" not in text, text[-3000:]
        assert time.monotonic() < deadline, f"no {what}:\n{text[-3000:]}"
        time.sleep(0.1)
    return text


def test_suspended_while_it_runs() -> None:
    """The suspend waits for a few blocks, and the next run does what is left."""
    command = ["sh", "-c", f"set -e; trap 'echo suspend-test-failed' EXIT\n{SUSPEND}trap - EXIT"]
    spec = BootSpec(
        kernel=CHECKED,
        devices=[BALLOON],
        memory="1G",
        cpus=2,
        append=f"{CHECK} {PIECES}",
        timeout=300.0,
        command=command,
    )

    with running(spec) as one:
        said(one, "ready-for-reports")
        number = start(one)
        deadline = time.monotonic() + PATIENCE_S
        while one.qmp("query-status")["status"] != "suspended":
            assert time.monotonic() < deadline, last(one)
            time.sleep(0.1)
        found = last(one)
        assert (found["id"], found["status"]) == (number, "reset")
        one.qmp("system_wakeup")
        said(one, "ready-after-sleep")
        report(one)
        text = said(one, "suspend-test-done")
    assert "PM: suspend exit" in text
    assert "pgzeroed_bad 0" in text


HIBERNATE = f"""
{LATE}; mkswap /dev/vda > /dev/null; swapon /dev/vda
echo reboot > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
n={REPORTED}; echo ready-after-resume; until [ {REPORTED} -gt $n ]; do sleep 0.1; done
{USE_ALL}
grep pgzeroed_bad /proc/vmstat
echo hibernation-test-done
"""


@pytest.mark.parametrize("offered", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_resumed_under_another_device(tmp_path: Path, offered: bool) -> None:
    """The driver asks the device that is there now whether it has the bit."""
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(1024 * MB)

    def spec(device: str, *extra: str) -> BootSpec:
        command = f"set -e; trap 'echo hibernation-test-failed' EXIT\n{HIBERNATE}trap - EXIT"
        return BootSpec(
            kernel=CHECKED,
            memory="768M",
            devices=[device, "virtio-blk-pci,drive=swap"],
            extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe", *extra],
            append=f"{CHECK} resume=/dev/vda",
            timeout=900.0,
            command=["sh", "-c", command],
        )

    with running(spec(BALLOON)) as one:
        deadline = time.monotonic() + PATIENCE_S
        while one.process.poll() is None:
            assert time.monotonic() < deadline, one.console.read_text(errors="replace")[-3000:]
            time.sleep(0.2)
    # It waits for "cont": the user space that comes up is that of the first guest.
    with running(spec(BALLOON if offered else f"{BALLOON},x-report-now=off", "-S")) as one:
        one.qmp("cont")
        said(one, "ready-after-resume")
        if not offered:
            with pytest.raises(LabError, match="does not offer this"):
                start(one)
            # The driver gets interrupts about the configuration, which ends before the numbers.
            balloon.resize(one, 700 * MB)
            return
        report(one)
        assert "pgzeroed_bad 0" in said(one, "hibernation-test-done")
