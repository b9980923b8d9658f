# SPDX-License-Identifier: GPL-2.0
"""Huge pages that the host's pool has for a guest as long as it runs."""

import re
from pathlib import Path

from lab.core import lock

POOL = Path("/proc/sys/vm/nr_hugepages")
SIZE = 2 << 20  # of the pool's pages on x86_64
_MEMORY = re.compile(r"(\d+)([MG])")


def take(memory: str) -> int:
    """Add pages for a guest with so much memory (such as 2G); their number, or 0 without them."""
    match = _MEMORY.fullmatch(memory)
    wanted = (int(match[1]) * {"M": 1 << 20, "G": 1 << 30}[match[2]]) // SIZE if match else 0
    with lock.locked("hugepages"):
        try:
            before = _size()
            if not wanted or _resize(before + wanted) == before + wanted:
                return wanted
            _resize(before)
        except (OSError, ValueError):
            pass  # not root, or a kernel without such a pool
        return 0


def give_back(pages: int) -> None:
    """Remove pages from the pool, after the end of their guest."""
    if pages:
        with lock.locked("hugepages"):
            _resize(max(0, _size() - pages))


def _size() -> int:
    return int(POOL.read_text(encoding="ascii"))


def _resize(pages: int) -> int:
    POOL.write_text(f"{pages}\n", encoding="ascii")
    return _size()
