# SPDX-License-Identifier: GPL-2.0
"""When enough repetitions have been made of what takes long: no more than --pairs, fewer once medians are known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

# The 95 % interval of each median reaches no farther to either side than this, in percent of the median.
NARROW = 5.0
CONFIDENCE = 0.95
# The text that a bench adds to its notes.
NOTE = (
    f"Repeated --pairs times, or until the {CONFIDENCE:.0%} interval of each median, which is one between two of the "
    f"values in their order, was within {NARROW:.0f} % of it; n says how often."
)


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest 95 % interval of the median that lies between two of the values; None of fewer than six.

    No distribution is assumed: how many values are below the median is binomial. (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, 3rd edition, section 3.6.)
    """
    n = len(values)
    outside, rank = 0.0, 0
    while True:
        outside += 2 * math.comb(n, rank) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        rank += 1
    if not rank:
        return None
    ordered = sorted(values)
    return ordered[rank - 1], ordered[n - rank]


def is_narrow(values: Sequence[float]) -> bool:
    """Whether the median of these values is known within NARROW percent."""
    interval = median_interval(values)
    if interval is None:
        return False
    median = statistics.median(values)
    return max(median - interval[0], interval[1] - median) <= abs(median) * NARROW / 100


def until_known(pairs: int, found: Iterable[Sequence[float]], least: int = 0) -> Iterator[int]:
    """Count up to ``pairs``, and end sooner when each of ``found``, which grows meanwhile, is known well enough.

    It does not end before ``least`` turns, if ``pairs`` are as many. What is in ``found`` is looked at anew after
    each turn, so it may be a view of a dictionary.
    """
    for turn in range(pairs):
        yield turn
        if turn + 1 < least:
            continue
        series = list(found)
        if series and all(map(is_narrow, series)):
            return
