# SPDX-License-Identifier: GPL-2.0
"""Inflate and deflate the balloon of a running guest from the host."""

import time

from lab.boot.guest import Guest
from lab.core.errors import TestFailure


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


def resize(guest: Guest, size: int, timeout: float = 120.0) -> None:
    """Set the guest's memory to ``size`` bytes and wait for it; see ``fill``."""
    fill(guest, _memory(guest) - size, timeout)
