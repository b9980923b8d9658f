# SPDX-License-Identifier: GPL-2.0
"""A long check of files is left out while the files, and the modules of the lab that it imports,
are the same.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.build.images import compiler
from lab.core import lock, paths


def imported(file: Path) -> set[Path]:
    """The modules of the lab that a module imports, and those that they import."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("lab."):
                continue
            base = paths.REPO.joinpath(*str(node.module).split("."))
            for place in (
                base.with_suffix(".py"),
                *(base / f"{alias.name}.py" for alias in node.names),
            ):
                if place.is_file() and place not in found:
                    found.add(place)
                    waiting.append(place)
    return found


def key_of(inputs: Iterable[Path]) -> str:
    """A name for the content of files and folders, of the lab's modules that Python files import,
    and of the compiler.
    """
    digest = hashlib.sha256(compiler().encode())
    files = {file for top in inputs for file in (top.rglob("*") if top.is_dir() else [top])}
    files |= {module for file in files if file.suffix == ".py" for module in imported(file)}
    for file in sorted(files):
        if file.is_file() and file.suffix != ".pyc":
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            digest.update(f"{file.relative_to(paths.REPO)} {content}\n".encode())
    return digest.hexdigest()


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
