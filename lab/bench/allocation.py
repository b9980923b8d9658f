# SPDX-License-Identifier: GPL-2.0
"""The benches of the allocation job: thp, order0 and hugetlb."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from lab.bench.jobs import (
    BASE_COUNTS,
    CLOCK,
    HUGE,
    MODES,
    SKIPPED,
    TOUCHED,
    ZEROED,
    Job,
    allocate,
    check_huge,
)
from lab.bench.runner import Run
from lab.bench.session import MIB, PAGE, Side
from lab.core.errors import TestFailure

ZEROED_LIMIT = 1.0  # percent
CLEARED = "pgzeroed_cleared"


def thp(run: Run) -> None:
    run.note(BASE_COUNTS, TOUCHED)
    with run.kernels("base", "ours", "floor") as sides:
        for mode in MODES:
            job = Job("thp.{mode}", mode, "thp", {"mode": mode}, (ZEROED, CLOCK), run.native)
            check_huge(run, allocate(run, sides, job))
        small_pages(run, sides, ("populate",))


def small_pages(run: Run, sides: Sequence[Side], modes: Iterable[str] = MODES) -> None:
    """The job with huge pages off."""
    for mode in modes:
        figures = SKIPPED, CLOCK, ZEROED
        job = Job("order0.{mode}", mode, "nothp", {"mode": mode}, figures, run.native)
        allocate(run, sides, job)


def order0(run: Run) -> None:
    run.note(BASE_COUNTS)
    with run.kernels("base", "ours", "floor") as sides:
        small_pages(run, sides)


POOL = "/proc/sys/vm/nr_hugepages"
OVERCOMMIT = "/proc/sys/vm/nr_overcommit_hugepages"
POOL_NOTE = (
    "Surplus pages are allocated while the job maps its memory, so that is part of the "
    "measurement. The persistent pool is grown before each job and given back after it, "
    "unmeasured; on ours growing it must not zero anything."
)


@contextmanager
def surplus(side: Side, pages: int) -> Iterator[None]:
    """An empty pool that may grow by ``pages``."""
    side.sh(f"echo {pages} > {OVERCOMMIT}")
    yield
    side.sh(f"echo 0 > {OVERCOMMIT}")


@contextmanager
def persistent(side: Side, pages: int) -> Iterator[None]:
    """A pool of ``pages``; TestFailure when growing it zeroes memory."""
    before = side.vmstat().get(CLEARED, 0)
    side.sh(f"echo {pages} > {POOL}; test $(cat {POOL}) = {pages}")
    if (
        zeroed := (side.vmstat().get(CLEARED, 0) - before) * PAGE
    ) > pages * HUGE * ZEROED_LIMIT / 100:
        why = f"{zeroed} bytes for {pages} pages in the {side.name} guest"
        fix = "find the place with the page_zeroed tracepoints"
        raise TestFailure("Growing the pool of huge pages zeroes memory", why, fix)
    yield
    side.sh(f"echo 0 > {POOL}; test $(cat {POOL}) = 0")


def hugetlb(run: Run) -> None:
    run.note(BASE_COUNTS, POOL_NOTE)
    pages = run.options.size_mb * MIB // HUGE
    with run.kernels("base", "ours", "floor") as sides:
        for pool, prepared in (("surplus", surplus), ("persistent", persistent)):
            job = Job("hugetlb.{pool}.populate", "populate", "hugetlb", {"pool": pool})
            around = functools.partial(prepared, pages=pages)
            allocate(run, sides, job, around=around)
