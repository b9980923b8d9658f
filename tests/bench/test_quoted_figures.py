# SPDX-License-Identifier: GPL-2.0
"""Figures that the front page and the how-to pages quote are those of docs/results."""

from __future__ import annotations

import functools
import re

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
    name = f"life.init1.{{}}.{phase}.{kind}"
    return [
        ("life", name.format("reports"), "base"),
        ("life", name.format("reports"), "ours"),
        ("life", name.format("kzeropaged"), "ours"),
    ]


def row(title: str, figures: list[tuple[str, str, str]]) -> str:
    """A row of a table with three columns."""
    return f"| {' | '.join([title, *(text(*one) for one in figures)])} |"


def density(title: str, phase: str) -> str:
    """A row with the host memory of a guest, and how many guests a host has room for."""
    cells = []
    for run, name, side in of_life(phase, "host"):
        guests = int(HOST_GIB * 2**30 / median(run, name, side))
        cells.append(f"{text(run, name, side)}: {guests}")
    return f"| {' | '.join([title, *cells])} |"


def reserve() -> str:
    """Room for guests that have a burst at once."""
    burst, parked = (
        round(median(*of_life(phase, "host")[-1]) / 2**30, 2) for phase in ("burst", "park")
    )
    guests = int((HOST_GIB - BURSTS * (burst - parked)) / parked)
    return f"({HOST_GIB} − {BURSTS} × ({burst:.2f} − {parked:.2f})) / {parked:.2f} = {guests}"


def capacity() -> list[str]:
    """The tables of "Plan capacity"."""
    peaks = " | ".join(f"{max(published('fleet-debian').series[name]):.2f} GiB" for name in FLEET)
    return [
        *(density(title, phase) for title, phase in STATES.items()),
        reserve(),
        f"| six guests: most host memory at once | {peaks} |",
        row("until the host has 3 GiB of a guest", of_life("park", "time")),
        row("its saved file without file pages", of_life("save", "file")),
        row("a burst of 2 GiB after the restore", of_life("burst", "time")),
        row("boot", of_life("boot", "time")),
    ]


@pytest.mark.parametrize("line", capacity())
def test_the_capacity_of_a_host(line: str) -> None:
    assert line in (REPO / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")


def taken_back() -> list[str]:
    """The table of "Take free memory back"."""
    rows = []
    for gib in ("0.5", "3", "12"):
        costs = [
            text("device", f"device.back.{gib}.{kind}", side)
            for side in ("base", "ours")
            for kind in ("time.report_now", "time.inflate", "time.deflate", "faster")
        ]
        rows.append(f"| {' | '.join([f'{gib} GiB', *costs])} |".replace(" times", ""))
    return rows


@pytest.mark.parametrize("line", taken_back())
def test_the_cost_of_taking_memory_back(line: str) -> None:
    assert line in (REPO / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")


MS, MIB, GIB = 1.0, 2.0**20, 2.0**30
# The rows of the front page by their first words: run, metric, and what both sides are divided by.
FRONT: dict[str, tuple[str, str, float, float]] = {
    "a fresh guest: its first program": ("boot", "boot.2g.zeroed", GIB, MIB),
    "a fresh guest: time until init": ("boot", "boot.2g.init", MS, MS),
    "native: CPU time to write every byte": ("thp-native", "thp.touch_all.cold_and_warm", MS, MS),
    "native: CPU time of QEMU": ("prezero-native", "prezero.load.again_1500ms.alone.cpu", MS, MS),
    "3 GiB parked": ("life", "life.init0.kzeropaged.park.time", 1e3, 1e3),
    "a burst of 2 GiB": ("life", "life.init0.kzeropaged.burst.zeroed", GIB, GIB),
    "the saved file": ("life", "life.init0.kzeropaged.save.file", MIB, MIB),
    "instructions of a page fault": ("hotpath", "hotpath.active.fault.instructions", 1.0, 1.0),
    "longest hold of a zone's lock": ("lockhold", "lockhold.flush.2gb.longest", 1.0, 1.0),
}


def rounds_to(value: float, shown: str) -> bool:
    """Whether a value rounds to what is shown; zeros at its end may be rounded."""
    digits = shown.replace("−", "-").replace(",", "")
    places = len(digits.partition(".")[2])
    step = 10.0**-places
    if not places and digits.endswith("000"):
        step = 1000.0
    return abs(value - float(digits)) <= step / 2 * 1.001


@pytest.mark.parametrize("words", FRONT)
def test_the_front_page(words: str) -> None:
    text = (REPO / "README.md").read_text(encoding="utf-8")
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {words}")]
    cells = [re.findall(r"[−+]?\d[\d,.]*", cell) for cell in line.strip("| ").split(" | ")[1:]]
    run, name, base, ours = FRONT[words]
    metric = published(run).metric(name)
    assert metric and metric.change_percent is not None
    wanted = metric.base.median / base, metric.ours.median / ours, metric.change_percent
    for (shown,), value in zip(cells, wanted, strict=True):
        assert rounds_to(value, shown), (shown, value)


def of_other_defaults(run: str, name: str) -> tuple[str, str]:
    """The same figure with the other value of init_on_alloc, published or not."""
    if ".init" in name:
        values = str.maketrans("01", "10")
        return run, re.sub(r"(?<=\.init)[01]", lambda found: found[0].translate(values), name)
    return run.removesuffix("-debian") if run.endswith("-debian") else f"{run}-debian", name


def test_the_front_page_has_the_worse_of_both_defaults() -> None:
    compared = 0
    for run, name, *_ in FRONT.values():
        other, same = of_other_defaults(run, name)
        if not (REPO / "docs" / "results" / other / "result.json").is_file():
            continue
        shown, not_shown = published(run).metric(name), published(other).metric(same)
        if shown and not_shown:
            assert (shown.change_percent or 0.0) >= (not_shown.change_percent or 0.0), name
            compared += 1
    assert compared >= 4


def test_a_wrong_figure_is_found() -> None:
    assert rounds_to(62.5, "63") and rounds_to(-83.9, "−84") and rounds_to(880744, "881,000")
    assert not rounds_to(61.4, "63") and not rounds_to(84.0, "−84")
    assert not rounds_to(0.47, "0.48") and not rounds_to(882000, "881,000")
