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
    try:
        return int((POOL / "free_hugepages").read_text())
    except OSError:
        return 0


@contextmanager
def reserved(wanted: int) -> Iterator[int]:
    """Put ``wanted`` more pages into the pool, and leave it as it was; how many are free then.

    That is less than ``wanted`` where nobody may reserve them, or memory is short. One test at a
    time: another one would take from what this one counts, or restore a size that is not the one
    before both.
    """
    with lock.locked("huge-pages"):
        hugepages.reclaim()
        size = POOL / "nr_hugepages"
        try:
            before = size.read_text()
            size.write_text(str(int(before) + wanted))
        except (OSError, ValueError):
            yield free()
            return
        try:
            yield free()
        finally:
            # A page that a device still has leaves the pool later. Until then the next test would
            # take it for one of the pool, and leave it there.
            deadline = time.monotonic() + WAIT_S
            while True:
                size.write_text(before)
                if size.read_text() == before or time.monotonic() > deadline:
                    break
                time.sleep(0.05)
