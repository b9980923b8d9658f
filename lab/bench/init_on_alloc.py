# SPDX-License-Identifier: GPL-2.0
"""With init_on_alloc=1, as distributions boot: what small allocations zero, and what it costs."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

from lab.bench.jobs import check_zeros
from lab.bench.kzeropaged import ON
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import Figures, measured
from lab.bench.runner import DEBIANS, Run
from lab.bench.session import BALLOON, MIB, PAGE, USUAL, Side, Wanted, cpu_ns, warm_host

EACH_PAGE = (
    "The base kernel has no counter of zeroed pages; its bytes are the pages that were allocated. "
    "On ours they are pgzeroed_cleared."
)
REST_S = 2
READ_MB, FILES, FILE_KB, PROCESSES = 300, 1000, 16, 500
DISK = ("-drive", "driver=null-co,size=1G,read-zeroes=on,if=none,id=empty")
ARCHIVE = (
    f"mkdir -p /tmp/in /tmp/out; for i in $(seq {FILES}); do head -c {FILE_KB << 10} /dev/zero > "
    "/tmp/in/$i; done; tar cf /tmp/archive.tar -C /tmp/in . && rm -r /tmp/in"
)


@dataclass(frozen=True)
class Job:
    """Work in the guest: ``command`` is measured, ``clean`` frees what it has allocated."""

    words: str
    command: str
    clean: str = "true"


JOBS = {
    "read": Job(
        f"{READ_MB} MiB of a disk read into the page cache",
        f"exec 3</dev/vda; dd if=/dev/vda of=/dev/null bs=1M count={READ_MB} 2>/dev/null",
        "exec 3<&-; echo 3 > /proc/sys/vm/drop_caches",
    ),
    "unpack": Job(
        f"an archive of {FILES} files of {FILE_KB} KB unpacked to a tmpfs",
        "tar xf /tmp/archive.tar -C /tmp/out",
        "rm -r /tmp/out; mkdir /tmp/out",
    ),
    "processes": Job(
        f"{PROCESSES} short processes one after the other",
        f"for i in $(seq {PROCESSES}); do /bin/true; done",
    ),
}
OURS = ("ours", "kzeropaged")
RUNS = ("first", "again")  # after all free memory was reported, and REST_S s later


def zeroed(side: Side, before: dict[str, int], after: dict[str, int]) -> float:
    """Bytes that the kernel zeroed; the base kernel has no counter, and zeroes each page."""
    change = {name: value - before[name] for name, value in after.items()}
    check_zeros(change.get("pgzeroed_bad"), f"the {side.name} guest")
    if "pgzeroed_cleared" in change:
        return float(change["pgzeroed_cleared"] * PAGE)
    pages = sum(pages for name, pages in change.items() if name.startswith("pgalloc_"))
    return float(pages * PAGE)


def once(side: Side, job: Job, began: int) -> dict[str, float]:
    """Run a job; what it cost since QEMU had used ``began`` ns of CPU time."""
    warm_host(READ_MB * MIB)
    before = side.vmstat()
    side.sh(job.command)
    spent = (cpu_ns(side.guest.pid) - began) / 1e6
    return {"zeroed": zeroed(side, before, side.vmstat()), "cpu": spent}


def turn(side: Side, job: Job) -> Figures:
    """Run a job after all free memory was reported, and again."""
    side.settle()
    side.sh(USUAL)
    found = {}
    began = cpu_ns(side.guest.pid)
    for when in RUNS:
        found[when] = once(side, job, began)
        began = cpu_ns(side.guest.pid)
        side.sh(f"{job.clean}; sleep {REST_S}")
    return found


def measure(run: Run) -> None:
    run.job = {"memory": run.options.memory, "cpus": 1, "pairs": run.pairs, "append": DEBIANS}
    run.note(
        f"All guests boot with {DEBIANS}, Debian's and Ubuntu's default: each page is zeroed when "
        "it is allocated, whatever for.",
        EACH_PAGE,
        f"CPU time of the second run begins with the rest of {REST_S} s before it, so it has the "
        "work of kzeropaged.",
        REPEATED,
    )
    more: dict[str, Any] = {"append": DEBIANS, "devices": [BALLOON, "virtio-blk-pci,drive=empty"]}
    more["extra_qemu"] = list(DISK)
    specs = [
        Wanted(name, run.spec(kernel, **more), kernel)
        for name, kernel in (("base", "base"), *((name, "ours") for name in OURS))
    ]
    with run.guests(specs) as sides:
        for side in sides:
            side.sh(ARCHIVE)
        sides[-1].sh(ON)
        for name, job in JOBS.items():
            known = itertools.product(("base", *OURS), RUNS, ("zeroed",))
            by_job = functools.partial(turn, job=job)
            found = measured(job.words, sides, by_job, run.pairs, known=known)
            for when, kernel, kind in itertools.product(RUNS, OURS, ("zeroed", "cpu")):
                metric = f"init_on_alloc.{{job}}.{{when}}.{{with}}.{kind}"
                of = {"job": name, "when": when, "with": kernel}
                run.add(metric, found.both(when, kind, other=kernel), of)
