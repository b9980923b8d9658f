# SPDX-License-Identifier: GPL-2.0
"""The same memory in huge pages of hugetlb: surplus pages, made on demand, and a persistent pool."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from lab.bench.jobs import BASE_COUNTS, HUGE, allocate
from lab.bench.runner import Run
from lab.bench.session import MIB, PAGE, Side
from lab.core.errors import TestFailure

POOL = "/proc/sys/vm/nr_hugepages"
OVERCOMMIT = "/proc/sys/vm/nr_overcommit_hugepages"
SAVING = 70.0  # of the posted series, for surplus pages
ZEROED_LIMIT = 1.0
NOTE = (
    "Surplus pages are allocated while the job maps its memory, so that is part of the measurement. The persistent "
    "pool is grown before each job and given back after it, unmeasured; on ours growing it must not zero anything."
)


def cleared(side: Side) -> int:
    """Bytes the guest's kernel has zeroed so far; 0 for a kernel without the counter."""
    lines = side.sh("grep ^pgzeroed_cleared /proc/vmstat || true")
    return int(lines[-1].split()[1]) * PAGE if lines else 0


@contextmanager
def surplus(side: Side, pages: int) -> Iterator[None]:
    """An empty pool that may grow by ``pages``."""
    side.sh(f"echo {pages} > {OVERCOMMIT}")
    yield
    side.sh(f"echo 0 > {OVERCOMMIT}")


@contextmanager
def persistent(side: Side, pages: int) -> Iterator[None]:
    """A pool of ``pages``; TestFailure when growing it zeroes memory."""
    before = cleared(side)
    side.sh(f"echo {pages} > {POOL}; test $(cat {POOL}) = {pages}")
    zeroed = cleared(side) - before
    if zeroed > pages * HUGE * ZEROED_LIMIT / 100:
        raise TestFailure(
            "Growing the pool of huge pages zeroes memory",
            f"{zeroed} bytes for {pages} pages in the {side.name} guest",
            "find the place with the page_zeroed tracepoints",
        )
    yield
    side.sh(f"echo 0 > {POOL}; test $(cat {POOL}) = 0")


def measure(run: Run) -> None:
    """Populate from surplus pages and from the pool."""
    run.note(BASE_COUNTS, NOTE)
    pages = run.options.size_mb * MIB // HUGE
    with run.pair() as both:
        for name, prepared, words in (
            ("surplus", surplus, "surplus pages"),
            ("persistent", persistent, "pages of a persistent pool"),
        ):
            around = functools.partial(prepared, pages=pages)
            at = f"hugetlb.{name}.populate"
            phase = allocate(
                run, both, at, "populate", "hugetlb", around=around, kind=", hugetlb", words=words
            )
            phase.clock(SAVING)
            phase.zeroed(ZEROED_LIMIT)
