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
LTS = sorted(path.name for path in (paths.REPO / "linux" / "lts").iterdir())
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("target", "base"),
    [
        ("run", ""),
        ("sequences", ""),
        ("mutants", ""),
        pytest.param("sequences LENGTH=4", "", marks=pytest.mark.nightly),
        *[("run", series) for series in LTS],
        *[pytest.param("sequences", series, marks=pytest.mark.nightly) for series in LTS],
        *[pytest.param("mutants", series, marks=pytest.mark.nightly) for series in LTS],
    ],
)
def test_harness(
    target: str,
    base: str,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``base``: an older kernel, with linux/lts."""
    inputs = [paths.REPO / "linux", Path(__file__)]
    with unchanged.since_it_passed(f"harness-{target}{base}", inputs) as same:
        record_property("unchanged since it passed", same)
        if same:
            return
        if base:
            monkeypatch.setenv(fetch.variable("linux"), "")
            fetch.use("linux", base)
        with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
            assert (tree / HARNESS / "Makefile").is_file(), f"the series has no {HARNESS}"
            # A copy that reads the patched tree.
            shutil.copytree(tree / HARNESS, tmp_path / "harness")
            argv = ["make", "-C", str(tmp_path / "harness"), f"TREE={tree}", *target.split()]
            log = paths.log_file(f"harness-{target.split()[0]}")
            run.logged(argv, log, f"the harness fails ({target})", "read the log")
            print(run.tail(log))
