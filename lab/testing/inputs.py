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
# Every test reads these.
PRODUCTS = (
    *("linux", "qemu", "vhost-user-balloon", "guest", "tools", "packaging", "spec"),
    *("lab/plugins", "kz", "pyproject.toml", "requirements.lock"),
)
# A test reads these if it, or a module of tests/ that it imports, has their name as a string.
NAMED = {
    "docs": ("docs", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"),
    "lab": ("lab",),
    "mutants": ("tests/mutants",),
}
# `kz bench` measures and judges with these modules. Those that write pages change no figure.
BENCH = ("lab/bench/table.py", "lab/bench/runner.py")


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
    if folder.parent not in _places(PACKAGES):
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


def _places(names: Iterable[str]) -> list[Path]:
    return [paths.REPO / name for name in names]


def of_tests() -> dict[str, str]:
    """The key of each file of tests, by its path."""
    folder = paths.REPO / "tests"
    common = key_of([*_places(PRODUCTS), *folder.rglob("conftest.py")])
    found = {}
    for file in sorted(folder.rglob("test_*.py")):
        own = (one for one in with_imports([file]) if one.is_relative_to(folder))
        text = "".join(one.read_text(encoding="utf-8") for one in own)
        named = [place for name in NAMED if f'"{name}"' in text for place in NAMED[name]]
        key = digest([common, key_of([file, *_places(named)])])
        found[str(file.relative_to(paths.REPO))] = key
    return found


def of_bench() -> str:
    """The key of all benches."""
    return key_of(_places((*PRODUCTS, *BENCH)))


def of_series(name: str) -> str:
    """The key of ``kz series check NAME --each``."""
    return key_of(_places((name, "lab/series/check.py")))
