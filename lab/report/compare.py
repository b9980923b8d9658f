# SPDX-License-Identifier: GPL-2.0
"""``kz compare A B``: two runs side by side, if they measured the same thing."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core.errors import UsageError
from lab.core.units import human, percent
from lab.report.results import FILE_NAME, Metric, Result, Sample, change_percent, load
from lab.report.significance import Significance, judge
from lab.report.table import Table

SIDE_NAMES = ("base", "ours")
PAIRS = "ours/base"
# Another machine, or another kernel on it, gives other times.
HOST = ("cpu", "cpus", "kernel")


@dataclass(frozen=True)
class Row:
    """One side of one metric in both runs; ``overlap``: their spreads touch.

    ``side`` PAIRS: the samples are the change in each pair, in percent. The difference is
    ``points``, else ``change_percent``.
    """

    name: str
    unit: str
    side: str
    first: Sample
    second: Sample
    change_percent: float | None
    overlap: bool
    significance: Significance | None = None
    points: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The common metrics of two runs, and the differences between the runs."""

    sides: list[str]
    rows: list[Row]
    reasons: list[str]
    versions: list[str]
    only_first: list[str]
    only_second: list[str]


def _differences(
    what: str, one: dict[str, Any], two: dict[str, Any], keys: Iterable[str]
) -> list[str]:
    return [
        f"{what}{key} {one.get(key, 'nothing')} against {two.get(key, 'nothing')}"
        for key in sorted(keys)
        if one.get(key) != two.get(key)
    ]


def unlike(first: Result, second: Result) -> list[str]:
    """The reasons why two runs did not measure the same thing; empty when they did."""
    one, two = (
        {"accelerator": run.accelerator, "job": run.name, "sides": " and ".join(run.sides)}
        for run in (first, second)
    )
    reasons = _differences("", one, two, one)
    reasons += _differences("", first.job, second.job, {*first.job, *second.job})
    # Facts that one run does not have make no difference.
    known = [key for key in HOST if key in first.host and key in second.host]
    return reasons + _differences("host ", first.host, second.host, known)


def rows(first: Result, second: Result) -> list[Row]:
    found = []
    for one in first.metrics:
        two = second.metric(one.name)
        if two is None or two.unit != one.unit:
            continue
        for side in SIDE_NAMES:
            a, b = getattr(one, side), getattr(two, side)
            test = _tested(one.values.get(side), two.values.get(side))
            change = change_percent(a.median, b.median)
            found.append(Row(one.name, one.unit, side, a, b, change, _touch(a, b), test))
        if (changes := _changes(one)) and (others := _changes(two)):
            # A machine that is slower today is slower for both sides.
            a, b = Sample.of(changes), Sample.of(others)
            test, points = _tested(changes, others), b.median - a.median
            found.append(
                Row(
                    one.name,
                    "percent",
                    PAIRS,
                    a,
                    b,
                    change_percent=None,
                    overlap=_touch(a, b),
                    significance=test,
                    points=points,
                )
            )
    return found


def _touch(a: Sample, b: Sample) -> bool:
    return a.low <= b.high and b.low <= a.high


def _tested(first: list[float] | None, second: list[float] | None) -> Significance | None:
    # Two runs do not take turns, so their values are no pairs.
    return judge(first, second, paired=False) if first and second else None


def _changes(metric: Metric) -> list[float]:
    """The change in each pair, in percent; empty when base can be zero, or without pairs."""
    if not metric.paired or min(metric.values["base"]) <= 0:
        return []
    pairs = zip(metric.values["base"], metric.values["ours"], strict=True)
    return [(ours - base) / base * 100 for base, ours in pairs]


def compare(first: Path, second: Path, *, force: bool = False) -> Comparison:
    """Compare two runs.

    UsageError when they are unlike and not ``force``, or have no common metric.
    """
    one, two = load(first), load(second)
    reasons = unlike(one, two)
    if reasons and not force:
        why = f"they measured different things:\n{_shortened(reasons)}"
        fix = "compare runs of the same job on the same accelerator and machine, or add --force"
        raise UsageError(f"Cannot compare {first} with {second}", why, fix)
    if not (found := rows(one, two)):
        fix = "give two runs of the same bench"
        raise UsageError(f"Cannot compare {first} with {second}", "no metric is in both", fix)
    common = {row.name for row in found}
    return Comparison(
        one.sides,
        found,
        reasons,
        _differences("", one.versions, two.versions, {*one.versions, *two.versions}),
        [metric.name for metric in one.metrics if metric.name not in common],
        [metric.name for metric in two.metrics if metric.name not in common],
    )


def published_beside(run: Path, published: Path) -> Path:
    """The published run that has the most figures of ``run``; of several, one that no emulator
    made. ``published`` is the folder of all of them.

    UsageError when none has any.
    """
    names = {metric.name for metric in load(run).metrics}

    def alike(other: Result) -> tuple[int, bool]:
        return len(names & {metric.name for metric in other.metrics}), other.accelerator != "tcg"

    others = [load(file.parent) for file in sorted(published.glob(f"*/{FILE_NAME}"))]
    nearest = max(others, key=alike, default=None)
    if nearest is None or nearest.folder is None or not alike(nearest)[0]:
        fix = "unpack the archive, and name both runs"
        raise UsageError(f"Cannot compare {run}", "no published run has its figures", fix)
    return nearest.folder


def _shortened(reasons: list[str], lines: int = 5, width: int = 100) -> str:
    """The first reasons, a line each, cut to ``width`` characters, and the number of the others."""
    shown = [one if len(one) <= width else f"{one[: width - 1]}…" for one in reasons[:lines]]
    more = len(reasons) - len(shown)
    return "\n".join([*shown, *([f"and {more} more differences"] if more else [])])


CAPTION = (
    "~ : the spreads overlap; p of a test of each row by itself, with the runs as independent "
    "samples: boots differ more than the repetitions of one boot. ours/base: the change in each "
    "pair, and the difference of both in percentage points"
)


def table(found: Comparison) -> Table:
    names = dict(zip(SIDE_NAMES, found.sides, strict=True))
    heads, cells = ("metric", "side", "first", "second", "change", "chance"), []
    for row in found.rows:
        change = percent(row.change_percent) if row.points is None else f"{row.points:+.1f} points"
        mark = " ~" if row.overlap and (row.change_percent or row.points) else ""
        medians = (human(side.median, row.unit) for side in (row.first, row.second))
        test = row.significance.text() if row.significance else ""
        side = names.get(row.side, row.side)
        cells.append((f"`{row.name}`", side, *medians, change + mark, test))
    return Table(heads, cells, right=(2, 3, 4))
