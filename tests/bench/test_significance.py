# SPDX-License-Identifier: GPL-2.0
"""The tests of significance, against published values and against counting all cases."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.report import significance
from lab.report.significance import CONSTANT, PAIRED, TOO_FEW, UNPAIRED, judge, outside, rank_sum, signed_rank

# With ties and zeros.
whole = st.integers(min_value=-6, max_value=6).map(float)


def test_signed_ranks_are_as_published() -> None:
    # Hollander and Wolfe, depression before and after; R's help of wilcox.test has one-sided p = 0.01953.
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    assert signed_rank([a - b for a, b in zip(before, after, strict=True)]) == pytest.approx(2 * 0.01953125)
    # Darwin's maize, as in scipy's documentation of wilcoxon.
    maize = [6.0, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
    assert signed_rank(maize) == pytest.approx(0.041259765625)


@pytest.mark.parametrize(
    ("n", "critical"), [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52), (25, 89)]
)
def test_signed_ranks_have_the_critical_values_of_the_tables(n: int, critical: int) -> None:
    """Two-sided, 5 %: the largest sum that is significant, as in any table of the test."""

    def p_of(less: int) -> float:
        signs = [1] * n
        for rank in range(n, 0, -1):
            if rank <= less:
                signs[rank - 1], less = -1, less - rank
        assert less == 0
        return signed_rank([float(sign * rank) for rank, sign in enumerate(signs, 1)])

    assert p_of(critical) <= 0.05 < p_of(critical + 1)


def test_rank_sums_are_as_published() -> None:
    # scipy's documentation of mannwhitneyu: age of onset of diabetes, men and women.
    assert rank_sum([19, 22, 16, 29, 24], [20, 11, 17, 12]) == pytest.approx(1 / 9)
    # Hollander and Wolfe, permeability of membranes; R's help of wilcox.test has one-sided p = 0.1272.
    term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
    early = [1.15, 0.88, 0.90, 0.74, 1.21]
    assert rank_sum(term, early) == pytest.approx(2 * 0.1272, abs=1e-4)


@pytest.mark.parametrize(("n", "m", "critical"), [(4, 4, 0), (5, 5, 2), (6, 8, 8), (8, 8, 13), (10, 10, 23)])
def test_rank_sums_have_the_critical_values_of_the_tables(n: int, m: int, critical: int) -> None:
    """Two-sided, 5 %: the largest U that is significant."""

    def p_of(u: int) -> float:
        places = list(range(n))  # of the first sample among all, each step to the right adds one to U
        for at in range(n - 1, -1, -1):
            step = min(m, u)
            places[at] += step
            u -= step
        assert u == 0
        return rank_sum([float(p) for p in places], [float(i) for i in range(n + m) if i not in places])

    assert p_of(critical) <= 0.05 < p_of(critical + 1)


def ranks_of(values: list[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(whole, min_size=1, max_size=8))
def test_signed_ranks_count_all_signs(differences: list[float]) -> None:
    some = [value for value in differences if value]
    ranks = ranks_of([abs(value) for value in some])
    mean = sum(ranks) / 2
    far = abs(sum(r for r, d in zip(ranks, some, strict=True) if d > 0) - mean)
    sums = [
        sum(r for r, s in zip(ranks, signs, strict=True) if s)
        for signs in itertools.product((0, 1), repeat=len(some))
    ]
    p = sum(abs(total - mean) >= far - 1e-9 for total in sums) / len(sums)
    assert signed_rank(differences) == pytest.approx(p)


@settings(max_examples=30, deadline=None)
@given(st.lists(whole, min_size=1, max_size=5), st.lists(whole, min_size=1, max_size=5))
def test_rank_sums_count_all_divisions(one: list[float], two: list[float]) -> None:
    ranks = ranks_of([*one, *two])
    mean = len(one) * (len(ranks) + 1) / 2
    far = abs(sum(ranks[: len(one)]) - mean)
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, len(one))]
    p = sum(abs(total - mean) >= far - 1e-9 for total in sums) / len(sums)
    assert rank_sum(one, two) == pytest.approx(p)


positive = st.floats(min_value=0.5, max_value=1e9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=6, max_size=20), st.randoms(use_true_random=False))
def test_neither_the_sides_nor_the_order_of_pairs_matter(
    pairs: list[tuple[float, float]], rng: random.Random
) -> None:
    base, ours = (list(side) for side in zip(*pairs, strict=True))
    found = judge(base, ours, paired=True)
    assert judge(ours, base, paired=True) == found
    rng.shuffle(pairs)
    base, ours = (list(side) for side in zip(*pairs, strict=True))
    assert judge(base, ours, paired=True) == found


@settings(max_examples=30, deadline=None)
@given(
    st.lists(positive, min_size=4, max_size=12),
    st.lists(positive, min_size=4, max_size=12),
    st.randoms(use_true_random=False),
)
def test_neither_the_sides_nor_the_order_of_values_matter(
    one: list[float], two: list[float], rng: random.Random
) -> None:
    p = rank_sum(one, two)
    assert rank_sum(two, one) == pytest.approx(p)
    rng.shuffle(one)
    rng.shuffle(two)
    assert rank_sum(one, two) == pytest.approx(p)
    # By ranks: any scale will do.
    assert rank_sum([value * 2 for value in one], [value * 2 for value in two]) == pytest.approx(p)


@pytest.mark.parametrize("paired", [True, False])
def test_alike_sides_seldom_differ(paired: bool) -> None:
    """Of sides without a difference, at most one in twenty is told to have one, and some are."""
    rng = random.Random(7)
    called = sum(
        judge([rng.gauss(100, 5) for _ in range(10)], [rng.gauss(100, 5) for _ in range(10)], paired=paired).differs
        is True
        for _ in range(200)
    )  # fmt: skip
    assert 2 <= called <= 20


def test_pairs_see_what_is_hidden_by_a_machine_that_drifts() -> None:
    base = [100.0, 120, 150, 190, 240, 300, 240, 190, 150, 120]
    ours = [value * 0.97 for value in base]
    assert judge(base, ours, paired=True).differs is True
    assert judge(base, ours, paired=False).differs is False


def test_large_samples_are_as_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    differences = [rng.gauss(0.1, 1) for _ in range(90)]
    one, two = [rng.gauss(0, 1) for _ in range(28)], [rng.gauss(0.4, 1) for _ in range(30)]
    tied = [float(round(value)) for value in differences]
    exact = signed_rank(differences), rank_sum(one, two), signed_rank(tied)
    monkeypatch.setattr(significance, "EXACT_PAIRS", 10)
    monkeypatch.setattr(significance, "EXACT_VALUES", 10)
    near = signed_rank(differences), rank_sum(one, two), signed_rank(tied)
    assert near != exact
    assert near == pytest.approx(exact, abs=0.01)
    assert judge(one, one[::-1], paired=True).test == f"{PAIRED}, approximate"
    assert judge(one, two, paired=False).test == f"{UNPAIRED}, approximate"


@pytest.mark.parametrize("n", range(1, 6))
def test_too_few_pairs_say_nothing(n: int) -> None:
    found = judge([100.0 + i for i in range(n)], [1.0 + i for i in range(n)], paired=True)
    assert found == significance.Significance(TOO_FEW)
    assert found.differs is None
    assert "too few" in found.text()


def test_what_can_be_tested_is() -> None:
    six = judge([100.0 + i for i in range(6)], [1.0 + i for i in range(6)], paired=True)
    assert six.p == pytest.approx(2 / 64) and six.differs and six.test == f"{PAIRED}, exact"
    assert judge([1.0, 2, 3], [4.0, 5, 6], paired=False).test == TOO_FEW
    assert judge([1.0, 2, 3, 4], [5.0, 6, 7, 8], paired=False).p == pytest.approx(2 / 70)


def test_what_has_no_spread_needs_no_test() -> None:
    found = judge([128.0] * 10, [0.0] * 10, paired=True)
    assert found.test == CONSTANT and found.p is None
    assert judge([128.0] * 10, [128.0] * 10, paired=True).test == CONSTANT
    # One value is no repetition.
    assert judge([128.0], [0.0], paired=True).test == TOO_FEW
    assert judge([128.0] * 10, [128.0] * 9 + [127.0], paired=True).p == 1.0


def test_zeros_can_be_judged() -> None:
    assert judge([0.0] * 10, [float(i) for i in range(1, 11)], paired=True).p == pytest.approx(2 / 1024)


def test_pairs_have_two() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        judge([1.0] * 6, [1.0] * 7, paired=True)
    with pytest.raises(ValueError, match="without values"):
        rank_sum([], [1.0])


@pytest.mark.parametrize(
    ("p", "text"), [(0.00004, "p < 0.001"), (0.00195, "p = 0.002"), (0.0488, "p = 0.049"), (0.5, "p = 0.50")]
)
def test_p_reads_well(p: float, text: str) -> None:
    assert significance.Significance(PAIRED, p).text() == text


def test_values_outside_the_fences_are_found() -> None:
    # Quartiles 3.25 and 7.75, fences -3.5 and 14.5.
    values = [1.0, 2, 3, 4, 5, 6, 7, 8, 9, 14.4]
    assert not any(outside(values))
    assert [v for v, out in zip([*values[:-1], 15.0], outside([*values[:-1], 15.0]), strict=True) if out] == [
        15
    ]
    assert not any(outside([1.0, 1, 1, 100]))
    assert not any(outside([0.1 + 0.2] * 9))
    assert sum(outside([5.0] * 9 + [6.0])) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(positive, min_size=1, max_size=30))
def test_most_values_are_inside(values: list[float]) -> None:
    assert sum(outside(values)) <= len(values) / 2
