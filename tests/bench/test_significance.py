# SPDX-License-Identifier: GPL-2.0
"""Which test judges two sides, and that its result means what it says.

The tests themselves are scipy's.
"""

from __future__ import annotations

import pytest

from lab.report import significance
from lab.report.significance import CONSTANT, PAIRED, TOO_FEW, UNPAIRED, judge


def test_pairs_see_what_is_hidden_by_a_machine_that_drifts() -> None:
    base = [100.0, 120, 150, 190, 240, 300, 240, 190, 150, 120]
    ours = [value * 0.97 for value in base]
    assert judge(base, ours, paired=True).differs is True
    assert judge(base, ours, paired=False).differs is False


@pytest.mark.parametrize(
    ("base", "ours", "paired", "test", "p"),
    [
        # Ten pairs, all lower: one of 2^10 cases, two-sided. The same with ties among the
        # differences.
        (
            [100.0 + i for i in range(10)],
            [1.0 + i * i for i in range(10)],
            True,
            f"{PAIRED}, exact",
            2 / 1024,
        ),
        ([0.0] * 8, [1.0, 1, 2, 2, 3, 3, 4, 4], True, f"{PAIRED}, exact", 2 / 256),
        ([0.0] * 8, [0.0, 0, 2, 2, 3, 3, 4, 4], True, f"{PAIRED}, exact", 2 / 64),
        ([0.0] * 60, [float(i) for i in range(1, 61)], True, f"{PAIRED}, approximate", 0.0),
        # Four against four, all lower: one of 70 choices, two-sided.
        ([1.0, 2, 3, 4], [5.0, 6, 7, 8], False, f"{UNPAIRED}, exact", 2 / 70),
        ([1.0, 1, 2, 2], [3.0, 3, 4, 4], False, f"{UNPAIRED}, exact", 2 / 70),
        ([1.0] * 29 + [0.0], [2.0] * 30, False, f"{UNPAIRED}, approximate", 0.0),
    ],
)
def test_small_samples_are_judged_exactly_ties_included(
    base: list[float], ours: list[float], paired: bool, test: str, p: float
) -> None:
    for one, two in ((base, ours), (ours, base)):
        found = judge(one, two, paired=paired)
        assert found.test == test and found.p == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_pairs_say_nothing(n: int) -> None:
    found = judge([100.0 + i for i in range(n)], [1.0 + i for i in range(n)], paired=True)
    assert found == significance.Significance(TOO_FEW)
    assert found.differs is None
    assert "too few" in found.text()


def test_what_has_no_spread_needs_no_test() -> None:
    found = judge([128.0] * 10, [0.0] * 10, paired=True)
    assert found.test == CONSTANT and found.p is None
    assert judge([128.0] * 10, [128.0] * 10, paired=True).test == CONSTANT
    # One value is no repetition.
    assert judge([128.0], [0.0], paired=True).test == TOO_FEW
    assert judge([128.0] * 10, [128.0] * 9 + [127.0], paired=True).p == 1.0


def test_pairs_have_two() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        judge([1.0] * 6, [1.0] * 7, paired=True)


@pytest.mark.parametrize(
    ("p", "text"),
    [(0.00004, "p < 0.001"), (0.00195, "p = 0.002"), (0.0488, "p = 0.049"), (0.5, "p = 0.50")],
)
def test_p_reads_well(p: float, text: str) -> None:
    assert significance.Significance(PAIRED, p).text() == text
