# SPDX-License-Identifier: GPL-2.0
"""``kz compare A B``: two runs side by side, if they may be compared at all."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from lab.errors import UsageError
from lab.results import Metric, Result, Sample, change_percent, load
from lab.units import human, percent


@dataclass(frozen=True)
class Row:
    """One side of one metric in both runs; ``overlap`` says that their spreads touch."""

    name: str
    unit: str
    side: str
    first: Sample
    second: Sample
    change_percent: float | None
    overlap: bool


def unlike(first: Result, second: Result) -> list[str]:
    """Why the two runs do not measure the same thing; empty when they do."""
    reasons = []
    if first.accelerator != second.accelerator:
        reasons.append(f"accelerator {first.accelerator} against {second.accelerator}")
    if first.name != second.name:
        reasons.append(f"job {first.name} against {second.name}")
    keys = sorted(set(first.job) & set(second.job))
    reasons += [
        f"{key} {first.job[key]} against {second.job[key]}"
        for key in keys
        if first.job[key] != second.job[key]
    ]
    # Another machine, another time. What was not written down is not held against a run.
    reasons += [
        f"host {key} {first.host[key]} against {second.host[key]}"
        for key in ("cpu", "cpus")
        if key in first.host and key in second.host and first.host[key] != second.host[key]
    ]
    return reasons


def rows(first: Result, second: Result) -> list[Row]:
    """What both runs have, side by side."""
    found = []
    for one in first.metrics:
        two = second.metric(one.name)
        if two is None or two.unit != one.unit:
            continue
        found += [_row(one, two, side) for side in ("base", "ours")]
    return found


def _row(one: Metric, two: Metric, side: str) -> Row:
    a: Sample = getattr(one, side)
    b: Sample = getattr(two, side)
    overlap = a.low <= b.high and b.low <= a.high
    return Row(one.name, one.unit, side, a, b, change_percent(a.median, b.median), overlap)


def compare(first: Path, second: Path, *, force: bool = False) -> list[Row]:
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
    return found


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command("compare")
    def command(
        first: Annotated[Path, typer.Argument(help="a run's folder, or its result.json")],
        second: Annotated[Path, typer.Argument(help="the run to compare it with")],
        force: Annotated[bool, typer.Option("--force", help="compare unlike runs all the same")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    ) -> None:
        """Compare two runs metric by metric; refuses unlike ones."""
        found = compare(first, second, force=force)
        if as_json:
            print(
                json.dumps(
                    [
                        {
                            "name": row.name,
                            "unit": row.unit,
                            "side": row.side,
                            "first": row.first.__dict__,
                            "second": row.second.__dict__,
                            "change_percent": row.change_percent,
                            "overlap": row.overlap,
                        }
                        for row in found
                    ],
                    indent=2,
                )
            )
            return
        table = Table(
            title=f"{first} and {second}", caption="~ : the spreads overlap, the change may be noise"
        )
        table.add_column("metric", overflow="fold")
        table.add_column("side")
        for column in ("first", "second", "change"):
            table.add_column(column, justify="right")
        for row in found:
            mark = " ~" if row.overlap and row.change_percent else ""
            table.add_row(
                row.name,
                row.side,
                human(row.first.median, row.unit),
                human(row.second.median, row.unit),
                percent(row.change_percent) + mark,
            )
        # Wide enough for whole names where no terminal limits it.
        Console(width=None if sys.stdout.isatty() else 120).print(table)
