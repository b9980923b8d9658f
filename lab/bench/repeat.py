# SPDX-License-Identifier: GPL-2.0
"""Repetitions by turns, how many of them, and their values."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from lab.bench.session import Side
from lab.core.progress import step

T = TypeVar("T")
S = TypeVar("S", bound=str | Side)  # a guest, or what is done in one
# Values by name; those of several jobs of a turn are under the name of their job.
Figures = Mapping[str, "float | Figures"]
WARM_UPS = 1
# A median is known when its 95 % interval reaches no farther than this to either side, in percent
# of the median.
NARROW = 5.0
CONFIDENCE = 0.95
NOTE = (
    f"Repeated --pairs times, or until the {CONFIDENCE:.0%} interval of each median, which lies "
    f"between two of the ordered values, was within {NARROW:.0f} % of it; n is the number of "
    "repetitions."
)


class Values(defaultdict[tuple[object, ...], list[float]]):
    """Measured values by a key such as (side, name), in the order of the turns."""

    def __init__(self) -> None:
        super().__init__(list)

    def note(self, *key: object, **named: float | Figures) -> None:
        for name, value in named.items():
            if isinstance(value, Mapping):
                self.note(*key, name, **value)
            else:
                self[(*key, name)].append(float(value))

    def both(self, *key: object, other: str = "ours") -> tuple[list[float], list[float]]:
        """The values of base and of another side."""
        return self["base", *key], self[other, *key]


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95 % interval of the median between two of the values, whatever the distribution.

    None for fewer than six.
    """
    from scipy import stats  # takes a second

    low, high = stats.quantile_test(values).confidence_interval(CONFIDENCE)
    return None if math.isnan(low) or math.isnan(high) else (float(low), float(high))


def is_narrow(values: Sequence[float]) -> bool:
    if (interval := median_interval(values)) is None:
        return False
    median = statistics.median(values)
    return max(median - interval[0], interval[1] - median) <= abs(median) * NARROW / 100


def until_known(pairs: int, known: Iterable[Sequence[float]] = (), least: int = 0) -> Iterator[int]:
    """Count up to ``pairs``, or until all medians of ``known`` are narrow, after ``least`` turns.

    The caller fills the lists of ``known`` in each turn. Without lists, it counts to the end.
    """
    for turn in range(pairs):
        yield turn
        if turn + 1 < least:
            continue
        series = list(known)
        if series and all(map(is_narrow, series)):
            return


def by_turns(things: Sequence[T], turn: int) -> list[T]:
    """The order of a turn: over the turns, each comes first."""
    at = turn % len(things)
    order = [*things[at:], *things[:at]]
    return order if turn // len(things) % 2 == 0 else order[::-1]


def turns(
    sides: Sequence[T],
    pairs: int,
    known: Iterable[Sequence[float]] = (),
    *,
    least: int = 0,
    warm_ups: int = WARM_UPS,
    before: Callable[[], object] = lambda: None,
) -> Iterator[tuple[T, bool]]:
    """Each side in each turn, and whether it counts: warm-ups do not. See ``until_known``."""
    for turn in itertools.chain(range(-warm_ups, 0), until_known(pairs, known, least)):
        before()
        for side in by_turns(sides, turn):
            yield side, turn >= 0


def measured(
    words: str,
    sides: Sequence[S],
    once: Callable[[S], Figures],
    pairs: int,
    *,
    known: Iterable[tuple[str, ...]] = (),
    least: int = 0,
    warm_ups: int = WARM_UPS,
    before: Callable[[], object] = lambda: None,
) -> Values:
    """Measure ``once`` on each side by turns; its values, by the name of the side and their own.

    ``known``: the keys of the values whose medians end the turns. See ``turns`` for the others.
    """
    found = Values()
    ends = [found[key] for key in known]
    with step(f"{words}: {'up to ' if ends else ''}{pairs} turns"):
        order = turns(sides, pairs, ends, least=least, warm_ups=warm_ups, before=before)
        for side, counts in order:
            figures = once(side)
            if counts:
                found.note(side if isinstance(side, str) else side.name, **figures)
    return found
