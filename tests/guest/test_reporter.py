# SPDX-License-Identifier: GPL-2.0
"""A reporter inside the kernel that is honest, lies, does half of it, or fails."""

from __future__ import annotations

import re

import pytest

from tests.guest.guests import DIRTY, REPORT, counters, expect_at_least, fine, objects, run, text

pytestmark = pytest.mark.boots

JOB = (
    "{dirty}; {report}; alloc_once --size 128 --pages thp --verify --mode touch_all; "
    "alloc_once --size 128 --pages nothp --verify --mode touch_all; grep pgzeroed_ /proc/vmstat"
)


def script(report: str = REPORT) -> str:
    return JOB.format(dirty=DIRTY, report=report)


def test_honest() -> None:
    result = run(script(), devices=[], append="page_zeroed_reporter.mode=honest")
    fine(result)
    found = counters(result)
    # Of 2 * 128 MiB.
    expect_at_least(found["pgzeroed_skip"], 0.8 * (256 << 8))
    assert found["pgzeroed_bad"] == 0


def test_partial() -> None:
    """Half of the blocks are zeroed and confirmed; the oracle checks that no other is trusted."""
    parameters = "/sys/module/page_zeroed_reporter/parameters"
    result = run(
        f"{script()}; echo blocks $(cat {parameters}/blocks); "
        f"echo confirmed $(cat {parameters}/confirmed)",
        devices=[],
        append="page_zeroed_reporter.mode=partial",
    )
    fine(result)
    found = counters(result)
    told = {name: int(n) for name, n in re.findall(r"^(\w+) (\d+)$", text(result), re.MULTILINE)}
    # Each pass over all free memory has half of the rest confirmed.
    assert 0 < told["confirmed"] < told["blocks"]
    expect_at_least(found["pgzeroed_set_reported"], 1)
    for job in objects(result):
        expect_at_least(job["vmstat"]["pgzeroed_skip"], 1)
    assert found["pgzeroed_bad"] == 0


def test_error() -> None:
    """A report that fails makes nothing known to be zero, whatever the flush says of it."""
    result = run(
        script(f"({REPORT}) 2>/dev/null || true"),
        devices=[],
        append="page_zeroed_reporter.mode=error",
    )
    fine(result)
    found = counters(result)
    assert found["pgzeroed_set_reported"] == 0
    assert found["pgzeroed_skip"] == 0
    assert found["pgzeroed_bad"] == 0


TAINT_TEST = 1 << 18


def test_a_false_answer_is_found() -> None:
    """The oracle must be able to fail: here it has to.

    The mode taints the kernel, since it leaks memory (K8).
    """
    result = run(
        script() + "; echo tainted $(cat /proc/sys/kernel/tainted)",
        devices=[],
        append="page_zeroed_reporter.mode=lie",
        allow_warnings=True,
    )
    assert int(text(result).partition("tainted ")[2].split()[0]) & TAINT_TEST
    assert any("page_zeroed: BUG" in line for line in result.violations), text(result)[-2000:]
    assert counters(result)["pgzeroed_bad"] > 0
    # --verify in the guest: what was found to be a lie was zeroed before the program got it.
    assert result.exit_code == 0
    assert len(objects(result)) == 2


def test_a_false_source_is_distrusted() -> None:
    """After the first lie everything else that this source vouched for is zeroed."""
    result = run(
        script() + "; " + REPORT + "; alloc_once --size 256 --pages thp --verify --mode touch_all",
        devices=[],
        append="page_zeroed_reporter.mode=lie",
        allow_warnings=True,
    )
    assert result.exit_code == 0
    assert objects(result)[-1]["vmstat"]["pgzeroed_skip"] == 0
