# SPDX-License-Identifier: GPL-2.0
"""The targets that metrics have; each function makes one that judges a metric."""

from lab.report.results import Floats, Goal, Metric, Target

# An interval may reach this many times as far as the change that would miss the target at once.
TOO_NOISY = 4
ABOVE_FLOOR = 5.0  # percent


def less(percent: float | None, words: str = "at least {:g} % less than base") -> Goal | None:
    """At least so many percent less than base; no target without a number.

    Not decided when the change is smaller, but its interval reaches that far.
    """
    if percent is None:
        return None

    def judge(metric: Metric) -> Target:
        change = metric.change_percent
        met = change is not None and change <= -percent
        low, _ = metric.change_interval or (change, change)
        return Target(words.format(percent), met, met or low is None or low > -percent)

    return judge


def more_at_most(percent: float, words: str) -> Goal:
    """At most so many percent more than base, without regard to noise: for counts."""
    return lambda made: Target(
        words, made.change_percent is not None and made.change_percent <= percent
    )


def within(limit: float, beyond: float, words: str, *, more_is_better: bool = False) -> Goal:
    """At most ``limit`` percent worse than base, as far as the measurement can show.

    Missed when the whole interval of the change is worse than that. Not decided when only the
    change itself is worse than ``beyond`` percent, or when the interval reaches so far beyond that
    the measurement shows nothing.
    """

    def judge(metric: Metric) -> Target:
        if (change := metric.change_percent) is None:
            return Target(f"{words} (base is zero)", False)
        low, high = metric.change_interval or (change, change)
        least, worse, worst = (-high, -change, -low) if more_is_better else (low, change, high)
        missed = least > limit
        decided = missed or (worse <= beyond and worst <= TOO_NOISY * beyond)
        return Target(f"{words} ({_interval(metric)})", decided and not missed, decided)

    return judge


def _interval(metric: Metric) -> str:
    """The change with its interval."""
    text = f"{metric.change_percent:+.1f} %"
    if not metric.change_interval:
        return text
    low, high = metric.change_interval
    return f"{text}, 95 % interval {low:+.1f} … {high:+.1f} %"


def near_floor(metric: Metric, floor: Floats) -> Target:
    """Whether ours is at most ABOVE_FLOOR percent more than the floor.

    Decided if the whole interval is on one side.
    """
    against = Metric.of(metric.name, metric.unit, floor, metric.values["ours"])
    if (change := against.change_percent) is None:
        return Target("the floor is zero", metric.ours.median == 0)
    low, high = against.change_interval or (change, change)
    met = high <= ABOVE_FLOOR
    return Target(_interval(against), met, met or low > ABOVE_FLOOR)


def share(percent: float | None, size: float) -> Goal | None:
    """The median of ours is at most so many percent of ``size``; no target without a number."""

    def judge(metric: Metric) -> Target:
        part = metric.ours.median / size * 100
        return Target(
            f"at most {percent:.0f} % of the memory ({part:.2f} %)", part <= (percent or 0)
        )

    return judge if percent is not None else None
