# SPDX-License-Identifier: GPL-2.0
"""The targets that metrics have; each function makes one that judges a metric."""

from collections.abc import Sequence

from lab.report.results import Goal, Metric, Target

# An interval may reach this many times as far as the change that would miss the target at once.
TOO_NOISY = 4


def less(percent: float | None, words: str = "at least {:g} % less than base") -> Goal | None:
    """At least so many percent less than base; no target without a number."""
    if percent is None:
        return None
    least, said = -percent, words.format(percent)
    return lambda made: Target(
        said, made.change_percent is not None and made.change_percent <= least
    )


def more_at_most(percent: float, words: str) -> Goal:
    """At most so many percent more than base, without regard to noise: for counts."""
    return lambda made: Target(
        words, made.change_percent is not None and made.change_percent <= percent
    )


def within(limit: float, beyond: float, words: str, *, more_is_better: bool = False) -> Goal:
    """At most ``limit`` percent worse than base, as far as the measurement can show.

    Missed when the whole interval of the change is worse than that, when the change itself is worse
    than ``beyond`` percent, or when the interval reaches so far beyond that the measurement shows
    nothing.
    """

    def judge(metric: Metric) -> Target:
        if (change := metric.change_percent) is None:
            return Target(f"{words} (base is zero)", False)
        low, high = metric.change_interval or (change, change)
        least, worse, worst = (-high, -change, -low) if more_is_better else (low, change, high)
        text = f"{change:+.1f} %"
        if metric.change_interval:
            text += f", 95 % interval {low:+.1f} … {high:+.1f} %"
        shown = worst <= TOO_NOISY * beyond
        text += "" if shown else ", too noisy to tell"
        return Target(f"{words} ({text})", shown and least <= limit and worse <= beyond)

    return judge


def near_floor(floor: Sequence[float], also: Goal | None) -> Goal | None:
    """At most 5 percent more than the floor, and ``also``; only ``also`` without a floor."""
    near = within(5, 5, "at most 5 % more than the floor")

    def judge(metric: Metric) -> Target | None:
        found = near(Metric.of(metric.name, metric.unit, floor, metric.values["ours"]))
        other = also(metric) if also else None
        if not found or not other:
            return found or other
        return Target(f"{other.text}; {found.text}", other.met and found.met)

    return judge if floor else also


def share(percent: float | None, size: float) -> Goal | None:
    """The median of ours is at most so many percent of ``size``; no target without a number."""

    def judge(metric: Metric) -> Target:
        part = metric.ours.median / size * 100
        return Target(
            f"at most {percent:.0f} % of the memory ({part:.2f} %)", part <= (percent or 0)
        )

    return judge if percent is not None else None
