# SPDX-License-Identifier: GPL-2.0
"""Figures that the how-to pages quote are those of docs/results."""

from __future__ import annotations

import functools

import pytest

from lab.core.paths import REPO
from lab.core.units import human
from lab.report.results import Result, load

HOST_GIB = 64
BURSTS = 10
STATES = {
    "booted": "boot",
    "idle, after programs that used 1 GiB": "idle",
    "parked": "park",
    "parked without file pages": "save",
    "in a burst of 2 GiB": "burst",
}
# As fleet names its columns: without reports, with reports, Knownzero.
FLEET = ("base, no reports", "base, reports after 2000 ms", "ours, reports after 2000 ms")


@functools.cache
def published(run: str) -> Result:
    return load(REPO / "docs" / "results" / run)


def median(run: str, name: str, side: str) -> float:
    metric = published(run).metric(name)
    assert metric, f"{run} has no {name}"
    return float(getattr(metric, side).median)


def text(run: str, name: str, side: str) -> str:
    metric = published(run).metric(name)
    assert metric, f"{run} has no {name}"
    return human(median(run, name, side), metric.unit)


def of_life(phase: str, kind: str) -> list[tuple[str, str, str]]:
    """A figure of base, of base with reports, and of Knownzero with kzeropaged.

    With init_on_alloc=1, Debian's default.
    """
    name = f"life.init1.{{}}.thp.{phase}.{kind}"
    return [
        ("life", name.format("reports"), "base"),
        ("life", name.format("reports"), "ours"),
        ("life", name.format("kzeropaged"), "ours"),
    ]


def of_fleet(kind: str) -> list[tuple[str, str, str]]:
    """The same of fleet."""
    none, late = f"fleet.none.{kind}", f"fleet.late.{kind}"
    return [("fleet", none, "ours"), ("fleet", late, "base"), ("fleet", late, "ours")]


def row(title: str, *kinds: list[tuple[str, str, str]]) -> str:
    """A row of a table with three columns; figures of several kinds share a cell."""
    cells = ["; ".join(text(*one) for one in of_column) for of_column in zip(*kinds, strict=True)]
    return f"| {' | '.join([title, *cells])} |"


def density(title: str, phase: str) -> str:
    """A row with the host memory of a guest, and how many guests a host has room for."""
    cells = []
    for run, name, side in of_life(phase, "host"):
        guests = int(HOST_GIB * 2**30 / median(run, name, side))
        cells.append(f"{text(run, name, side)}: {guests}")
    return f"| {' | '.join([title, *cells])} |"


def idle() -> str:
    """The spread of the memory of an idle guest."""
    metric = published("life").metric(of_life("idle", "host")[-1][1])
    assert metric
    return " and ".join(human(end, metric.unit) for end in (metric.ours.low, metric.ours.high))


def reserve() -> str:
    """Room for guests that have a burst at once."""
    burst, parked = (
        round(median(*of_life(phase, "host")[-1]) / 2**30, 2) for phase in ("burst", "park")
    )
    guests = int((HOST_GIB - BURSTS * (burst - parked)) / parked)
    return f"({HOST_GIB} − {BURSTS} × ({burst:.2f} − {parked:.2f})) / {parked:.2f} = {guests}"


def capacity() -> list[str]:
    """The tables of "Plan capacity"."""
    peaks = " | ".join(f"{max(published('fleet').series[name]):.2f} GiB" for name in FLEET)
    return [
        *(density(title, phase) for title, phase in STATES.items()),
        idle(),
        reserve(),
        f"| six guests: most host memory at once | {peaks} |",
        row("their bursts: median; 99th percentile", of_fleet("burst"), of_fleet("burst_p99")),
        row("CPU time of a guest's QEMU in that minute", of_fleet("cpu")),
        row("until the host has 3 GiB of a guest", of_life("park", "time")),
        row("its saved file without file pages", of_life("save", "file")),
        row("a program of 1 GiB after the restore", of_life("restored", "time")),
        row("a burst of 2 GiB after it", of_life("burst", "time")),
        row("boot", of_life("boot", "time")),
        row("CPU time of QEMU in the whole life", of_life("whole", "cpu")),
    ]


@pytest.mark.parametrize("line", capacity())
def test_the_capacity_of_a_host(line: str) -> None:
    assert line in (REPO / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
