# SPDX-License-Identifier: GPL-2.0
"""The allocation job in two guests, and its figures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lab.bench.repeat import turns
from lab.bench.runner import Run
from lab.bench.session import MIB, PAGE, HostCost, Side, settle_both, warm_host
from lab.core.errors import TestFailure
from lab.core.progress import step

HUGE = 2 * MIB
SPARE = 64 * MIB  # of the host's memory, beside the job's
MODES = ("populate", "touch_line", "touch_all")
TOUCHED = (
    "A job that only populates hides the host's faults, which come when the memory is touched: "
    "the modes that touch it have them. Memory that the guest does not touch is not taken from "
    "the host."
)
BASE_COUNTS = (
    "The base kernel has no counter of zeroed pages: its bytes zeroed are 2 MiB for each huge "
    "page it faulted in (thp_fault_alloc; with hugetlb, the size of the mapping) and 4 KiB for "
    "each other fault of the job. On ours they are pgzeroed_cleared, which counts every page the "
    "whole kernel cleared meanwhile."
)


# The name of our kernel in a guest whose device offers no bit: it counts no page that it zeroes.
NO_SOURCE = "no source"
BOTH_RUNS = (
    "cold_and_warm is the CPU time of a job and of one that follows it at once. Under PVM, kernel "
    "and user mapping of a page fault separately. A guest that does not zero a page saves the "
    "first of these faults, and the next user of the page pays it: compare the sums."
)


def check_zeros(bad: int | None, where: str) -> None:
    """TestFailure when the kernel of a guest has found known-zero memory that was not zero."""
    if bad:
        why = f"pgzeroed_bad rose by {bad} in {where}"
        fix = "run the same on the debug kernel: its oracle prints the page and its history"
        raise TestFailure("Memory that should have been zero was not", why, fix)


def zeroed_bytes(answer: dict[str, Any], kernel: str) -> float:
    """Bytes that the guest zeroed for a run of alloc_once: see ``BASE_COUNTS``.

    ``answer``: of alloc_once. Without a source of zeros, our kernel counts as little as base.

    TestFailure when memory was not zero, or when our kernel has no
    counters.
    """
    vmstat: dict[str, int | None] = answer["vmstat"]
    check_zeros(vmstat["pgzeroed_bad"], f"a guest with the kernel {kernel}")
    cleared = vmstat["pgzeroed_cleared"]
    if cleared is None and kernel == "ours":
        why = "its /proc/vmstat has no pgzeroed_cleared"
        fix = "build it with CONFIG_PAGE_ZEROED (`kz build linux --variant knownzero`)"
        raise TestFailure("Cannot count the pages that our kernel zeroes", why, fix)
    if cleared is not None and kernel != NO_SOURCE:
        return float(cleared * PAGE)
    huge = huge_pages(answer)
    small = max(0, int(answer["minor_faults"]) - huge)
    return float(huge * HUGE + small * PAGE)


def huge_pages(answer: dict[str, Any]) -> int:
    """The huge pages that a run of alloc_once got. Those of hugetlb have no counter."""
    if answer.get("pages") == "hugetlb":
        return int(answer["bytes"]) // HUGE
    return answer["vmstat"]["thp_fault_alloc"] or 0


def clock_ms(answer: dict[str, Any]) -> float:
    # User-Mode Linux has no performance counters; the job has its only CPU to itself.
    ns = answer["wall_ns"] if answer["task_clock_ns"] is None else answer["task_clock_ns"]
    return float(ns / 1e6)


@dataclass
class Runs:
    """The values of one side in one phase, one entry per repetition."""

    task_clock_ms: list[float] = field(default_factory=list)
    zeroed: list[float] = field(default_factory=list)
    skipped_percent: list[float] = field(default_factory=list)
    huge_pages: list[float] = field(default_factory=list)
    host_faults: list[float] = field(default_factory=list)
    with_warm_ms: list[float] = field(default_factory=list)  # and of a job that follows at once

    def add(self, side: Side, answer: dict[str, Any], cost: HostCost) -> None:
        self.task_clock_ms.append(clock_ms(answer))
        self.zeroed.append(zeroed_bytes(answer, side.kernel))
        skipped = answer["vmstat"]["pgzeroed_skip"] or 0
        self.skipped_percent.append(min(100.0, skipped * PAGE / answer["bytes"] * 100))
        self.huge_pages.append(huge_pages(answer))
        self.host_faults.append(cost.faults)


@dataclass(frozen=True)
class Job:
    """A run of alloc_once; ``name`` begins the names of its metrics, which have ``parameters``.

    ``twice``: also the time of this job and of another one at once after it.
    """

    name: str
    mode: str
    pages: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    twice: bool = False


@dataclass
class Phase:
    """The values of a job in both guests."""

    run: Run
    job: Job
    base: Runs = field(default_factory=Runs)
    ours: Runs = field(default_factory=Runs)
    floor: Runs = field(default_factory=Runs)

    def add(self, last: str, values: str, floor: Sequence[float] = ()) -> None:
        """Add the metric with this last name, of these values of ``Runs``."""
        both = getattr(self.base, values), getattr(self.ours, values)
        of = {"size_mb": self.run.options.size_mb, **self.job.parameters}
        self.run.add(f"{self.job.name}.{last}", both, of, floor=floor)

    def zeroed(self) -> None:
        """Add the bytes that the guest zeroed."""
        self.add("guest_zeroed_bytes", "zeroed")

    def clock(self) -> None:
        """Add the CPU time."""
        self.add("task_clock", "task_clock_ms", self.floor.task_clock_ms)
        if self.base.with_warm_ms:
            self.run.note(BOTH_RUNS)
            self.add("cold_and_warm", "with_warm_ms", self.floor.with_warm_ms)

    def check_huge(self) -> None:
        """TestFailure unless the job got huge pages on both sides."""
        wanted = self.run.options.size_mb * MIB // HUGE
        for name, runs in (("base", self.base), ("ours", self.ours)):
            if sorted(runs.huge_pages)[len(runs.huge_pages) // 2] < wanted * 0.95:
                why = f"{runs.huge_pages} of {wanted} in the {name} guest"
                fix = (
                    "give it more memory (--memory), or see /sys/kernel/mm/transparent_hugepage "
                    "in it"
                )
                raise TestFailure("The job did not get huge pages", why, fix)


def allocate(
    run: Run,
    sides: Sequence[Side],
    job: Job,
    *,
    prepare: Callable[[Side, bool], None] | None = None,
    warm: int | None = None,
    around: Callable[[Side], AbstractContextManager[object]] = nullcontext,
) -> Phase:
    """Run the job in the guests by turns, --pairs times after the warm-up.

    ``prepare`` readies a guest for each job, with whether the turn counts; otherwise all free
    memory is reported. ``around`` prepares the guest right before the job and puts it back after
    it. ``warm``: bytes of the host's memory to touch before, by default those of the job.
    """
    options = run.options
    phase = Phase(run, job)
    argv = ["alloc_once", "--size", str(options.size_mb), "--mode", job.mode, "--pages", job.pages]
    before = (lambda: None) if prepare else (lambda: settle_both(sides))
    called = job.name.format_map(job.parameters)
    with step(f"{called}, {job.pages} {job.mode}: {options.pairs} pairs of {options.size_mb} MiB"):
        for side, counts in turns(sides, options.pairs, before=before):
            if prepare:
                prepare(side, counts)
            warm_host(options.size_mb * MIB + SPARE if warm is None else warm)
            with around(side):
                with side.host_cost() as cost:
                    answer = side.json(*argv)
                again = side.json(*argv) if job.twice else None
            if counts:
                runs: Runs = getattr(phase, side.name)
                runs.add(side, answer, cost[0])
                if again:
                    runs.with_warm_ms.append(clock_ms(answer) + clock_ms(again))
    return phase
