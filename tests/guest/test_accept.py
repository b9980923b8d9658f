# SPDX-License-Identifier: GPL-2.0
"""Accepted memory of confidential guests, with a test in the place of the TDX module.

No TDX hardware was at hand.
"""

from __future__ import annotations

from typing import Any

import pytest

from lab.boot.guest import BootResult
from tests.guest.guests import counters, expect_at_least, fine, run

pytestmark = pytest.mark.boots

PROGRAM_MB = 1500


def accepting(mode: str, **more: Any) -> BootResult:
    """Run a program in User-Mode Linux; its memory is accepted as ``mode`` says.

    Early allocations accept a block each before known-zero memory is tracked, so the guest has
    more memory than they take.
    """
    return run(
        f"alloc_once --size {PROGRAM_MB} --pages nothp --verify --mode touch_all >/dev/null; "
        "grep -e pgzeroed_ -e unaccepted /proc/vmstat",
        arch="um",
        kernel="debug",
        devices=[],
        memory="3G",
        append=f"unaccepted_memory_test={mode}",
        **more,
    )


def test_memory_that_is_zeroed_when_it_is_accepted() -> None:
    result = accepting("zero")
    fine(result)
    count = counters(result)
    expect_at_least(count["pgzeroed_skip"], 0.4 * (PROGRAM_MB << 8))
    assert count["pgzeroed_bad"] == 0


def test_memory_that_keeps_its_content_when_it_is_accepted() -> None:
    result = accepting("junk")
    fine(result)
    assert counters(result)["pgzeroed_set_freed"] == 0


def test_an_accept_that_zeroes_nothing_is_found() -> None:
    result = accepting("lie", allow_warnings=True)
    assert result.exit_code == 0
    assert any("page_zeroed: BUG" in line for line in result.violations)
    assert counters(result)["pgzeroed_bad"] > 0
