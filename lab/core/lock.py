# SPDX-License-Identifier: GPL-2.0
"""Locks between processes, and files and folders that appear whole or not at all."""

import fcntl
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.core import paths


class _Held(threading.local):
    """The descriptors of the locks of a thread."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []


_held = _Held()


def held() -> list[int]:
    """The descriptors of all locks of this thread.

    A build that inherits them keeps the locks if it outlives this process.
    """
    return list(_held.descriptors)


@contextmanager
def locked(name: str, shared: bool = False) -> Iterator[None]:
    """Hold the cache lock ``name`` (alone, or with other readers).

    Prints a line when it must wait.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    with open(paths.sub("locks") / safe, "w", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"kz: waiting for another kz that works on {name}", file=sys.stderr, flush=True)
            fcntl.flock(handle, mode)
        _held.descriptors.append(handle.fileno())
        try:
            yield
        finally:
            _held.descriptors.remove(handle.fileno())


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Give a temporary folder that replaces ``target`` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield work
        work.chmod(0o755)
        if target.exists():
            old = Path(
                tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent)
            )
            target.rename(old / "x")
            work.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Give a temporary file path that becomes ``target`` when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    work = Path(name)
    try:
        yield work
        work.replace(target)
    finally:
        work.unlink(missing_ok=True)


def write_atomically(target: Path, content: bytes | str, mode: int = 0o644) -> None:
    """Write a file so that readers see the old or the new content, never a part."""
    data = content.encode() if isinstance(content, str) else content
    with new_file(target) as work:
        work.write_bytes(data)
        work.chmod(mode)


def write_if_changed(target: Path, content: bytes, mode: int = 0o644) -> bool:
    """Write only what differs, so that make sees only what changed. True if written."""
    if target.is_file() and not target.is_symlink() and target.read_bytes() == content:
        if (target.stat().st_mode & 0o777) != mode:
            target.chmod(mode)
        return False
    write_atomically(target, content, mode)
    return True
