# SPDX-License-Identifier: GPL-2.0
"""Tests whether two sides of a figure differ by more than chance, and finds values far from the rest.

The tests use ranks: they assume no distribution, and one extreme value decides nothing. scipy is imported where it
is used, since that takes a second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.05
PAIRED, UNPAIRED = "Wilcoxon signed-rank", "Mann-Whitney U"
CONSTANT, TOO_FEW = "constant", "too few"
# Without ties, samples up to this size are tested exactly. With ties scipy enumerates fewer cases.
EXACT, EXACT_TIED = 50, 9999
FENCE = 1.5  # times the distance of the quartiles
FENCE_LEAST = 5  # fewer values have no useful quartiles
ROUNDS, SEED = 2000, 20260529


@dataclass(frozen=True)
class Significance:
    """The result of a test: ``p`` is two-sided. It is None without a test, and ``test`` gives the reason."""

    test: str
    p: float | None = None

    @property
    def differs(self) -> bool | None:
        """Whether the sides differ by more than chance; None when that was not tested."""
        return None if self.p is None else self.p < LEVEL

    def text(self) -> str:
        """The result in a few words, for a table."""
        if self.p is None:
            return "no spread" if self.test == CONSTANT else "too few to tell"
        if self.p < 0.001:
            return "p < 0.001"
        return f"p = {self.p:.3f}" if self.p < 0.1 else f"p = {self.p:.2f}"


def _changes(base: Sequence[float], ours: Sequence[float]) -> list[float]:
    """The change in each pair: as a ratio where possible, since a slow phase of the machine slows both sides."""
    if min(*base, *ours) > 0:
        # Twelve digits: equal ratios may differ in the last one.
        return [round(math.log(two / one), 12) for one, two in zip(base, ours, strict=True)]
    return [two - one for one, two in zip(base, ours, strict=True)]


def _signed_rank(changes: Sequence[float]) -> Significance:
    from scipy import stats

    some = [value for value in changes if value]
    if not some:
        return Significance(f"{PAIRED}, exact", 1.0)
    tied = len({abs(value) for value in some}) < len(some)
    exact = 2 ** len(some) <= EXACT_TIED if tied else len(some) <= EXACT
    method = (stats.PermutationMethod() if tied else "exact") if exact else "asymptotic"
    p = float(stats.wilcoxon(some, method=method).pvalue)
    return Significance(f"{PAIRED}, {'exact' if exact else 'approximate'}", p)


def _rank_sum(base: Sequence[float], ours: Sequence[float]) -> Significance:
    from scipy import stats

    tied = len({*base, *ours}) < len(base) + len(ours)
    cases = math.comb(len(base) + len(ours), len(base))
    exact = cases <= EXACT_TIED if tied else max(len(base), len(ours)) <= EXACT
    method = (stats.PermutationMethod() if tied else "exact") if exact else "asymptotic"
    p = float(stats.mannwhitneyu(base, ours, method=method).pvalue)
    return Significance(f"{UNPAIRED}, {'exact' if exact else 'approximate'}", p)


def judge(base: Sequence[float], ours: Sequence[float], *, paired: bool) -> Significance:
    """Test whether two sides differ; ``paired``: the values were measured in pairs.

    ValueError for paired sides of unequal length. Samples that cannot reach LEVEL are too few.
    """
    if paired and len(base) != len(ours):
        raise ValueError(f"{len(base)} values cannot be paired with {len(ours)}")
    n, m = len(base), len(ours)
    if min(n, m) >= 2 and len(set(base)) == len(set(ours)) == 1:
        return Significance(CONSTANT)
    least = 2.0 / (1 << n) if paired else 2.0 / math.comb(n + m, n)
    if least > LEVEL or min(n, m) < 2:
        return Significance(TOO_FEW)
    return _signed_rank(_changes(base, ours)) if paired else _rank_sum(base, ours)


def change_interval(base: Sequence[float], ours: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % bootstrap interval of the change of the median, in percent; seeded, so it is repeatable.

    None when the median of base can be zero and that of ours not, or when a side has fewer than three values.
    """
    if min(len(base), len(ours)) < 3:
        return None
    import numpy as np
    from scipy import stats

    def change(one: Any, two: Any, axis: int) -> Any:
        a, b = np.median(one, axis=axis), np.median(two, axis=axis)
        return np.where((a == 0) & (b == 0), 0.0, (b - a) / a * 100)

    with np.errstate(all="ignore"):
        found = stats.bootstrap((base, ours), change, n_resamples=ROUNDS, method="percentile", rng=SEED)
    if not np.isfinite(found.bootstrap_distribution).all():
        return None
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def fences(values: Sequence[float]) -> tuple[float, float] | None:
    """Tukey's fences: 1.5 times the distance of the quartiles beyond them; None for fewer than five values."""
    if len(values) < FENCE_LEAST:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = FENCE * (high - low)
    return low - reach, high + reach


def outside(values: Sequence[float]) -> list[bool]:
    """For each value, whether it is outside the fences. Such values stay in every figure."""
    found = fences(values)
    if found is None:
        return [False] * len(values)
    # Equal values may differ in the last digit from the computed fence.
    slack = 1e-9 * max(map(abs, values))
    return [not found[0] - slack <= value <= found[1] + slack for value in values]
