# SPDX-License-Identifier: GPL-2.0
"""Huge pages that the host's pool has for a guest as long as it runs."""

import contextlib
import fcntl
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lab.core import lock, paths

POOL = Path("/proc/sys/vm/nr_hugepages")
SIZE = 2 << 20  # of the pool's pages on x86_64
MAP_HUGETLB = 0x40000
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMORY = re.compile(r"(\d+)([MG])")


@dataclass(frozen=True)
class Taken:
    """Pages of the pool for a guest.

    ``record`` has their number, and is locked: the kernel unlocks it however this process ends.
    """

    pages: int
    record: IO[str]


def take(memory: str) -> Taken | None:
    """Add pages for a guest with so much memory (such as 2G); None without them.

    Pages that a lab has left behind are removed first.
    """
    match = _MEMORY.fullmatch(memory)
    if match is None:
        return None
    wanted = int(match[1]) * {"M": 1 << 20, "G": 1 << 30}[match[2]] // SIZE
    with lock.locked("hugepages"):
        try:
            _reclaim()
            before = _size()
            if _resize(before + wanted) == before + wanted:
                _touch(wanted)
                return Taken(wanted, _record(wanted))
            _resize(before)
        except (OSError, ValueError):
            pass  # not root, or a kernel without such a pool
        return None


def give_back(taken: Taken | None) -> None:
    """Remove pages from the pool, after the end of their guest."""
    if taken:
        with lock.locked("hugepages"):
            _resize(max(0, _size() - taken.pages))
            Path(taken.record.name).unlink(missing_ok=True)
            taken.record.close()


def reclaim() -> None:
    """Remove the pages of labs that were killed. Does nothing where the pool cannot be changed."""
    with lock.locked("hugepages"):
        try:
            _reclaim()
        except (OSError, ValueError):
            return


def _record(pages: int) -> IO[str]:
    number = 0
    while (path := paths.sub("hugepages") / str(number)).exists():
        number += 1
    record = path.open("w", encoding="ascii")
    fcntl.flock(record, fcntl.LOCK_EX)
    record.write(f"{pages} {BOOT_ID.read_text(encoding='ascii')}")
    record.flush()
    return record


def _reclaim() -> None:
    for path in paths.sub("hugepages").iterdir():
        with path.open(encoding="ascii") as record:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue  # its lab runs
            pages, _, boot = record.read().partition(" ")
            if boot == BOOT_ID.read_text(encoding="ascii"):
                _resize(max(0, _size() - int(pages)))
            path.unlink()


def _touch(pages: int) -> None:
    """Use pages of the pool once: a host that is a guest may have reported their memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE | MAP_HUGETLB
    with contextlib.suppress(OSError), mmap.mmap(-1, pages * SIZE, flags=flags):
        pass


def _size() -> int:
    return int(POOL.read_text(encoding="ascii"))


def _resize(pages: int) -> int:
    POOL.write_text(f"{pages}\n", encoding="ascii")
    return _size()
