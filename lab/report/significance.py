# SPDX-License-Identifier: GPL-2.0
"""Whether two sides of a figure differ by more than chance, and which values stand far from the rest.

Both tests are by ranks, so that no distribution is assumed and one wild value decides nothing; both are
exact, ties included, as long as the samples are small. (Hollander, Wolfe and Chicken, Nonparametric
Statistical Methods, 3rd edition, sections 3.1 and 4.1; fences: Tukey, Exploratory Data Analysis.)

Here instead of scipy: that would be most of the lab's installation, for two sums over ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.05
PAIRED = "Wilcoxon signed-rank"
UNPAIRED = "Mann-Whitney U"
CONSTANT = "constant"
TOO_FEW = "too few"
# What is tried exactly; beyond, the normal distribution is as good.
EXACT_PAIRS = 100
EXACT_VALUES = 60
FENCE = 1.5  # times the distance of the quartiles
FENCE_LEAST = 5  # fewer values have no quartiles worth the name


@dataclass(frozen=True)
class Significance:
    """What a test says: ``p`` is two-sided; None where there was nothing to test, and ``test`` says why."""

    test: str
    p: float | None = None

    @property
    def differs(self) -> bool | None:
        """Whether the sides differ by more than chance; None when that was not tested."""
        return None if self.p is None else self.p < LEVEL

    def told(self) -> str:
        """In a few words, for a table."""
        if self.p is None:
            return "no spread" if self.test == CONSTANT else "too few to tell"
        if self.p < 0.001:
            return "p < 0.001"
        return f"p = {self.p:.3f}" if self.p < 0.1 else f"p = {self.p:.2f}"


def _midranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, so that ties, which share the mean of their ranks, have whole ones."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for index in order[at : end + 1]:
            ranks[index] = at + end + 2
        at = end + 1
    return ranks


class _Counts:
    """How many choices have which sum: a polynomial, its coefficients side by side in one large integer."""

    def __init__(self, choices: int) -> None:
        self.width = choices.bit_length() // 8 + 1  # bytes; no coefficient can exceed all choices together

    def shifted(self, counts: int, by: int) -> int:
        """The same choices, all sums larger by so much."""
        return counts << (8 * self.width * by)

    def up_to(self, counts: int, top: int) -> int:
        """How many choices have a sum of at most ``top``."""
        raw = counts.to_bytes((counts.bit_length() + 7) // 8, "little")
        ends = range(0, min(len(raw), (top + 1) * self.width), self.width)
        return sum(int.from_bytes(raw[at : at + self.width], "little") for at in ends)


def _normal(distance: float, variance: float, step: float) -> float:
    """Two-sided p of a sum of ranks that far from its mean; ``step``: how far apart two sums are."""
    if variance <= 0:
        return 1.0
    return math.erfc(max(0.0, distance - step / 2) / math.sqrt(2 * variance))


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test: are differences as often and as far above 0 as below?

    Differences of 0 say nothing and are left out. 1.0 when nothing remains.
    """
    some = [value for value in differences if value != 0]
    if not some:
        return 1.0
    ranks = _midranks([abs(value) for value in some])
    total = sum(ranks)
    above = sum(rank for rank, value in zip(ranks, some, strict=True) if value > 0)
    less = min(above, total - above)
    if len(some) > EXACT_PAIRS:
        # Ranks are doubled here, so sums are two apart.
        return _normal(total / 2 - less, sum(rank * rank for rank in ranks) / 4, 2)
    # Each sign is as likely as the other.
    signs = _Counts(1 << len(some))
    counts = 1
    for rank in ranks:
        counts += signs.shifted(counts, rank)
    return min(1.0, 2 * signs.up_to(counts, less) / (1 << len(some)))


def rank_sum(one: Sequence[float], two: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney U test: is a value of one side as often above one of the other as below?

    ValueError when a side is empty.
    """
    if not one or not two:
        raise ValueError("a side without values")
    few, many = (one, two) if len(one) <= len(two) else (two, one)
    n, m = len(few), len(many)
    ranks = _midranks([*few, *many])
    found, mean = sum(ranks[:n]), n * (n + m + 1)
    if n + m > EXACT_VALUES:
        spread = sum((rank - (n + m + 1)) ** 2 for rank in ranks)
        return _normal(abs(found - mean), n * m * spread / ((n + m) * (n + m - 1)), 2)
    # Whichever values are the few is as likely as any other choice.
    choices = _Counts(math.comb(n + m, n))
    counts = [1, *[0] * n]
    for rank in ranks:
        for size in range(n, 0, -1):
            counts[size] += choices.shifted(counts[size - 1], rank)
    far = abs(found - mean)
    tails = choices.up_to(counts[n], mean - far)
    tails += math.comb(n + m, n) - choices.up_to(counts[n], mean + far - 1)
    return min(1.0, tails / math.comb(n + m, n))


def _changes(base: Sequence[float], ours: Sequence[float]) -> list[float]:
    """How each pair differs: by ratio where there is one, since a machine that is slow for a while is slow for both."""
    if min(*base, *ours) > 0:
        # To twelve digits: ratios that are the same may differ in the last one.
        return [round(math.log(two / one), 12) for one, two in zip(base, ours, strict=True)]
    return [two - one for one, two in zip(base, ours, strict=True)]


def judge(base: Sequence[float], ours: Sequence[float], *, paired: bool) -> Significance:
    """Whether two sides differ; ``paired``: value by value they were measured together.

    Paired sides of unequal length: ValueError. What could not reach LEVEL whatever was found is too few.
    """
    if paired and len(base) != len(ours):
        raise ValueError(f"{len(base)} values cannot be paired with {len(ours)}")
    n, m = len(base), len(ours)
    if min(n, m) >= 2 and len(set(base)) == len(set(ours)) == 1:
        return Significance(CONSTANT)
    least = 2.0 / (1 << n) if paired else 2.0 / math.comb(n + m, n)
    if least > LEVEL or min(n, m) < 2:
        return Significance(TOO_FEW)
    if paired:
        return Significance(
            f"{PAIRED}, {'exact' if n <= EXACT_PAIRS else 'approximate'}", signed_rank(_changes(base, ours))
        )
    return Significance(
        f"{UNPAIRED}, {'exact' if n + m <= EXACT_VALUES else 'approximate'}", rank_sum(base, ours)
    )


def fences(values: Sequence[float]) -> tuple[float, float] | None:
    """Tukey's fences: 1.5 times the distance of the quartiles beyond them; None for fewer than five values."""
    if len(values) < FENCE_LEAST:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    reach = FENCE * (high - low)
    return low - reach, high + reach


def outside(values: Sequence[float]) -> list[bool]:
    """For each value, whether it is outside the fences. Nothing is dropped for it."""
    found = fences(values)
    if found is None:
        return [False] * len(values)
    # Equal values may differ in the last digit from what was computed of them.
    slack = 1e-9 * max(map(abs, values))
    return [not found[0] - slack <= value <= found[1] + slack for value in values]
