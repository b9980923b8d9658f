# SPDX-License-Identifier: GPL-2.0
"""The same memory in huge pages of hugetlb: surplus, made when they are needed, and a persistent pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from lab.bench import BenchOptions
from lab.bench.jobs import BASE_COUNTS, HUGE, allocate, clock_metric, elapsed, zeroed_metric
from lab.bench.session import MIB, PAGE, Pair, Side, built, host_facts, pair, reproduce
from lab.core.errors import TestFailure
from lab.report.results import Metric, Result

POOL = "/proc/sys/vm/nr_hugepages"
OVERCOMMIT = "/proc/sys/vm/nr_overcommit_hugepages"
# The seed's own figure for surplus pages, which is all that it could help.
SAVING = 70.0
ZEROED_LIMIT = 1.0
NOTE = (
    "Surplus pages are allocated while the job maps its memory, so that is part of what is measured. The persistent "
    "pool is grown before each job and given back after it, unmeasured; growing it has to zero nothing on ours."
)


def cleared(side: Side) -> int:
    """Bytes the guest's kernel has zeroed so far; 0 where it does not count them."""
    lines = side.sh("grep ^pgzeroed_cleared /proc/vmstat || true")
    return int(lines[-1].split()[1]) * PAGE if lines else 0


def surplus(options: BenchOptions) -> Callable[[Side], AbstractContextManager[None]]:
    """The pool is empty and may grow by what the job needs."""

    @contextmanager
    def around(side: Side) -> Iterator[None]:
        side.sh(f"echo {options.size_mb * MIB // HUGE} > {OVERCOMMIT}")
        yield
        side.sh(f"echo 0 > {OVERCOMMIT}")

    return around


def persistent(options: BenchOptions) -> Callable[[Side], AbstractContextManager[None]]:
    """The pool has what the job needs. Growing it must not be where the zeroing went."""
    pages = options.size_mb * MIB // HUGE

    @contextmanager
    def around(side: Side) -> Iterator[None]:
        before = cleared(side)
        side.sh(f"echo {pages} > {POOL}; test $(cat {POOL}) = {pages}")
        zeroed = cleared(side) - before
        if zeroed > pages * HUGE * ZEROED_LIMIT / 100:
            raise TestFailure(
                "Growing the pool of huge pages zeroes memory",
                f"{zeroed} bytes for {pages} pages in the {side.name} guest",
                "see where with the page_zeroed tracepoints; nobody wants zeros yet at that time",
            )
        yield
        side.sh(f"echo 0 > {POOL}; test $(cat {POOL}) = 0")

    return around


def measure(both: Pair, options: BenchOptions) -> tuple[list[Metric], list[str]]:
    """Populate on a running pair, from surplus pages and from the pool."""
    metrics: list[Metric] = []
    for name, prepared in (("surplus", surplus(options)), ("persistent", persistent(options))):
        phase = allocate(both, options, "populate", "hugetlb", prepared)
        prefix = f"hugetlb.{name}.populate"
        metrics.append(clock_metric(f"{prefix}.task_clock", "populate", phase, SAVING))
        metrics.append(
            zeroed_metric(f"{prefix}.guest_zeroed_bytes", "populate", phase, options, ZEROED_LIMIT)
        )
    return metrics, [NOTE]


def run(options: BenchOptions) -> Result:
    """Measure hugetlb; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images) as both:
        metrics, notes = measure(both, options)
        return Result(
            name="hugetlb",
            accelerator=both.accel,
            versions=images.versions(),
            reproduce=reproduce("hugetlb", options, both.accel),
            metrics=metrics,
            job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
            host=host_facts(),
            notes=[BASE_COUNTS, *notes],
            seconds=elapsed(began),
        )
