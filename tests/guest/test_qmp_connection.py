# SPDX-License-Identifier: GPL-2.0
"""Commands of QMP that stop the queues, end the connection to the daemon, or leave it alone."""

from __future__ import annotations

import time
from typing import Any

import pytest

from lab.boot.guest import Guest
from lab.core.errors import LabError
from tests.devices import wait_for
from tests.guest.guests import fine
from tests.guest.test_report_now_daemon import JOB, reported
from tests.guest.test_vhost_user import LATE, MIB, device_of, guest_with, until

pytestmark = pytest.mark.boots

RATE: dict[str, Any] = {"calc-time": 1}


def measured(guest: Guest) -> None:
    """calc-dirty-rate has ended."""
    deadline = time.monotonic() + 60
    while guest.qmp("query-dirty-rate")["status"] != "measured":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def works(guest: Guest) -> None:
    """The guest still reports, and the daemon proves it zero."""
    status = wait_for(
        device_of(guest), "a driver", lambda status: status["report"]["possible"] is True, 60
    )
    assert status["working"] is True and status["refused"] == 0
    result = reported(guest)
    assert result["zero"] == result["reported"] > 100 * MIB


def test_commands_that_leave_the_connection() -> None:
    """Under stock QEMU, which does not connect again."""
    script = f"{LATE}; pause up; {JOB}"
    extra = ["-action", "reboot=reset"]
    with guest_with(script, qemu="stock", extra_qemu=extra) as guest:
        until(guest, "up")
        works(guest)
        guest.qmp("stop")
        guest.qmp("cont")
        works(guest)
        for mode in ("page-sampling", "dirty-bitmap"):
            guest.qmp("calc-dirty-rate", **RATE, mode=mode)
            measured(guest)
            works(guest)
        dump: dict[str, Any] = {"paging": False, "protocol": "file:/dev/null"}
        guest.qmp("dump-guest-memory", **dump)
        works(guest)
        for command, arguments in (
            ("migrate", {"uri": "file:/dev/null"}),
            ("chardev-remove", {"id": "kz-none"}),
        ):
            with pytest.raises(LabError):
                guest.qmp(command, **arguments)
        works(guest)
        guest.qmp("system_reset")
        until(guest, "up")
        works(guest)
        assert "the front end has hung up" not in device_of(guest).log.read_text()
        guest.send("")
        fine(guest.wait())


def test_commands_that_end_the_connection() -> None:
    """The daemon serves the next front end."""
    for command in ("quit", "device_del"):
        with guest_with(f"{LATE}; pause up; {JOB}", qemu="stock") as guest:
            device = device_of(guest)
            until(guest, "up")
            works(guest)
            if command == "quit":
                guest.qmp("quit")
            else:
                found = [
                    device["name"]
                    for device in guest.qmp("qom-list", path="/machine/peripheral-anon")
                    if "vhost-user-test-device" in device["type"]
                ]
                guest.qmp("device_del", id=f"/machine/peripheral-anon/{found[0]}")
            wait_for(device, "the end", lambda status: status["regions"] == [], 60)
            assert "no front end is connected" in device.status()["report"]["why_not"]
            if command != "quit":
                guest.send("")
                fine(guest.wait())
