# SPDX-License-Identifier: GPL-2.0
"""The lab's packages: which imports which, and that each dependency is used."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from lab.core.paths import REPO

PACKAGES = ["core", "machine", "patches", "build", "boot", "report", "bench", "testing", "series"]
FILES = sorted((REPO / "lab").rglob("*.py"))
# Programs that the lab starts and never imports.
PROGRAMS = {"ruff", "mypy", "meson", "ninja", "pycotap", "distlib", "setuptools", "pip"}
# Plugins of pytest, which finds them by itself.
PLUGINS = {"pytest-xdist", "pytest-timeout", "pytest-rerunfailures"}


def module(file: Path) -> str:
    return ".".join(file.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(one) for one in FILES}


def imports(file: Path) -> set[str]:
    """The modules that a file imports, at its top and inside functions."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & MODULES) or {node.module}
    return found


def test_a_package_imports_only_those_before_it() -> None:
    wrong = []
    for file in FILES:
        own = module(file).split(".")[1:2]
        if not own or own[0] not in PACKAGES:
            continue
        for name in imports(file):
            first, *rest = name.split(".")
            if first == "lab" and (not rest or PACKAGES.index(rest[0]) > PACKAGES.index(own[0])):
                wrong.append(f"{module(file)} imports {name}")
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module(file): {name for name in imports(file) if name.startswith("lab.")} for file in FILES
    }
    while leaves := {name for name, needs in graph.items() if not needs & graph.keys()}:
        graph = {name: needs for name, needs in graph.items() if name not in leaves}
    assert graph == {}


def test_every_dependency_is_imported() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    named = {re.split(r"[<>=~]", text)[0].strip() for text in texts}
    python = [*FILES, *(REPO / "tests").rglob("*.py")]
    imported = {name for file in python for name in imports(file)}
    missing = {
        name
        for name in named - PROGRAMS - PLUGINS
        if not any(one == name or one.startswith(f"{name}.") for one in imported)
    }
    assert missing == set()
