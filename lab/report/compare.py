# SPDX-License-Identifier: GPL-2.0
"""``kz compare A B``: two runs side by side, if they may be compared at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.core.errors import UsageError
from lab.core.units import human, percent
from lab.report.results import Metric, Result, Sample, change_percent, load
from lab.report.significance import Significance, judge

SIDE_NAMES = ("base", "ours")
PAIRS = "ours/base"
# Of the machine: another one, or another kernel under it, is another time.
HOST = ("cpu", "cpus", "kernel")
NOT_TOLD = "nothing"


@dataclass(frozen=True)
class Row:
    """One side of one metric in both runs; ``overlap`` says that their spreads touch.

    Where ``side`` is PAIRS, the samples are how far ours was from base in each pair of a run, in percent, and
    the change between the runs is ``points``; otherwise it is ``change_percent``.
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
    """What two runs have in common, side by side; and what only one of them has, or has otherwise."""

    sides: list[str]
    rows: list[Row]
    reasons: list[str]
    versions: list[str]
    only_first: list[str]
    only_second: list[str]


def _differences(what: str, one: dict[str, Any], two: dict[str, Any], keys: Iterable[str]) -> list[str]:
    return [
        f"{what}{key} {one.get(key, NOT_TOLD)} against {two.get(key, NOT_TOLD)}"
        for key in keys
        if one.get(key) != two.get(key)
    ]


def unlike(first: Result, second: Result) -> list[str]:
    """Why the two runs do not measure the same thing; empty when they do."""
    reasons = []
    if first.accelerator != second.accelerator:
        reasons.append(f"accelerator {first.accelerator} against {second.accelerator}")
    if first.name != second.name:
        reasons.append(f"job {first.name} against {second.name}")
    if first.sides != second.sides:
        reasons.append(f"sides {' and '.join(first.sides)} against {' and '.join(second.sides)}")
    # What only one run was told to do, the other did not do.
    reasons += _differences("", first.job, second.job, sorted(set(first.job) | set(second.job)))
    # What was not written down of the machine is not held against a run.
    known = [key for key in HOST if key in first.host and key in second.host]
    return reasons + _differences("host ", first.host, second.host, known)


def rows(first: Result, second: Result) -> list[Row]:
    """What both runs have, side by side."""
    found = []
    for one in first.metrics:
        two = second.metric(one.name)
        if two is None or two.unit != one.unit:
            continue
        found += [_row(one, two, side) for side in SIDE_NAMES]
        pairs = _pairs(one, two)
        if pairs:
            found.append(pairs)
    return found


def _row(one: Metric, two: Metric, side: str) -> Row:
    a: Sample = getattr(one, side)
    b: Sample = getattr(two, side)
    overlap = a.low <= b.high and b.low <= a.high
    values = one.values.get(side), two.values.get(side)
    # Two runs are never measured by turns: no pairs.
    tested = judge(values[0], values[1], paired=False) if values[0] and values[1] else None
    return Row(one.name, one.unit, side, a, b, change_percent(a.median, b.median), overlap, tested)


def _changes(metric: Metric) -> list[float]:
    """How far ours was from base in each pair, in percent; nothing where base can be zero, or without pairs."""
    if not metric.paired or min(metric.values["base"]) <= 0:
        return []
    return [
        (ours - base) / base * 100
        for base, ours in zip(metric.values["base"], metric.values["ours"], strict=True)
    ]


def _pairs(one: Metric, two: Metric) -> Row | None:
    """What ours made of base in both runs: a machine that is slower today is slower for both sides."""
    first, second = _changes(one), _changes(two)
    if not first or not second:
        return None
    a, b = Sample.of(first), Sample.of(second)
    overlap = a.low <= b.high and b.low <= a.high
    tested = judge(first, second, paired=False)
    return Row(one.name, "percent", PAIRS, a, b, None, overlap, tested, b.median - a.median)


def compare(first: Path, second: Path, *, force: bool = False) -> Comparison:
    """Compare two runs; UsageError when they are unlike and not ``force``, or share nothing."""
    one, two = load(first), load(second)
    reasons = unlike(one, two)
    if reasons and not force:
        raise UsageError(
            f"Cannot compare {first} with {second}",
            "they measured different things: " + "; ".join(reasons),
            "compare runs of the same job on the same accelerator and machine, or add --force and know what you read",
        )
    found = rows(one, two)
    if not found:
        raise UsageError(
            f"Cannot compare {first} with {second}",
            "they have no metric in common",
            "give two runs of the same bench",
        )
    common = {row.name for row in found}
    return Comparison(
        one.sides,
        found,
        reasons,
        _differences("", one.versions, two.versions, sorted(set(one.versions) | set(two.versions))),
        [metric.name for metric in one.metrics if metric.name not in common],
        [metric.name for metric in two.metrics if metric.name not in common],
    )


def table(found: Comparison, first: Path, second: Path) -> Table:
    """The comparison as a table."""
    table = Table(
        title=f"{first} and {second}",
        caption="~ : the spreads overlap; p of a test of each row by itself, the two runs taken as independent: "
        "from one boot to the next more changes than within a run. ours/base: the change in each pair, and the "
        "difference of both in percentage points",
        caption_justify="left",
    )
    table.add_column("metric", overflow="fold")
    table.add_column("side")
    for column in ("first", "second", "change"):
        table.add_column(column, justify="right")
    table.add_column("chance")
    names = dict(zip(SIDE_NAMES, found.sides, strict=True))
    for row in found.rows:
        change = percent(row.change_percent) if row.points is None else f"{row.points:+.1f} points"
        mark = " ~" if row.overlap and (row.change_percent or row.points) else ""
        table.add_row(
            row.name if row.side == SIDE_NAMES[0] else "",
            names.get(row.side, row.side),
            human(row.first.median, row.unit),
            human(row.second.median, row.unit),
            change + mark,
            row.significance.told() if row.significance else "",
        )
    return table
