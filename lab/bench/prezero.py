# SPDX-License-Identifier: GPL-2.0
"""Pre-zeroing: the job with free memory zeroed before, and the whole cost.

Programs that run again, peers, another load, natively. kzeropaged has its default settings.
"""

import itertools
import json
import platform
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench import kzeropaged
from lab.bench.jobs import BASE_COUNTS, MODES, SPARE, allocate
from lab.bench.kzeropaged import DIRTY, OFF, ON, WORDS
from lab.bench.repeat import Values, turns
from lab.bench.runner import MACHINE, USER_MODE, Pair, Run
from lab.bench.session import BALLOON, DELAY, DROP, MIB, Side, Wanted, spec_for, warm_host
from lab.build import programs as guest
from lab.core.errors import TestFailure
from lab.core.progress import step

SHARE = 0.75
AGAIN_MB, AGAIN_AFTER_S = 800, 2  # of a program that runs again
REPORT_DEFAULT_MS = 2000  # a bench has shorter delays
# The descriptor keeps the pages of the device in the page cache.
FILL_CACHE = "exec 3</dev/vda; dd if=/dev/vda of=/dev/null bs=1M count=2200 2>/dev/null"
# The other ways to have zeros, on the base kernel; both are older than this series.
PEERS = {"init_on_alloc": "init_on_alloc=1", "init_on_free": "init_on_free=1"}
PEER_TURNS = 6
PEER_SHARE = 0.5
LOAD = ("build_load", "--steps", "40", "--size", "8")
STORES_MS = 400
STORES_TURNS = 10
UM_MEMORY, UM_MB, UM_TURNS = "512M", 256, 6
UM = "prezero.um"
# To write to each page would take User-Mode Linux ten seconds.
UM_DIRTY = f"alloc_once --size 384 --pages nothp --mode populate > /dev/null; {DROP}"
PEERS_NOTE = (
    "Peers: init_on_alloc=1 zeroes every page when it is allocated; init_on_free=1 when it is "
    "freed, and not again. Their whole CPU time includes that, and ours the work of kzeropaged "
    "before."
)
UM_NOTE = (
    f"As User-Mode Linux {UM_MB} MB of {UM_MEMORY} are filled: it has no huge pages, a page fault "
    "costs it several system calls of the host, and its memory is a file in the host's page "
    "cache. It has no counters either: task-clock is the elapsed time. Compare its figures only "
    "with the other column."
)


def peers(run: Run, sides: list[Side], size_mb: int) -> None:
    """A job that touches all its memory, with each way of zeroing.

    The CPU time of the job, and of everything.
    """
    (ours,) = (side for side in sides if side.name == "ours")
    for pages, word in WORDS.items():
        found = Values()
        argv = ["alloc_once", "--size", str(size_mb), "--mode", "touch_all", "--pages", pages]
        with step(f"{pages}, peers: {PEER_TURNS} turns of {size_mb} MB in {len(sides)} guests"):
            for side, counts in turns(sides, PEER_TURNS):
                if side is ours:
                    side.sh(OFF)
                side.sh(DIRTY)
                before = kzeropaged.zero_all(side)["cpu"] if side is ours else 0.0
                warm_host(64 * MIB)
                with side.host_cost() as host:
                    answer = side.json(*argv)
                if counts:
                    whole = (host[0].user_s + host[0].system_s + before) * 1e3
                    found.note(side.name, job=answer["task_clock_ns"] / 1e6, whole=whole)
        for name, kind in itertools.product(("ours", *PEERS), ("job", "whole")):
            values = found["base", kind], found[name, kind]
            metric = f"prezero.peers.{{pages}}.{{peer}}.{kind}"
            run.add(metric, values, {"pages": word, "peer": name, "size_mb": size_mb})


def load(run: Run, both: Pair) -> None:
    """Short processes that fill their memory, while the thread is on."""
    found = Values()
    with step(f"fork, exec, fault: {run.pairs} pairs of {LOAD[2]} processes"):
        both.ours.sh(ON)
        for side, counts in turns(both, run.pairs):
            with side.host_cost() as host:
                answer = side.json(*LOAD)
            if counts:
                whole = (host[0].user_s + host[0].system_s) * 1e3
                found.note(side.name, wall=answer["wall_ns"] / 1e6, whole=whole)
        both.ours.sh(OFF)
    more = {"processes": LOAD[2], "fill_mb": LOAD[4]}
    run.add("prezero.build_load.wall", found.both("wall"), more)
    run.add("prezero.build_load.whole", found.both("whole"), more)


def again(run: Run) -> None:
    """A program that ends and runs again after two seconds, in guests as an operator has them."""
    options = replace(run.options, size_mb=AGAIN_MB)
    repeated = replace(run, options=options)  # with the same list of observations
    disk = ["-drive", "driver=null-co,size=4G,read-zeroes=on,if=none,id=empty"]
    devices = [BALLOON, "virtio-blk-pci,drive=empty"]
    extra = dict.fromkeys(("base", "ours"), disk)
    with run.kernels(devices=devices, extra=extra) as both:
        for side in both:
            side.sh(f"echo {REPORT_DEFAULT_MS} > {DELAY}")
        both.ours.sh(ON)
        for prefix, first in (("prezero.again", "true"), ("prezero.again.cached", FILL_CACHE)):
            for side in both:
                side.sh(first)
            for pages, word in WORDS.items():
                job = f"alloc_once --size {AGAIN_MB} --mode touch_all --pages {pages} > /dev/null"

                def run_before(side: Side, counts: bool, job: str = job) -> None:
                    del counts
                    side.sh(f"{job}; sleep {AGAIN_AFTER_S}")

                phase = allocate(
                    repeated,
                    both,
                    f"{prefix}.{{pages}}",
                    "touch_all",
                    pages,
                    prepare=run_before,
                    warm=SPARE,
                    parameters={"pages": word, "after": AGAIN_AFTER_S},
                )
                phase.zeroed()
                phase.clock()


def natively(run: Run) -> None:
    """4 KiB pages and the co-runner in guests that are ordinary processes, unless a kernel is a
    file.
    """
    options = run.options
    if "um_base" not in run.images.kernels:
        run.note(
            "Nothing was measured as User-Mode Linux: that needs kernels that are named by variant."
        )
        return
    options = replace(options, size_mb=UM_MB, memory=UM_MEMORY, pairs=min(run.pairs, UM_TURNS))
    # With the same list of observations.
    natively, cost = replace(run, options=options, accel=USER_MODE), Values()
    of_um: dict[str, Any] = {"arch": "um", "devices": [], "accel": "auto"}
    specs = [
        Wanted(name, spec_for(options, run.images.kernels[f"um_{name}"], None, **of_um))
        for name in ("base", "ours")
    ]
    with run.guests(specs) as sides:
        both = Pair(*sides)
        for mode in ("populate", "touch_all"):
            phase = kzeropaged.allocate(natively, both, mode, "nothp", cost, UM_DIRTY, UM)
            phase.clock()
            phase.zeroed()
        kzeropaged.background(natively, cost, UM)
        kzeropaged.corunner(natively, both.ours, UM, UM_DIRTY)
    run.note(UM_NOTE)


def _corunner(program: Path, how: str) -> dict[str, Any]:
    argv = [str(program), "--ms", str(STORES_MS), *(["--clear", how] if how else [])]
    if (done := subprocess.run(argv, capture_output=True, text=True, check=False)).returncode:
        raise TestFailure(
            "The co-runner fails on this machine", done.stderr.strip(), shlex.join(argv)
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def stores(run: Run) -> None:
    """On this machine itself: the non-temporal stores of kzeropaged against the usual ones."""
    if platform.machine() != "x86_64":
        run.note("Stores were not compared: this architecture has one kind.")
        return
    program, found = guest.build_programs()["corunner"], Values()
    with step(f"stores: {STORES_TURNS} turns of 3 runs of {STORES_MS} ms, natively"):
        for how, counts in turns(("", "stos", "movnti"), STORES_TURNS):
            answer = _corunner(program, how)
            if counts:
                found.note(how, steps=answer["steps"] / answer["wall_ns"] * 1e9)
                if how:
                    found.note(how, rate=answer["cleared_bytes"] / answer["clear_ns"] * 1e9)
    for store in ("stos", "movnti"):
        values = found["", "steps"], found[store, "steps"]
        run.add("prezero.native.corunner.{store}", values, {"store": store}, accelerator=MACHINE)
    rates = found["stos", "rate"], found["movnti", "rate"]
    run.add("prezero.native.clear_rate", rates, accelerator=MACHINE)


def measure(run: Run) -> None:
    run.options = replace(run.options, size_mb=int(run.options.memory_mb * SHARE) // 2 * 2)
    run.note(BASE_COUNTS, PEERS_NOTE)
    # Without a balloon: the host would be a second source of zeros.
    with run.kernels(devices=[]) as both:
        cost = Values()
        for pages, mode in itertools.product(WORDS, MODES):
            phase = kzeropaged.allocate(run, both, mode, pages, cost)
            if pages == "thp":
                phase.check_huge()
            phase.clock()
            phase.zeroed()
        kzeropaged.background(run, cost)
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
        load(run, Pair(sides[0], sides[1]))
    again(run)
    if not run.native:
        natively(run)
        stores(run)
