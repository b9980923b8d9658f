# SPDX-License-Identifier: GPL-2.0
"""A long check of files is left out while the files, and the modules of the lab that it imports,
are the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.core import lock, paths
from lab.testing.inputs import key_of

# Another source than the one that is recorded is not among the files.
OTHER = {"KNOWNZERO_LINUX_SOURCE", "KNOWNZERO_QEMU_SOURCE"}


@contextmanager
def since_it_passed(name: str, inputs: Iterable[Path]) -> Iterator[bool]:
    """Whether nothing has changed since the check in this block passed.

    $KNOWNZERO_AGAIN says no, and so does a night.
    """
    if OTHER & os.environ.keys():
        yield False
        return
    stamp = paths.sub("passed") / f"{name}-{key_of(inputs)[:24]}"
    if stamp.is_file() and not {"KNOWNZERO_AGAIN", "KNOWNZERO_NIGHTLY"} & os.environ.keys():
        yield True
        return
    yield False
    for old in stamp.parent.glob(f"{name}-*"):
        old.unlink(missing_ok=True)
    lock.write_atomically(stamp, "")
