# SPDX-License-Identifier: GPL-2.0
"""Keys of what checks read: a check that has passed counts while its key is the same."""

import ast
import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from lab.build.images import compiler, digest
from lab.core import paths

PACKAGES = ("lab", "tests")


@functools.cache
def _names(text: str) -> frozenset[str]:
    """The modules of our packages that the text of a module may import, by their full names."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a check that imports it fails
        return frozenset()
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(name for name in found if name.partition(".")[0] in PACKAGES)


def with_imports(files: Iterable[Path]) -> set[Path]:
    """Modules, with those of our packages that they import, and so on."""
    waiting = list(files)
    found = set(waiting)
    while waiting:
        for name in _names(waiting.pop().read_text(encoding="utf-8")):
            place = paths.REPO / f"{name.replace('.', '/')}.py"
            if place not in found and place.is_file():
                found.add(place)
                waiting.append(place)
    return found


def _data(folder: Path) -> set[Path]:
    """The data in a package of lab/ or tests/."""
    if folder.parent not in [paths.REPO / name for name in PACKAGES]:
        return set()
    return {file for file in folder.rglob("*") if file.suffix != ".py"}


def key_of(inputs: Iterable[Path]) -> str:
    """A name for the content of files and folders, and of the compiler.

    A Python file counts with the modules that it imports, and the data beside all of them.
    """
    lines = [compiler()]
    files = {file for top in inputs for file in (top.rglob("*") if top.is_dir() else [top])}
    python = with_imports(file for file in files if file.suffix == ".py" and file.is_file())
    files = files.union(python, *map(_data, {file.parent for file in python}))
    for file in sorted(files):
        if file.is_file() and file.suffix != ".pyc" and "target" not in file.parts:
            content = hashlib.sha256(file.read_bytes()).hexdigest()
            lines.append(f"{file.relative_to(paths.REPO)} {content}")
    return digest(lines)
