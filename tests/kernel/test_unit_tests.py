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
# User-Mode Linux has no hugetlb.
SUITES = {
    "um": {"rules", "alloc", "prezero", "accept"},
    "x86_64": {"rules", "alloc", "prezero", "hugetlb_pool"},
}
# One taints the kernel. In User-Mode Linux a pageblock is as large as the largest block.
SKIPPED = {
    "um": {"verify_report", "alloc_isolate_split", "alloc_contig"},
    "x86_64": {"verify_report"},
}


@pytest.mark.parametrize("arch", ["um", "x86_64"])
def test_unit_tests_of_known_zero_blocks(arch: str) -> None:
    cases = kunit.run(arch, "page_zeroed*")
    failed = [f"{c.name}: {c.text}" for c in cases if c.state == "failed"]
    assert not failed, "\n".join(failed)
    suites = {
        c.name.split(".")[0].removeprefix("page_zeroed_") for c in cases if c.state == "passed"
    }
    assert suites == SUITES[arch]
    more = {c.name.split(".")[1] for c in cases if c.state == "skipped"} ^ SKIPPED[arch]
    assert not more


def test_a_dirty_page_is_reported() -> None:
    """The unit test that taints the kernel."""
    [case] = kunit.run("um", "page_zeroed_alloc.verify_report", taints="page_zeroed_kunit.report=1")
    assert case.state == "passed", case.text


def test_their_configuration_has_a_tracer(tmp_path: Path) -> None:
    """A kernel with tracepoints links only with a tracer.

    Its build takes minutes, so this test only configures.
    """
    with images.tree_of("linux", "knownzero", fetch.obtain("linux")) as tree:
        argv = [
            sys.executable,
            "-B",
            str(tree / "tools" / "testing" / "kunit" / "kunit.py"),
            "config",
        ]
        options = ["--kunitconfig", "mm/tests", f"--build_dir={tmp_path}"]
        run.output([*argv, *options], "kunit.py fails", "correct the error above", cwd=tree)
    found = (tmp_path / ".config").read_text(encoding="utf-8").splitlines()
    assert {"CONFIG_PAGE_ZEROED_KUNIT_TEST=y", "CONFIG_EVENT_TRACING=y"} <= set(found)
