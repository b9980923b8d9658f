# SPDX-License-Identifier: GPL-2.0
"""The kinds of targets that metrics.toml names. Each makes a function that judges a metric."""

import statistics
from collections.abc import Callable
from typing import Any

from lab.report.results import Floats, Goal, Metric, Target

# An interval may reach this many times as far as the change that would miss the target at once.
TOO_NOISY = 4


def judge(kind: str, arguments: dict[str, Any], metric: Metric) -> Target:
    """The target of a kind with its arguments, judged by the values of a metric."""
    return KINDS[kind](**arguments)(metric)


def less(percent: float, words: str = "at least {:g} % less than base") -> Goal:
    """At least so many percent less than base.

    Not decided when the interval of the change reaches across that.
    """

    def judged(metric: Metric) -> Target:
        change = metric.change_percent
        met = change is not None and change <= -percent
        low, high = metric.change_interval or (change, change)
        decided = low is None or high is None or low > -percent or high <= -percent
        return Target(words.format(percent), met, decided)

    return judged


def most_more(percent: float, words: str) -> Goal:
    """At most so many percent more than base, without regard to noise: for counts."""

    def judged(metric: Metric) -> Target:
        change = metric.change_percent
        return Target(words, change is not None and change <= percent)

    return judged


def within(limit: float, beyond: float, words: str) -> Goal:
    """At most ``limit`` percent worse than base, as far as the measurement can show.

    Missed when the whole interval of the change is worse than that. Not decided when only the
    change itself is worse than ``beyond`` percent, or when the interval reaches so far beyond that
    the measurement shows nothing.
    """

    def judged(metric: Metric) -> Target:
        if (change := metric.change_percent) is None:
            return Target(f"{words} (base is zero)", False)
        low, high = metric.change_interval or (change, change)
        least, worse, worst = low, change, high
        if metric.better == "more":
            least, worse, worst = -high, -change, -low
        missed = least > limit
        decided = missed or (worse <= beyond and worst <= TOO_NOISY * beyond)
        return Target(f"{words} ({_interval(metric)})", decided and not missed, decided)

    return judged


def not_worse(words: str) -> Goal:
    """The interval of the change reaches 0 or what is better."""

    def judged(metric: Metric) -> Target:
        change = metric.change_percent or 0.0
        low, high = metric.change_interval or (change, change)
        return Target(words, high >= 0 if metric.better == "more" else low <= 0)

    return judged


def share(percent: float) -> Goal:
    """The median of ours is at most so many percent of the parameter size_mb."""

    def judged(metric: Metric) -> Target:
        size = float(metric.parameters["size_mb"]) * (1 << 20)
        part = statistics.median(metric.values["ours"]) / size * 100
        return Target(f"at most {percent:.0f} % of the memory ({part:.2f} %)", part <= percent)

    return judged


def least(value: float, words: str, both: bool = False) -> Goal:
    """The median of ours, or of ``both`` sides, is at least ``value``."""

    def judged(metric: Metric) -> Target:
        found = min(statistics.median(metric.values[side]) for side in _sides(both))
        return Target(words, found >= value)

    return judged


def most(value: float, words: str, both: bool = False) -> Goal:
    """Each value of ours, or of ``both`` sides, is at most ``value``."""

    def judged(metric: Metric) -> Target:
        worst = max(max(metric.values[side]) for side in _sides(both))
        return Target(f"{words} ({worst:.0f})", worst <= value)

    return judged


def quick(value: float, percent: float, words: str) -> Goal:
    """Each value of ours is at most ``value``, and its median ``percent`` percent below base's."""

    def judged(metric: Metric) -> Target:
        worst, change = max(metric.values["ours"]), metric.change_percent
        met = worst <= value and change is not None and change <= -percent
        return Target(f"{words} ({worst:.0f})", met)

    return judged


KINDS: dict[str, Callable[..., Goal]] = {
    "less": less,
    "most_more": most_more,
    "within": within,
    "not_worse": not_worse,
    "share": share,
    "least": least,
    "most": most,
    "quick": quick,
}


def _sides(both: bool) -> tuple[str, ...]:
    return ("base", "ours") if both else ("ours",)


def _interval(metric: Metric) -> str:
    """The change with its interval."""
    text = f"{metric.change_percent:+.1f} %"
    if not metric.change_interval:
        return text
    low, high = metric.change_interval
    return f"{text}, 95 % interval {low:+.1f} … {high:+.1f} %"


def near_floor(metric: Metric, floor: Floats, percent: float) -> Target:
    """Whether ours is at most so many percent more than the floor.

    Decided if the whole interval is on one side.
    """
    against = Metric.of(metric.name, metric.unit, floor, metric.values["ours"])
    if (change := against.change_percent) is None:
        return Target("the floor is zero", metric.ours.median == 0)
    low, high = against.change_interval or (change, change)
    met = high <= percent
    return Target(_interval(against), met, met or low > percent)
