# SPDX-License-Identifier: GPL-2.0
"""Other users of this machine: swap and huge pages."""

from pathlib import Path

PROC = Path("/proc")
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")


def swaps() -> dict[str, tuple[int, int]]:
    """The size of each place that the machine swaps to, and what is in use, in bytes."""
    file = PROC / "swaps"  # a kernel without swap has none
    lines = file.read_text(encoding="utf-8").splitlines()[1:] if file.exists() else []
    fields = [line.rsplit(maxsplit=4) for line in lines]
    return {name: (int(size) << 10, int(used) << 10) for name, _, size, used, _ in fields}


def huge_pages() -> tuple[int, int]:
    """How many huge pages of 2 MiB are in use, and how many the machine has."""
    have, free = (
        int((POOL / name).read_text(encoding="ascii")) if POOL.is_dir() else 0
        for name in ("nr_hugepages", "free_hugepages")
    )
    return have - free, have
