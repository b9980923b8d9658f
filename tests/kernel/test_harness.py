# SPDX-License-Identifier: GPL-2.0
"""Kernel code compiled in user space against a small shim.

Random sequences of steps, all short ones, and mutants that must be noticed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.core import paths, run
from lab.machine import fetch
from lab.patches import apply, parts
from tests.kernel import unchanged

HARNESS = "tools/testing/page_zeroed"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "target",
    [
        "run",
        "sequences",
        "mutants",
        pytest.param("sequences LENGTH=4", marks=pytest.mark.nightly),
    ],
)
def test_harness(
    target: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    inputs = [paths.REPO / "linux", Path(__file__)]
    with unchanged.since_it_passed(f"harness-{target}", inputs) as same:
        record_property("unchanged since it passed", same)
        if same:
            return
        with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
            assert (tree / HARNESS / "Makefile").is_file(), f"the series has no {HARNESS}"
            # A copy that reads the patched tree.
            shutil.copytree(tree / HARNESS, tmp_path / "harness")
            argv = ["make", "-C", str(tmp_path / "harness"), f"TREE={tree}", *target.split()]
            log = paths.log_file(f"harness-{target.split()[0]}")
            run.logged(argv, log, f"the harness fails ({target})", "read the log")
            print(run.tail(log))
