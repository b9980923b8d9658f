# SPDX-License-Identifier: GPL-2.0
"""The sizes of guests that the machine has memory for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lab.core.errors import LabError

SIZES = (1, 2, 4)  # GB
MORE = 8
# All guests without a balloon are touched from end to end, which is the most that is in use at a time; what QEMU
# takes besides, and what others may come to need.
ROOM = 1.2


def available_gb() -> float:
    """Memory that the machine can give to guests, in GB."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def needed_gb(gbs: Sequence[int]) -> float:
    """Memory that must be available for guests of these sizes, in GB."""
    return ROOM * sum(gbs)


def sizes(available: float) -> tuple[int, ...]:
    """Which guests fit into so many GB; LabError when not even the usual ones do."""
    if available >= needed_gb((*SIZES, MORE)):
        return (*SIZES, MORE)
    if available < needed_gb(SIZES):
        raise LabError(
            "Not enough memory to measure guests of up to 4 GB",
            f"{available:.1f} GB are available, {needed_gb(SIZES):.1f} GB are needed",
            "end what else runs on the machine",
        )
    return SIZES
