# SPDX-License-Identifier: GPL-2.0
"""A reader holds one file, and one function, of the crates at a time; modules use each other in one
direction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from lab.build import daemon

CRATES = ("protocol", "discard", "daemon")
FILE_LINES, FUNCTION_LINES = 420, 64


def sources(crate: str) -> Iterator[tuple[str, str]]:
    """Name of the module, as a path, and text, of what is no test."""
    root = daemon.WORKSPACE / crate / "src"
    for path in sorted(root.rglob("*.rs")):
        if path.name not in ("main.rs", "tests.rs"):
            yield str(path.relative_to(root).with_suffix("")), path.read_text()


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of each function."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.match(r"( *)(?:pub(?:\([a-z]+\))? )?(?:unsafe )?fn (\w+)", line)
        if found and not line.rstrip().endswith("}"):
            end = next(n for n in range(number, len(lines)) if lines[n] == f"{found[1]}}}")
            yield found[2], end - number + 1


def uses(name: str, text: str, names: set[str]) -> set[str]:
    """The modules of the same crate that a module uses."""
    code = re.sub(r"//.*", "", text.partition("#[cfg(test)]\nmod tests {")[0])
    found: set[str] = set()
    listed = re.findall(r"\b(crate|super)::\{([^{}]*)\}", code)
    paths = re.findall(r"\b(crate|super)::(\w+(?:::\w+)*)", code)
    paths += [(prefix, each) for prefix, many in listed for each in re.findall(r"\w+", many)]
    for prefix, path in paths:
        here = [] if prefix == "crate" else name.split("/")[:-1]
        parts = [*here, *path.split("::")]
        candidates = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
        known = [c for c in candidates for c in (c, f"{c}/mod") if c in names]
        found.update(known[:1])
    return found - {name}


@pytest.mark.parametrize("crate", CRATES)
def test_files_and_functions_are_short(crate: str) -> None:
    for name, text in sources(crate):
        assert len(text.splitlines()) <= FILE_LINES, name
        for function, length in functions(text):
            assert length <= FUNCTION_LINES, f"{name}: {function}() has {length} lines"


@pytest.mark.parametrize("crate", CRATES)
def test_modules_have_no_circle(crate: str) -> None:
    texts = dict(sources(crate))
    names = set(texts)
    graph = {name: uses(name, text, names) for name, text in texts.items() if name != "lib"}
    # The list of a folder's modules: what uses one of them by this name uses all.
    for name in list(graph):
        if name.endswith("/mod"):
            folder = Path(name).parent.as_posix()
            graph[name] |= {other for other in names if Path(other).parent.as_posix() == folder}
            graph[name] -= {name}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"modules use each other: {' -> '.join(error.args[1])}")
