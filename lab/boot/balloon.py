# SPDX-License-Identifier: GPL-2.0
"""Inflate and deflate the balloon of a running guest from the host."""

import time
from typing import Any

from lab.boot.guest import Guest
from lab.core.errors import TestFailure


def device(**properties: object) -> str:
    """A balloon with properties, such as ``device(device_init_on_inflate="on")``."""
    named = [f"{name.replace('_', '-')}={value}" for name, value in properties.items()]
    return ",".join(["virtio-balloon-pci", "id=balloon", *named])


def actual(guest: Guest) -> int:
    """Bytes of memory the guest has now, by its driver."""
    return int(guest.qmp("query-balloon")["actual"])


def resize(guest: Guest, size: int, timeout: float = 120.0) -> None:
    """Set the guest's memory to ``size`` bytes and wait for it; TestFailure when it takes too long."""
    guest.qmp("balloon", value=size)
    deadline = time.monotonic() + timeout
    while actual(guest) != size:
        if time.monotonic() > deadline:
            why = f"after {timeout:g} s the guest has {actual(guest) >> 20} MB instead of {size >> 20} MB"
            fix = "look at the guest's console log for 'Out of puff'"
            raise TestFailure("the balloon does not get to its size", why, fix)
        time.sleep(0.05)


def stats(guest: Guest) -> dict[str, Any]:
    """The device's counters of inflation in bytes; ``skipped`` by reason, without those that have not occurred."""
    found: dict[str, Any] = guest.qmp("query-balloon")["inflated"]
    return {**found, "skipped": {one["reason"]: one["bytes"] for one in found["skipped"]}}
