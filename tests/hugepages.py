# SPDX-License-Identifier: GPL-2.0
"""Huge pages of the host's pool, for tests of memory that is made of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.boot import hugepages
from lab.core import lock

POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGE = 2 << 20
WAIT_S = 60.0


def free() -> int:
    """How many of the pool nobody uses; 0 where there is no pool."""
    return _count("free_hugepages")


def surplus() -> int:
    """How many leave the pool when they are free; 0 where there is no pool."""
    return _count("surplus_hugepages")


def _count(name: str) -> int:
    try:
        return int((POOL / name).read_text())
    except OSError:
        return 0


@contextmanager
def reserved(wanted: int) -> Iterator[int]:
    """Put ``wanted`` more pages into the pool, and take them out again; how many are free then.

    There are none more where nobody may reserve them, or memory is short. One test at a time:
    another one would take from what this one counts.
    """
    with lock.locked("huge-pages"):
        taken = hugepages.take(f"{wanted * HUGE >> 20}M")
        try:
            yield free()
        finally:
            hugepages.give_back(taken)
            # A page that a device still has leaves the pool later, and is a surplus until then.
            deadline = time.monotonic() + WAIT_S
            while surplus() and time.monotonic() < deadline:
                time.sleep(0.05)
