# SPDX-License-Identifier: GPL-2.0
"""Tests whether two sides of a figure differ by more than chance.

The tests use ranks, which need no distribution. scipy is imported where it is used: that takes a
second.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

LEVEL = 0.05
PAIRED, UNPAIRED = "Wilcoxon signed-rank", "Mann-Whitney U"
CONSTANT, TOO_FEW = "constant", "too few"
# Without ties, samples up to this size are tested exactly. With ties scipy enumerates fewer cases.
EXACT, EXACT_TIED = 50, 9999
ROUNDS, SEED = 2000, 20260529


@dataclass(frozen=True)
class Significance:
    """The result of a test: ``p`` is two-sided.

    It is None without a test, and ``test`` gives the reason.
    """

    test: str
    p: float | None = None

    @property
    def differs(self) -> bool | None:
        """Whether the sides differ by more than chance; None when that was not tested."""
        return None if self.p is None else self.p < LEVEL

    def text(self) -> str:
        if self.p is None:
            return "no spread" if self.test == CONSTANT else "too few to tell"
        if self.p < 0.001:
            return "p < 0.001"
        return f"p = {self.p:.3f}" if self.p < 0.1 else f"p = {self.p:.2f}"


def _changes(base: Sequence[float], ours: Sequence[float]) -> list[float]:
    """The change in each pair.

    As a ratio where possible, since a slow phase of the machine slows both sides.
    """
    if min(*base, *ours) > 0:
        # Twelve digits: equal ratios may differ in the last one.
        return [round(math.log(two / one), 12) for one, two in zip(base, ours, strict=True)]
    return [two - one for one, two in zip(base, ours, strict=True)]


def _tested(
    name: str, test: Callable[..., Any], samples: Sequence[Sequence[float]], tied: bool, cases: int
) -> Significance:
    """``cases``: how many ranks an exact test with ties has to enumerate."""
    from scipy import stats

    exact = cases <= EXACT_TIED if tied else max(map(len, samples)) <= EXACT
    method = (stats.PermutationMethod() if tied else "exact") if exact else "asymptotic"
    p = float(test(*samples, method=method).pvalue)
    return Significance(f"{name}, {'exact' if exact else 'approximate'}", p)


def judge(base: Sequence[float], ours: Sequence[float], *, paired: bool) -> Significance:
    """Test whether two sides differ. Samples that cannot reach LEVEL are too few."""
    if paired and len(base) != len(ours):
        raise ValueError(f"{len(base)} values cannot be paired with {len(ours)}")
    n, m = len(base), len(ours)
    if min(n, m) >= 2 and len(set(base)) == len(set(ours)) == 1:
        return Significance(CONSTANT)
    least = 2.0 / (1 << n) if paired else 2.0 / math.comb(n + m, n)
    if least > LEVEL or min(n, m) < 2:
        return Significance(TOO_FEW)
    from scipy import stats

    if not paired:
        tied = len({*base, *ours}) < n + m
        return _tested(UNPAIRED, stats.mannwhitneyu, (base, ours), tied, math.comb(n + m, n))
    some = [value for value in _changes(base, ours) if value]
    if not some:
        return Significance(f"{PAIRED}, exact", 1.0)
    tied = len({abs(value) for value in some}) < len(some)
    return _tested(PAIRED, stats.wilcoxon, (some,), tied, 2 ** len(some))


def change_interval(base: Sequence[float], ours: Sequence[float]) -> tuple[float, float] | None:
    """A seeded 95 % bootstrap interval of the change of the median in percent.

    None if base may be 0.
    """
    if min(len(base), len(ours)) < 3:
        return None
    import numpy as np
    from scipy import stats

    def change(one: Any, two: Any, axis: int) -> Any:
        a, b = np.median(one, axis=axis), np.median(two, axis=axis)
        return np.where((a == 0) & (b == 0), 0.0, (b - a) / a * 100)

    with np.errstate(all="ignore"):
        found = stats.bootstrap(
            (base, ours), change, n_resamples=ROUNDS, method="percentile", rng=SEED
        )
    if not np.isfinite(found.bootstrap_distribution).all():
        return None
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
