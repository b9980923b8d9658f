# SPDX-License-Identifier: GPL-2.0
"""Other users of this machine: swap, huge pages, and another apt or dpkg."""

import contextlib
from pathlib import Path

PROC = Path("/proc")
POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
LOCKS = [Path("/var/lib") / name for name in ("dpkg/lock-frontend", "dpkg/lock", "apt/lists/lock")]


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


def package_manager() -> str:
    """The process that holds a lock of apt or dpkg, and that lock; empty if there is none.

    Only root may open the locks, but /proc/locks has the inode of each for all. The device there is
    not that of stat() on overlayfs.
    """
    files = {}
    for lock in LOCKS:
        with contextlib.suppress(OSError):
            files[str(lock.stat().st_ino)] = lock
    for line in (PROC / "locks").read_text(encoding="ascii").splitlines():
        fields = line.split()
        if fields[1] != "POSIX":  # or a process that waits
            continue
        pid, inode = fields[4], fields[5].rpartition(":")[2]
        if held := files.get(inode):
            name = "a process"
            with contextlib.suppress(OSError):
                name = (PROC / pid / "comm").read_text(encoding="utf-8").strip()
            return f"{name} ({pid}) holds {held}"
    return ""
