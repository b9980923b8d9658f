# SPDX-License-Identifier: GPL-2.0
"""The allocation job in guests, and its figures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from lab.bench.repeat import Values, measured
from lab.bench.runner import Run
from lab.bench.session import MIB, PAGE, Side, settle_both, warm_host
from lab.core.errors import TestFailure

HUGE = 2 * MIB
SPARE = 64 * MIB  # of the host's memory, beside the job's
MODES = ("populate", "touch_line", "touch_all")
# The last names of the metrics of a job.
CLOCK, BOTH_CLOCKS = "task_clock", "cold_and_warm"
ZEROED, SKIPPED = "guest_zeroed_bytes", "skipped_percent"
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


def values(answer: dict[str, Any], kernel: str) -> dict[str, float]:
    """The values of a run of alloc_once, by the last name of their metric."""
    skipped = answer["vmstat"]["pgzeroed_skip"] or 0
    return {
        CLOCK: clock_ms(answer),
        ZEROED: zeroed_bytes(answer, kernel),
        SKIPPED: min(100.0, skipped * PAGE / answer["bytes"] * 100),
        "huge_pages": huge_pages(answer),
    }


@dataclass(frozen=True)
class Job:
    """A run of alloc_once; ``name`` begins the names of its metrics, which have ``parameters``.

    ``figures``: the last names of these metrics. ``twice``: also the time of this job and of
    another one at once after it.
    """

    name: str
    mode: str
    pages: str
    parameters: Mapping[str, object] = field(default_factory=dict)
    figures: Sequence[str] = (CLOCK, ZEROED)
    twice: bool = False


def check_huge(run: Run, found: Values) -> None:
    """TestFailure unless a job got huge pages on each side, with the floor if that was measured."""
    wanted = run.options.size_mb * MIB // HUGE
    floor = ["floor"] if ("floor", "huge_pages") in found else []
    for name in ["base", "ours", *floor]:
        got = found[name, "huge_pages"]
        if sorted(got)[len(got) // 2] < wanted * 0.95:
            why = f"{got} of {wanted} in the {name} guest"
            fix = "give it more memory (--memory), or see /sys/kernel/mm/transparent_hugepage in it"
            raise TestFailure("The job did not get huge pages", why, fix)


def allocate(
    run: Run,
    sides: Sequence[Side],
    job: Job,
    *,
    prepare: Callable[[Side], dict[str, float]] | None = None,
    warm: int | None = None,
    around: Callable[[Side], AbstractContextManager[object]] = nullcontext,
) -> Values:
    """Run the job in the guests by turns, --pairs times after the warm-up, and add its metrics.

    ``prepare`` readies a guest for each job, and has values of its own; otherwise all free memory
    is reported. ``around`` prepares the guest right before the job and puts it back after it.
    ``warm``: bytes of the host's memory to touch before, by default those of the job.
    """
    size_mb = run.options.size_mb
    argv = ["alloc_once", "--size", str(size_mb), "--mode", job.mode, "--pages", job.pages]

    def once(side: Side) -> dict[str, float]:
        found = prepare(side) if prepare else {}
        warm_host(size_mb * MIB + SPARE if warm is None else warm)
        with around(side):
            answer = side.json(*argv)
            again = side.json(*argv) if job.twice else None
        if again:
            found[BOTH_CLOCKS] = clock_ms(answer) + clock_ms(again)
        return found | values(answer, side.kernel)

    called = job.name.format_map(job.parameters)
    words = f"{called}, {job.pages} {job.mode}, {size_mb} MiB"
    before = (lambda: None) if prepare else (lambda: settle_both(sides))
    found = measured(words, sides, once, run.pairs, before=before)
    of = {"size_mb": size_mb, **job.parameters}
    for last in job.figures:
        floor = found["floor", CLOCK] if last == CLOCK else []
        run.add(f"{job.name}.{last}", found.both(last), of, floor=floor)
        if last == CLOCK and job.twice:
            run.note(BOTH_RUNS)
            floor = found["floor", BOTH_CLOCKS]
            run.add(f"{job.name}.{BOTH_CLOCKS}", found.both(BOTH_CLOCKS), of, floor=floor)
    return found
