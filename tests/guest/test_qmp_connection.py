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
from tests.guest.test_vhost_user import LATE, device_of, guest_with, until

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
        device_of(guest), "a driver", lambda status: status["report"]["possible"] is True
    )
    assert status["working"] is True and status["refused"] == 0
    # Blocks that were reported before are not reported again.
    result = reported(guest)
    assert result["zero"] == result["reported"]


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
        anonymous = "/machine/peripheral-anon"
        found = guest.qmp("qom-list", path=anonymous)
        device = next(each["name"] for each in found if "vhost-user" in each["type"])
        for command, arguments, why in (
            ("migrate", {"uri": "file:/dev/null"}, "non-migratable device"),
            ("chardev-remove", {"id": "kzballoon"}, "is busy"),
            ("device_del", {"id": f"{anonymous}/{device}"}, "does not support hotplugging"),
        ):
            with pytest.raises(LabError, match=why):
                guest.qmp(command, **arguments)
        works(guest)
        guest.qmp("system_reset")
        until(guest, "up")
        works(guest)
        assert "the front end has hung up" not in device_of(guest).log.read_text()
        guest.send("")
        fine(guest.wait())


def test_quit_ends_the_connection() -> None:
    """The daemon serves the next front end."""
    with guest_with(f"{LATE}; pause up; {JOB}", qemu="stock") as guest:
        device = device_of(guest)
        until(guest, "up")
        works(guest)
        guest.qmp("quit")
        wait_for(device, "the end", lambda status: status["regions"] == [])
        assert "no front end is connected" in device.status()["report"]["why_not"]
