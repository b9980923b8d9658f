# SPDX-License-Identifier: GPL-2.0
"""The allocation job on a pair of guests, and the figures that come of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lab.bench import BenchOptions
from lab.bench.session import MIB, PAGE, HostCost, Pair, Side, warm_host
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Target

HUGE = 2 * MIB
WARM_UPS = 1
MODES = ("populate", "touch_line", "touch_all")
MODE_WORDS = {
    "populate": "the kernel populates the mapping and the program never touches it",
    "touch_line": "populated, then one byte written in each 4 KiB page",
    "touch_all": "populated, then every byte written",
}
BASE_COUNTS = (
    "The base kernel has no counter of zeroed pages: its bytes zeroed are 2 MiB for each huge page it "
    "faulted in (thp_fault_alloc; with hugetlb, what the job maps) and 4 KiB for each other fault of the job. "
    "On ours they are "
    "pgzeroed_cleared, which counts every page the whole kernel cleared meanwhile."
)


@dataclass
class Runs:
    """What one side did in one phase, one entry per repetition."""

    task_clock_ms: list[float] = field(default_factory=list)
    zeroed: list[float] = field(default_factory=list)
    skipped_percent: list[float] = field(default_factory=list)
    huge_pages: list[float] = field(default_factory=list)
    host_faults: list[float] = field(default_factory=list)
    host_system_ms: list[float] = field(default_factory=list)

    def add(self, side: Side, told: dict[str, Any], cost: HostCost) -> None:
        """Take in one repetition."""
        vmstat: dict[str, int | None] = told["vmstat"]
        # Pages of hugetlb have no counter, but the job can have got nothing else.
        huge = told["bytes"] // HUGE if told.get("pages") == "hugetlb" else vmstat["thp_fault_alloc"] or 0
        small = max(0, int(told["minor_faults"]) - huge)
        cleared = vmstat["pgzeroed_cleared"]
        skipped = vmstat["pgzeroed_skip"] or 0
        if vmstat["pgzeroed_bad"]:
            raise TestFailure(
                "Memory that should have been zero was not",
                f"pgzeroed_bad rose by {vmstat['pgzeroed_bad']} in the {side.name} guest",
                "run the same on the debug kernel: its oracle prints the page and its history",
            )
        if cleared is None and side.name == "ours":
            raise TestFailure(
                "Cannot count what our kernel zeroes",
                "its /proc/vmstat has no pgzeroed_cleared",
                "build it with CONFIG_PAGE_ZEROED (`kz build linux --variant knownzero`)",
            )
        # User-Mode Linux has no performance counters; the job has its only CPU to itself.
        clock = told["wall_ns"] if told["task_clock_ns"] is None else told["task_clock_ns"]
        self.task_clock_ms.append(clock / 1e6)
        self.zeroed.append(float(cleared * PAGE if cleared is not None else huge * HUGE + small * PAGE))
        self.skipped_percent.append(min(100.0, skipped * PAGE / told["bytes"] * 100))
        self.huge_pages.append(huge)
        self.host_faults.append(cost.faults)
        self.host_system_ms.append(cost.system_s * 1e3)


@dataclass
class Phase:
    """Both sides of one phase."""

    base: Runs = field(default_factory=Runs)
    ours: Runs = field(default_factory=Runs)

    def of(self, side: Side) -> Runs:
        """The runs of a side."""
        return self.base if side.name == "base" else self.ours


def settle_both(pair: Pair) -> None:
    """Caches dropped and free memory reported in both guests; the waiting overlaps."""
    for side in pair.sides(0):
        side.free_and_report()
    for side in pair.sides(0):
        side.reported(timeout=60)


def unprepared(side: Side) -> AbstractContextManager[None]:
    """What an allocation needs in the guest around it: nothing."""
    del side
    return nullcontext()


def allocate(
    pair: Pair,
    options: BenchOptions,
    mode: str,
    pages: str,
    around: Callable[[Side], AbstractContextManager[None]] = unprepared,
) -> Phase:
    """Run the allocation in both guests by turns, ``options.pairs`` times after the warm-up.

    ``around`` prepares the guest for each of them, unmeasured, and puts it back.
    """
    phase = Phase()
    argv = ["alloc_once", "--size", str(options.size_mb), "--mode", mode, "--pages", pages]
    with step(f"{pages} {mode}: {options.pairs} pairs of {options.size_mb} MB"):
        for turn in range(-WARM_UPS, options.pairs):
            settle_both(pair)
            for side in pair.sides(turn):
                warm_host((options.size_mb + 64) * MIB)
                with around(side), side.host_cost() as cost:
                    told = side.json(*argv)
                if turn >= 0:
                    phase.of(side).add(side, told, cost[0])
    return phase


def check_huge(phase: Phase, options: BenchOptions) -> None:
    """TestFailure unless the job really got huge pages on both sides."""
    wanted = options.size_mb * MIB // HUGE
    for name, runs in (("base", phase.base), ("ours", phase.ours)):
        if sorted(runs.huge_pages)[len(runs.huge_pages) // 2] < wanted * 0.95:
            raise TestFailure(
                "The job did not get huge pages",
                f"{runs.huge_pages} of {wanted} in the {name} guest",
                "give the guest more memory (--memory), or see /sys/kernel/mm/transparent_hugepage in it",
            )


def clock_metric(name: str, mode: str, phase: Phase, at_least: float | None) -> Metric:
    """Task-clock of a phase; ``at_least`` is the saving it is meant to show, in percent."""
    made = Metric.of(
        name,
        "ms",
        phase.base.task_clock_ms,
        phase.ours.task_clock_ms,
        sentence=f"CPU time of the job: {MODE_WORDS[mode]}.",
    )
    if at_least is None or made.change_percent is None:
        return made
    words = f"at least {at_least:.0f} % less than base"
    return replace(made, target=Target(words, made.change_percent <= -at_least))


def zeroed_metric(name: str, mode: str, phase: Phase, options: BenchOptions, limit: float | None) -> Metric:
    """Bytes the guest zeroed in a phase; ``limit`` is the most it may be, in percent of the job's size."""
    share = sorted(phase.ours.zeroed)[len(phase.ours.zeroed) // 2] / (options.size_mb * MIB) * 100
    target = (
        Target(f"at most {limit:.0f} % of the memory ({share:.2f} %)", share <= limit)
        if limit is not None
        else None
    )
    return Metric.of(
        name,
        "bytes",
        phase.base.zeroed,
        phase.ours.zeroed,
        sentence=f"Bytes the guest itself set to zero for {options.size_mb} MB; {MODE_WORDS[mode]}.",
        target=target,
    )


def host_metrics(prefix: str, phase: Phase) -> list[Metric]:
    """What the phase cost the VMM in page faults of its own."""
    return [
        Metric.of(
            f"{prefix}.host_faults",
            "faults",
            phase.base.host_faults,
            phase.ours.host_faults,
            sentence="Page faults the host handled for the VMM during the job.",
        ),
        Metric.of(
            f"{prefix}.host_share",
            "percent",
            [_host_share(phase.base)],
            [_host_share(phase.ours)],
            sentence="Part of the job's task-clock in which the host's kernel worked for the VMM, mostly on "
            "those faults; over all repetitions together, since the host counts in steps of 10 ms.",
        ),
    ]


def _host_share(runs: Runs) -> float:
    clock = sum(runs.task_clock_ms)
    return min(100.0, sum(runs.host_system_ms) / clock * 100) if clock else 0.0


def host_share_note(phase: Phase) -> str:
    """One sentence: how much of what is left of touch-all is the host's own fault handling."""
    base, ours = (sum(runs.host_system_ms) / len(runs.host_system_ms) for runs in (phase.base, phase.ours))
    return (
        f"Of the task-clock that is left on ours when everything is touched, {_host_share(phase.ours):.0f} % "
        f"is the host's kernel at work for the VMM, {ours:.0f} ms a run ({base:.0f} ms on base): mostly page "
        "faults, since the host has to find and zero the memory when it is touched. The guest cannot save "
        "that part."
    )


# How many times what would be far too bad the interval may still contain.
TOO_NOISY = 4


def within(made: Metric, limit: float, beyond: float, words: str, *, more_is_better: bool = False) -> Target:
    """Whether ours is at most ``limit`` percent worse than base, as far as the measurement can tell.

    Not met when the whole interval of the change is worse than that; nor when the change itself is worse than
    ``beyond`` percent, however wide the interval; nor when the interval reaches so far beyond that
    nothing was shown: much noise is no excuse.
    """
    change = made.change_percent
    if change is None:
        return Target(f"{words} (base is zero)", False)
    low, high = made.change_interval or (change, change)
    least, worse, worst = (-high, -change, -low) if more_is_better else (low, change, high)
    told = f"{change:+.1f} %"
    if made.change_interval:
        told += f", 95 % interval {low:+.1f} … {high:+.1f} %"
    shown = worst <= TOO_NOISY * beyond
    told += "" if shown else ", too noisy to tell"
    return Target(f"{words} ({told})", shown and least <= limit and worse <= beyond)


def elapsed(began: float) -> float:
    """Seconds since ``began`` on the monotonic clock, to a tenth."""
    return round(time.monotonic() - began, 1)
