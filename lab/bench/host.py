# SPDX-License-Identifier: GPL-2.0
"""Memory that guests fill and free, and the wait until their host has it back."""

import json
import time
from collections.abc import Callable

from lab.bench.session import DELAY, MIB, Side, resident, warm_host
from lab.core.errors import TestFailure

SIZES, MORE = (1, 2, 4), 8  # GiB of guests, and of one more where the machine has room
BACK_PERCENT = 90  # of what a guest has freed: so much has to be back
ROOM = 1.2  # memory needed for each GiB of guests that are all full


def sizes(available: float) -> tuple[int, ...]:
    """The guests that fit into so many GiB; the runner has seen to it that the usual ones do."""
    return (*SIZES, MORE) if available >= ROOM * sum((*SIZES, MORE)) else SIZES


def fill_mb(gb: int, percent: int) -> int:
    """So many percent of a guest's memory in MB; a multiple of 16, which fillfree takes at once."""
    return gb * 1024 * percent // 100 // 16 * 16


def fill(side: Side, size_mb: int, *, more: str = "", warm: bool = True) -> int:
    """Have a process fill ``size_mb`` and hold them; resident bytes of the VMM then."""
    if warm:
        warm_host(size_mb * MIB)
    # In the background: the shell goes on while the memory stays filled.
    side.sh("rm -f /tmp/hold /tmp/filled; mkfifo /tmp/hold")
    side.sh(
        f"(fillfree --size {size_mb} {more} --hold < /tmp/hold > /tmp/filled) & exec 9> /tmp/hold"
    )
    filled = side.sh(
        "for i in $(seq 600); do grep -q filled_bytes /tmp/filled && break; sleep 0.1; done; "
        "cat /tmp/filled"
    )
    sizes = [json.loads(line).get("filled_bytes") for line in filled if line.startswith("{")]
    if sizes != [size_mb * MIB]:
        why = f"fillfree printed {filled}"
        fix = "give the guest more memory with --memory"
        raise TestFailure(f"The {side.name} guest did not fill {size_mb} MB", why, fix)
    return resident(side.guest.pid)


def release(side: Side) -> None:
    """Have the process of ``fill`` free its memory; does not wait until it has."""
    side.sh("echo >&9; exec 9>&-")


def until_back(side: Side, full: int, wanted: int, timeout: float = 120.0) -> None:
    """Wait until the VMM, which had ``full`` resident bytes, has ``wanted`` less.

    TestFailure after ``timeout`` s.
    """
    began = time.monotonic()
    while (back := full - resident(side.guest.pid)) < wanted:
        if time.monotonic() - began > timeout:
            why = (
                f"after {timeout:.0f} s it has {back // MIB} MB of the expected {wanted // MIB} MB"
            )
            fix = f"look at {DELAY} in the guest, and at the status of the balloon"
            raise TestFailure(f"The host does not get its memory back ({side.name})", why, fix)
        time.sleep(0.005)


def take_back(side: Side, take: Callable[[], object], size: int) -> float:
    """Milliseconds from a command until the host has most of the ``size`` bytes that it is to
    return.
    """
    full, began = resident(side.guest.pid), time.monotonic()
    take()
    until_back(side, full, size * BACK_PERCENT // 100)
    return (time.monotonic() - began) * 1e3
