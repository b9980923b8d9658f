# SPDX-License-Identifier: GPL-2.0
"""The subcommand report of the daemon, with our kernel's driver in the guest."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from lab.boot.guest import Guest
from lab.build import daemon
from tests.guest.guests import (
    CHECKED,
    DIRTY,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
)
from tests.guest.test_vhost_user import LATE, MIB, device_of, guest_with, memory, until

pytestmark = pytest.mark.boots

UNAVAILABLE, TEMPORARY = 69, 75
JOB = "alloc_once --size 128 --pages nothp --verify"
FILLED = f"{LATE}; {DIRTY}; pause filled; {JOB}; grep pgzeroed_ /proc/vmstat"


def report(guest: Guest, *options: str) -> subprocess.CompletedProcess[str]:
    """The subcommand, as an operator runs it."""
    argv = [str(daemon.build()), "report", "--json", "--control", str(device_of(guest).control)]
    return subprocess.run(
        [*argv, *options], capture_output=True, text=True, timeout=90, check=False
    )


def reported(guest: Guest) -> dict[str, Any]:
    """What it prints."""
    done = report(guest, "--timeout", "60")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def takes_all_free_memory(least: int, skipped: float, **more: Any) -> None:
    """The host has the guest's free memory when the subcommand ends, and the guest need not zero it
    again.
    """
    with guest_with(FILLED, **more) as guest:
        until(guest, "filled")
        filled = memory(guest)
        status = device_of(guest).status()
        assert "report-now" in status["features"] and status["report"]["possible"]
        first = reported(guest)
        assert first["zero"] == first["reported"]
        # On a busy machine, a pass that was under way already has reported a part of it.
        expect_at_least(first["zero"], least)
        expect_at_most(memory(guest), filled - least)
        # Nothing is reported twice.
        second = reported(guest)
        assert second["zero"] == second["reported"]
        expect_at_most(second["reported"], 64 * MIB)
        print(f"{first['reported'] >> 20} MiB in {first['milliseconds']} ms")
        guest.send("")
        result = guest.wait()
    fine(result)
    expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], skipped * (128 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_report_under_patched_qemu() -> None:
    takes_all_free_memory(200 * MIB, 0.9)


def test_report_under_stock_qemu() -> None:
    takes_all_free_memory(200 * MIB, 0.9, qemu="stock")


def test_report_of_user_mode_linux() -> None:
    takes_all_free_memory(200 * MIB, 0.8, arch="um", size="512M")


def refused(guest: Guest, code: int, text: str) -> None:
    """It ends at once, with this exit code and reason."""
    done = report(guest)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert text in done.stderr


def test_a_guest_that_is_paused_or_reset() -> None:
    with guest_with(
        f"{LATE}; {DIRTY}; pause up; {JOB}", qemu="stock", extra_qemu=["-action", "reboot=reset"]
    ) as guest:
        until(guest, "up")
        guest.qmp("stop")
        refused(guest, TEMPORARY, "driver has not started, or has stopped")
        guest.qmp("cont")
        expect_at_least(reported(guest)["reported"], 100 * MIB)
        guest.qmp("system_reset")
        until(guest, "up")
        expect_at_least(reported(guest)["reported"], 100 * MIB)
        guest.send("")
        fine(guest.wait())


def test_a_driver_that_refuses() -> None:
    append = "virtio_balloon.report_now=0"
    with guest_with(f"{LATE}; pause up; {JOB}", kernel=CHECKED, append=append) as guest:
        until(guest, "up")
        refused(guest, UNAVAILABLE, "has not accepted feature bit 16; use the subcommand flush")
        assert "report-now" not in device_of(guest).status()["features"]
        guest.send("")
        fine(guest.wait())


def test_a_guest_that_poisons_free_pages() -> None:
    """The device does not discard them: the guest checks them for the poison when it uses them."""
    with guest_with(
        f"{LATE}; {DIRTY}; pause up; {JOB}", kernel="debug", append="page_poison=1"
    ) as guest:
        until(guest, "up")
        refused(guest, UNAVAILABLE, "none went back to the host")
        assert device_of(guest).status()["discarded"] == 0
        guest.send("")
        fine(guest.wait())


def test_a_kernel_without_the_driver() -> None:
    with guest_with("pause up", kernel="stock") as guest:
        until(guest, "up")
        refused(guest, UNAVAILABLE, "has not accepted feature bit 16")
        guest.send("")
        fine(guest.wait())
