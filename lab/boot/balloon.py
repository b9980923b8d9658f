# SPDX-License-Identifier: GPL-2.0
"""The balloon of a running guest: inflate and deflate it, have all free memory reported."""

import time

from lab.boot.guest import Guest
from lab.core.errors import TestFailure

REPORT_S = 120  # in which a guest has to report all of its free memory
LOOK_S = 0.002


def device(**properties: object) -> str:
    """A balloon with properties, such as ``device(device_init_on_inflate="on")``."""
    named = [f"{name.replace('_', '-')}={value}" for name, value in properties.items()]
    return ",".join(["virtio-balloon-pci", "id=balloon", *named])


def held(guest: Guest) -> int:
    """Bytes in the balloon, by the guest's driver."""
    if guest.daemon:
        return int(guest.daemon.ask(command="target")["actual"])
    return _memory(guest) - int(guest.qmp("query-balloon")["actual"])


def _memory(guest: Guest) -> int:
    return int(guest.qmp("query-memory-size-summary")["base-memory"])


def fill(guest: Guest, size: int, timeout: float = 120.0) -> None:
    """Have the balloon hold ``size`` bytes and wait until it does.

    TestFailure when that takes too long.
    """
    if guest.daemon:
        guest.daemon.ask(command="target", bytes=size)
    else:
        guest.qmp("balloon", value=_memory(guest) - size)
    deadline = time.monotonic() + timeout
    while (now := held(guest)) != size:
        if time.monotonic() > deadline:
            why = f"after {timeout:g} s it holds {now >> 20} MB instead of {size >> 20} MB"
            fix = "look at the guest's console log for 'Out of puff'"
            raise TestFailure("the balloon does not get to its size", why, fix)
        time.sleep(0.01)


def report_now(guest: Guest) -> None:
    """Have the guest report all free memory, and wait until the host has it.

    TestFailure when the command fails.
    """
    if guest.daemon:
        command, found = "report", guest.daemon.ask(command="report", timeout=REPORT_S)
        done = found["ok"]
    else:
        command = "balloon-report-now"
        guest.qmp(command, timeout=REPORT_S * 1000)
        while (found := guest.qmp("query-balloon")["report-now"])["status"] == "running":
            time.sleep(LOOK_S)
        done = found["status"] == "completed"
    if not done:
        raise TestFailure(f"{command} fails", f"it ended as {found}", "read the guest's console")


def resize(guest: Guest, size: int, timeout: float = 120.0) -> None:
    """Set the guest's memory to ``size`` bytes and wait for it; see ``fill``."""
    fill(guest, _memory(guest) - size, timeout)
