# SPDX-License-Identifier: GPL-2.0
"""The kernel's own unit tests, in User-Mode Linux and on x86_64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.build import images
from lab.core import run
from lab.machine import fetch
from tests.kernel import kunit

pytestmark = pytest.mark.boots


@pytest.mark.parametrize("arch", ["um", "x86_64"])
def test_unit_tests_of_known_zero_blocks(arch: str) -> None:
    cases = kunit.run(arch, "page_zeroed*")
    failed = [f"{c.name}: {c.text}" for c in cases if c.state == "failed"]
    assert not failed, "\n".join(failed)
    assert any(c.state == "passed" for c in cases)
    if arch == "x86_64":
        # User-Mode Linux has no hugetlb; here it must not be left out.
        pool = [c.state for c in cases if "page_zeroed_hugetlb_pool" in c.name]
        assert pool and set(pool) == {"passed"}


def test_their_configuration_has_a_tracer(tmp_path: Path) -> None:
    """A kernel with tracepoints links only with a tracer. Its build takes minutes, so this test only configures."""
    with images.tree_of("linux", "knownzero", fetch.obtain("linux")) as tree:
        argv = [sys.executable, "-B", str(tree / "tools" / "testing" / "kunit" / "kunit.py"), "config"]
        options = ["--kunitconfig", "mm/tests", f"--build_dir={tmp_path}"]
        run.output([*argv, *options], "kunit.py fails", "correct the error above", cwd=tree)
    found = (tmp_path / ".config").read_text(encoding="utf-8").splitlines()
    assert {"CONFIG_PAGE_ZEROED_KUNIT_TEST=y", "CONFIG_EVENT_TRACING=y"} <= set(found)
