# SPDX-License-Identifier: GPL-2.0
"""Pre-zeroing: the job with free memory zeroed before, and the whole cost.

Programs that run again, peers, other work. kzeropaged has its default settings.
"""

import functools
import itertools
from dataclasses import dataclass, replace

from lab.bench import kzeropaged
from lab.bench.jobs import BASE_COUNTS, CLOCK, MODES, SPARE, ZEROED, Job, allocate, check_huge
from lab.bench.kzeropaged import ON, PREZEROED, WORDS
from lab.bench.repeat import measured
from lab.bench.runner import Run
from lab.bench.session import (
    BALLOON,
    MIB,
    PAGE,
    USUAL,
    Side,
    Wanted,
    cpu_ns,
    resident,
    warm_host,
)

SHARE = 0.75
AGAIN_MB, AGAIN_AFTER_S = 800, 2  # of a program that runs again
# The descriptor keeps the pages of the device in the page cache.
FILL_CACHE = "exec 3</dev/vda; dd if=/dev/vda of=/dev/null bs=1M count=2200 2>/dev/null"
# The other ways to have zeros, on the base kernel; both are older than this series.
PEERS = {"init_on_alloc": "init_on_alloc=1", "init_on_free": "init_on_free=1"}
PEER_TURNS = 6
PEER_SHARE = 0.5
LEAST, WARM_MB = 6, 300
PEERS_NOTE = (
    "Peers: init_on_alloc=1 zeroes every page when it is allocated; init_on_free=1 when it is "
    "freed, and not again. The whole CPU time begins when memory has been used and freed, so ours "
    "has the work of kzeropaged. All guests are idle for 2 s before the job."
)
LOADS_NOTE = (
    "Loads: the CPU time is that of QEMU, with rests, so it has the thread's. Before a turn the "
    "load runs once, and is not measured."
)


@dataclass(frozen=True)
class Load:
    """What a guest does ``times`` times, with a rest after each."""

    words: str
    command: str
    times: int
    rest_s: float

    def script(self, times: int) -> str:
        """Shell for the guest, which fails if a command does."""
        return f"(set -e; for i in $(seq {times}); do {self.command}; sleep {self.rest_s}; done)"


PROGRAM = "alloc_once --size {} --mode touch_all --pages thp > /dev/null"
# The last ones make the thread lose zeros, after which it zeroes less.
LOADS = {
    "again_50ms": Load("a program of 300 MiB, every 50 ms", PROGRAM.format(300), 20, 0.05),
    "again_1500ms": Load("a program of 300 MiB, every 1.5 s", PROGRAM.format(300), 4, 1.5),
    "again_5s": Load("a program of 300 MiB, every 5 s", PROGRAM.format(300), 2, 5.0),
    "trickle": Load("a program of 4 MiB, every 0.1 s", PROGRAM.format(4), 40, 0.1),
    "build": Load(
        "40 programs of 8 MiB one after the other, every 1.5 s",
        f"for j in $(seq 40); do {PROGRAM.format(8)}; done",
        2,
        1.5,
    ),
    "files": Load(
        "a file of 200 MiB in tmpfs written and removed, every 1.5 s",
        "dd if=/dev/zero of=/tmp/file bs=1M count=200 2> /dev/null; rm /tmp/file",
        4,
        1.5,
    ),
}


def peers(run: Run, sides: list[Side], size_mb: int) -> None:
    """A job that touches all its memory, with each way of zeroing.

    The CPU time of the job, and of everything.
    """

    def once(side: Side, pages: str) -> dict[str, float]:
        if side.name == "ours":
            side.sh(ON)
        kzeropaged.make_dirty(side)
        began = cpu_ns(side.guest.pid)
        kzeropaged.wait_until_idle(side)
        warm_host(64 * MIB)
        argv = ["alloc_once", "--size", str(size_mb), "--mode", "touch_all", "--pages", pages]
        answer = side.json(*argv)
        whole = (cpu_ns(side.guest.pid) - began) / 1e6
        return {"job": answer["task_clock_ns"] / 1e6, "whole": whole}

    for pages, word in WORDS.items():
        job = functools.partial(once, pages=pages)
        found = measured(f"{pages}, peers, {size_mb} MiB", sides, job, PEER_TURNS)
        for name, kind in itertools.product(("ours", *PEERS), ("job", "whole")):
            metric = f"prezero.peers.{{pages}}.{{peer}}.{kind}"
            of = {"pages": word, "peer": name, "size_mb": size_mb}
            run.add(metric, found.both(kind, other=name), of)


def once(side: Side, load: Load) -> dict[str, float]:
    """Run the load; what one of its times cost, and QEMU's memory afterwards."""
    warm_host(WARM_MB * MIB)
    side.sh(load.script(1))
    before, cpu = side.vmstat(), cpu_ns(side.guest.pid)
    side.sh(load.script(load.times))
    spent, after = cpu_ns(side.guest.pid) - cpu, side.vmstat()
    zeroed = (after.get(PREZEROED, 0) - before.get(PREZEROED, 0)) * PAGE
    figures = {"cpu": spent / 1e6 / load.times, "prezeroed": zeroed / load.times}
    return figures | {"resident": float(resident(side.guest.pid))}


def loads(run: Run) -> None:
    """What loads cost with the thread on, in guests without and with reports."""
    run.note(LOADS_NOTE)
    for source, devices in {"alone": [], "reports": [BALLOON]}.items():
        with run.kernels(devices=devices) as both:
            for side in both:
                side.sh(USUAL)
            both.ours.sh(ON)
            for name, load in LOADS.items():
                found = measured(
                    f"{load.words}, {source}",
                    both,
                    functools.partial(once, load=load),
                    run.pairs,
                    known=[("base", "cpu"), ("ours", "cpu")],
                    least=LEAST,
                )
                of = {"load": name, "source": source, "words": load.words}
                for kind in ("cpu", "prezeroed", "resident"):
                    run.add(f"prezero.load.{{load}}.{{source}}.{kind}", found.both(kind), of)


def again(run: Run) -> None:
    """A program that ends and runs again after two seconds, in guests as an operator has them."""
    options = replace(run.options, size_mb=AGAIN_MB)
    repeated = replace(run, options=options)  # with the same list of observations
    disk = ["-drive", "driver=null-co,size=4G,read-zeroes=on,if=none,id=empty"]
    devices = [BALLOON, "virtio-blk-pci,drive=empty"]
    with run.kernels(devices=devices, extra_qemu=disk) as both:
        for side in both:
            side.sh(USUAL)
        both.ours.sh(ON)
        for prefix, first in (("prezero.again", "true"), ("prezero.again.cached", FILL_CACHE)):
            for side in both:
                side.sh(first)
            for pages, word in WORDS.items():
                job = f"alloc_once --size {AGAIN_MB} --mode touch_all --pages {pages} > /dev/null"

                def run_before(side: Side, job: str = job) -> dict[str, float]:
                    side.sh(f"{job}; sleep {AGAIN_AFTER_S}")
                    return {}

                of = {"pages": word, "after": AGAIN_AFTER_S}
                once = Job(f"{prefix}.{{pages}}", "touch_all", pages, of, (ZEROED, CLOCK))
                allocate(repeated, both, once, prepare=run_before, warm=SPARE)


def measure(run: Run) -> None:
    run.options = replace(run.options, size_mb=int(run.options.memory_mb * SHARE) // 2 * 2)
    run.note(BASE_COUNTS, PEERS_NOTE)
    # Without a balloon: the host would be a second source of zeros.
    with run.kernels(devices=[]) as both:
        found = []
        for pages, mode in itertools.product(WORDS, MODES):
            found.append(kzeropaged.allocate(run, both, mode, pages))
            if pages == "thp":
                check_huge(run, found[-1])
        kzeropaged.background(run, found)
        kzeropaged.corunner(run, both.ours)
        kzeropaged.faults(run, both.ours)
    rows = {"base": "", "ours": "", **PEERS}
    kernels = {name: "ours" if name == "ours" else "base" for name in rows}
    specs = [
        Wanted(name, run.spec(kernels[name], devices=[], append=append))
        for name, append in rows.items()
    ]
    with run.guests(specs) as sides:
        peers(run, sides, int(run.options.memory_mb * PEER_SHARE) // 2 * 2)
    again(run)
    loads(run)
