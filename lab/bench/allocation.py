# SPDX-License-Identifier: GPL-2.0
"""The benches of the allocation job: thp, order0, hugetlb, deflate and zerobytes."""

import functools
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.bench import host, hotpath
from lab.bench.jobs import BASE_COUNTS, HUGE, MODES, TOUCHED, allocate
from lab.bench.plugin import stored
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import Values, turns
from lab.bench.runner import Pair, Run
from lab.bench.session import DROP, MIB, PAGE, Side, settle_both
from lab.boot import balloon
from lab.core.errors import TestFailure
from lab.core.progress import step

ZEROED_LIMIT = 1.0  # percent
CLEARED = "pgzeroed_cleared"


def thp(run: Run) -> None:
    run.note(BASE_COUNTS, TOUCHED)
    with run.kernels("base", "ours", "floor") as sides:
        for mode in MODES:
            of: dict[str, object] = {"mode": mode}
            phase = allocate(run, sides, "thp.{mode}", mode, "thp", parameters=of, twice=run.native)
            phase.check_huge()
            phase.zeroed()
            phase.clock()
            phase.host()
        small_pages(run, sides, ("populate",))
        host.figures(run, Pair(*sides[:2]), least=run.pairs)
    if not run.native:
        hotpath.idle(run, boots=1)


def small_pages(run: Run, sides: Sequence[Side], modes: Iterable[str] = MODES) -> None:
    """The job with huge pages off."""
    for mode in modes:
        of: dict[str, object] = {"mode": mode}
        phase = allocate(
            run, sides, "order0.{mode}", mode, "nothp", parameters=of, twice=run.native
        )
        phase.add("skipped_percent", "skipped_percent")
        phase.clock()
        phase.zeroed()


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
            phase = allocate(
                run,
                sides,
                "hugetlb.{pool}.populate",
                "populate",
                "hugetlb",
                around=functools.partial(prepared, pages=pages),
                parameters={"pool": pool},
            )
            phase.clock()
            phase.zeroed()


LEFT_MB = 448  # memory of the guest while the balloon is full
# Kept for the kernel; a file takes the rest of the memory that never was in the balloon
SPARE_MB = 80
# The spared memory is in smaller blocks than the balloon gives back, so it would be allocated
# first.
REST, FRAGMENTS = "/tmp/rest", "/tmp/fragments"
KEEP_FRAGMENTS = f"dd if=/dev/zero of={FRAGMENTS} bs=1M count={SPARE_MB} 2> /dev/null"
KEEP_REST = (
    f"dd if=/dev/zero of={REST} bs=1M count=$(($(awk '/^MemFree/ {{ print $2 }}' /proc/meminfo) / "
    f"1024 - {SPARE_MB})) 2> /dev/null"
)
REST_IN_USE = (
    f"While the balloon is full, a file takes all free memory except for {SPARE_MB} MB, so that "
    f"the job uses pages that were in the balloon. A second file takes {SPARE_MB} MB afterwards, "
    "since the smallest free blocks go first."
)


def in_and_out(side: Side, counts: bool = True) -> None:
    """Make free memory dirty, put it into the balloon, and take it out again."""
    side.sh(f"rm -f {REST} {FRAGMENTS}; fillfree --share 85")
    side.sh(DROP)
    balloon.resize(side.guest, LEFT_MB * MIB)
    side.sh(KEEP_REST)
    balloon.fill(side.guest, 0)
    side.sh(KEEP_FRAGMENTS)


def deflate(run: Run) -> None:
    run.note(BASE_COUNTS, REST_IN_USE)
    # Without reporting: nothing else makes memory known to be zero.
    # The balloon takes 4 KiB, which the device cannot discard of a huge page.
    with run.kernels(devices=[balloon.device(device_init_on_inflate="on")], pool=False) as both:
        for pages in ("thp", "nothp"):
            phase = allocate(
                run,
                both,
                "deflate.{pages}",
                "populate",
                pages,
                prepare=in_and_out,
                parameters={"pages": pages},
            )
            if pages == "thp":
                phase.check_huge()
            phase.zeroed()
            phase.clock()
            phase.host()


STOS_NOTE = (
    "A TCG plugin outside the guest counts every byte the guest's kernel stores with `rep stos`, "
    "the instruction that clears pages on this CPU model. The kernel fills a little other memory "
    "that way as well."
)


def _job(side: Side, size_mb: int, mode: str, file: Path) -> float:
    before, _ = stored(file)
    side.json("alloc_once", "--size", str(size_mb), "--mode", mode, "--pages", "thp")
    return float(stored(file)[0] - before)


def zerobytes(run: Run) -> None:
    run.note(STOS_NOTE, REPEATED)
    plugin, found, size = run.images.plugins["zerobytes"], Values(), run.options.size_mb
    with tempfile.TemporaryDirectory(prefix="zerobytes-") as folder:
        files = {name: Path(folder) / name for name in ("base", "ours")}
        extra = {name: ["-plugin", f"{plugin},out={file}"] for name, file in files.items()}
        what = f"bytes stored by rep stos: up to {run.pairs} pairs of each mode"
        with run.kernels(extra=extra) as both, step(what):
            before = functools.partial(settle_both, both)
            for mode in ("populate", "touch_all"):
                for side, _ in turns(both, run.pairs, found.both(mode), warm_ups=0, before=before):
                    found[side.name, mode].append(_job(side, size, mode, files[side.name]))
    for mode in ("populate", "touch_all"):
        run.add(
            "zerobytes.{mode}.rep_stos_bytes", found.both(mode), {"mode": mode, "size_mb": size}
        )
