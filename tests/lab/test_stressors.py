# SPDX-License-Identifier: GPL-2.0
"""A hunt beside stress-ng counts only if all stressors ran: stress-ng ends with 0 without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from tests.guest.guests import OutOfLuck
from tests.guest.test_stress_ng import judge_stressors

WORK = (
    "metrics:\n    - stressor: brk\n      bogo-ops: {}\n      max-rss: 1\n    - stressor: vm\n     "
    " bogo-ops: 2\n"
)


def result(stdout: str, stderr: str = "") -> BootResult:
    return BootResult(stdout, stderr, 0, Path("console"), "tcg", 1.0, [])


def test_all_ran() -> None:
    judge_stressors(
        result(WORK.format(1), "stress-ng: info:  [5] skipped: 0\nstress-ng: info:  [5] passed: 2"),
        ("brk", "vm"),
        1.0,
    )


@pytest.mark.parametrize(
    "said",
    [
        "stress-ng: info:  [50] vm stressor will be skipped, need to be running with CAP_SYS_ADMIN "
        "rights",
        "stress-ng: info:  [54] vm: stressor will be skipped, insufficient privilege",
        "stress-ng: info:  [61] vm: /dev/vm not available, skipping stress test",
        "stress-ng: info:  [61] vm: stressor not implemented on this system",
    ],
)
def test_one_was_left_out(said: str) -> None:
    with pytest.raises(AssertionError, match=r"skip|not implemented") as caught:
        judge_stressors(result(WORK.format(1), said), ("brk", "vm"), 1.0)
    assert not isinstance(caught.value, OutOfLuck)


def test_one_does_not_appear() -> None:
    with pytest.raises(OutOfLuck):
        judge_stressors(result(WORK.format(1)), ("brk", "vm", "shm"), 1.0)


def test_an_exit_code() -> None:
    with pytest.raises(AssertionError, match="stress-ng=2"):
        judge_stressors(result("stress-ng=2\n" + WORK.format(1)), ("brk", "vm"), 1.0)


def test_one_did_nothing() -> None:
    with pytest.raises(OutOfLuck):
        judge_stressors(result(WORK.format(0)), ("brk", "vm"), 1.0)
