# SPDX-License-Identifier: GPL-2.0
"""A long check of nothing but files need not be done again while these are the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.build.images import compiler
from lab.core import lock, paths


def key_of(inputs: Iterable[Path]) -> str:
    """A name for the content of files and folders, of the lab's code and of the compiler."""
    digest = hashlib.sha256(compiler().encode())
    for top in [*inputs, paths.REPO / "lab"]:
        files = sorted(top.rglob("*")) if top.is_dir() else [top]
        for file in files:
            if file.is_file() and file.suffix != ".pyc":
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{file.relative_to(paths.REPO)} {content}\n".encode())
    return digest.hexdigest()


@contextmanager
def since_it_passed(name: str, inputs: Iterable[Path]) -> Iterator[bool]:
    """Whether nothing has changed since the check in this block passed; $KNOWNZERO_AGAIN says no."""
    stamp = paths.sub("passed") / f"{name}-{key_of(inputs)[:24]}"
    if stamp.is_file() and not os.environ.get("KNOWNZERO_AGAIN"):
        yield True
        return
    yield False
    for old in stamp.parent.glob(f"{name}-*"):
        old.unlink(missing_ok=True)
    lock.write_atomically(stamp, "")
