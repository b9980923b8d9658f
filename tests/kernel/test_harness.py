# SPDX-License-Identifier: GPL-2.0
"""Kernel code compiled in user space against a small shim: properties, and mutants that must be noticed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import fetch, paths, run, series

HARNESS = "tools/testing/page_zeroed"
pytestmark = pytest.mark.slow


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[list[str]]:
    """The make command of a copy of the harness that reads the patched tree."""
    with series.working_copy(series.get("linux"), fetch.obtain("linux")) as tree:
        assert (tree / HARNESS / "Makefile").is_file(), f"the series has no {HARNESS}"
        shutil.copytree(tree / HARNESS, tmp_path / "harness")
        yield ["make", "-C", str(tmp_path / "harness"), f"TREE={tree}"]


@pytest.mark.parametrize("target", ["run", "mutants"])
def test_harness(target: str, harness: list[str]) -> None:
    log = paths.log_file(f"harness-{target}")
    run.logged([*harness, target], log, f"the harness fails ({target})", "read the log")
