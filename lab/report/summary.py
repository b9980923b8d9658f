# SPDX-License-Identifier: GPL-2.0
"""The short table of the demo, for the terminal and at the top of its report: no statistics."""

from collections.abc import Iterator
from typing import NamedTuple

from lab.core.paths import REPO
from lab.core.units import human, percent
from lab.report.results import Metric, Result, load
from lab.report.table import Table

SIDES = ("without", "with")
NAME = "demo"
# Under kvm_pvm a guest that does not zero a page leaves a fault to the next user of the page.
NATIVE = "pvm"
JOBS = {
    "thp.populate": "CPU time, {size} MiB in 2 MiB pages, not touched",
    "thp.touch_all": "CPU time, {size} MiB in 2 MiB pages, all written",
    "order0.touch_all": "CPU time, {size} MiB in 4 KiB pages, all written",
}
ZEROED = {
    "thp.touch_all": "bytes that the guest zeroes, 2 MiB pages",
    "order0.touch_all": "bytes that the guest zeroes, 4 KiB pages",
}
LEFT = "host.resident_after_free_bytes"
HOTPATH = REPO / "docs" / "results" / "hotpath"
COSTS = {
    "hotpath.fault.instructions": "cost*: a page fault, no source of zeros",
    "hotpath.active.fault.instructions": "cost*: a page fault that zeroes, with a source",
}
MEANING = {
    "tcg": "The CPU is emulated (TCG): bytes and instructions are exact, times are the emulator's.",
    "kvm": "Measured on hardware virtualization (KVM).",
    NATIVE: "Native (kvm_pvm), without nested paging. CPU time is of two programs in turn: a page "
    "that is not zeroed is mapped once more by its next user.",
}
QUOTED = "* instructions, plain kernel and Knownzero, from docs/results/hotpath."
NEXT = {
    "tcg": "Next: ./kz bench thp (plain kernel, floor); docs/tutorial.md (a guest of your own)",
    NATIVE: "Next: ./kz bench thp --accel pvm (plain kernel, floor); docs/tutorial.md",
}


class Row(NamedTuple):
    """A line of the table."""

    job: str
    without: str
    having: str
    change: str


def is_of(result: Result) -> bool:
    """Whether a result is one of the demo."""
    return tuple(result.sides) == SIDES and result.name.startswith(NAME)


def _row(words: str, metric: Metric) -> Row:
    without, having = (human(side.median, metric.unit) for side in (metric.base, metric.ours))
    return Row(words, without, having, percent(metric.change_percent))


def rows(result: Result) -> list[Row]:
    return [_row(words, metric) for words, metric in found(result)]


def found(result: Result) -> Iterator[tuple[str, Metric]]:
    """The metrics of the rows, with their words."""
    clock = "cold_and_warm" if result.accelerator == NATIVE else "task_clock"
    size = result.job.get("size_mb", "")
    names = {f"{job}.{clock}": words.format(size=size) for job, words in JOBS.items()}
    names |= {f"{job}.guest_zeroed_bytes": words for job, words in ZEROED.items()}
    names[LEFT] = "memory of the guest on the host, afterwards"
    for name, words in names.items():
        if metric := result.metric(name):
            yield words, metric
    published = load(HOTPATH)
    for name, words in COSTS.items():
        if metric := published.metric(name):
            yield words, metric


def lines(result: Result) -> list[str]:
    """The table for a terminal, and what it means."""
    return [*table(result).text(), *notes(result)]


def table(result: Result) -> Table:
    return Table(("", *SIDES, "change"), rows(result), right=(1, 2, 3))


def notes(result: Result) -> list[str]:
    return [QUOTED, MEANING.get(result.accelerator, "")]


def next_step(result: Result) -> str:
    return NEXT.get(result.accelerator, NEXT["tcg"])
