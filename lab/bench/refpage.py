# SPDX-License-Identifier: GPL-2.0
"""Memory that starts with a pattern: memset() against refpage_create() on one kernel."""

import itertools
from typing import Any

from lab.bench.repeat import Values, turns
from lab.bench.runner import COUNTING, Run
from lab.bench.session import Side, Wanted
from lab.core.errors import TestFailure
from lab.core.progress import step

MAPPED = 4096000
TOUCHED = {"page": 4096, "half": 2048000, "all": 4096000}  # the part of the mapping that is used
# Mappings in a run of about a second. Each figure is per mapping.
REFPAGE = {"page": 400, "half": 30, "all": 20}
LOOPS = {name: {"memset": 20, "refpage": loops} for name, loops in REFPAGE.items()}
METHODS = tuple(LOOPS["page"])
NOTES = (
    "Both columns are the same kernel, ours: 'base' is memory initialised by memset(), "
    "'knownzero' a private mapping from refpage_create(). Each figure is of one child process "
    f"that repeatedly maps {MAPPED} bytes, writes one byte in each page of the touched part, and "
    "unmaps it; time is wall time from its exec to its exit, divided by the number of mappings.",
    "Huge pages are off for the child: the posted series was measured without them.",
    "Instructions are counted by the guest's clock under -icount shift=0, in a boot of their own. "
    "With the accelerator tcg, the emulation of a fault takes most of the time, and both methods "
    "have the same faults: the saving is smaller than on hardware, where memory takes the time.",
)
# Instructions are those of the mappings by which these numbers differ.
FEW, MANY = 2, 6
COUNTS = 3
THP = "/sys/kernel/mm/transparent_hugepage"
FOLIOS = ("", "folio64.")  # with 4 KiB pages, and with folios of 64 KiB


def _method(side: Side, method: str, touch: int, loops: int, huge: bool = False) -> dict[str, Any]:
    argv = ["refpage_bench", "--method", method, "--map", str(MAPPED)]
    argv += ["--touch", str(touch), "--loops", str(loops), *([] if huge else ["--nothp"])]
    return side.json(*argv)


def methods(run: Run, side: Side) -> None:
    for name, touch in TOUCHED.items():
        loops, found = LOOPS[name], Values()
        with step(
            f"{touch} of {MAPPED} bytes touched: {run.pairs} repetitions of {len(METHODS)} methods"
        ):
            for method, _ in turns(METHODS, run.pairs, warm_ups=0):
                answer = _method(side, method, touch, loops[method])
                time = answer["wall_ns"] / loops[method] / 1e6
                found.note(method, time=time, max_rss=answer["max_rss_kb"] * 1024.0)
        for kind in ("time", "max_rss"):
            values = found["memset", kind], found["refpage", kind]
            run.add(f"refpage.{{touched}}.{kind}", values, {"touched": name})


def instructions(run: Run, side: Side) -> None:
    """Instructions of one mapping; ``side`` is a guest whose clock counts them."""

    def count(method: str, touch: int, large: bool) -> float:
        few, many = (_method(side, method, touch, loops, large)["wall_ns"] for loops in (FEW, MANY))
        return float(many - few) / (MANY - FEW)

    side.sh(
        f"echo never > {THP}/hugepages-2048kB/enabled; echo always > {THP}/hugepages-64kB/enabled"
    )
    with step(f"instructions, counted {COUNTS} times"):
        for folio, (name, touch) in itertools.product(FOLIOS, TOUCHED.items()):
            both = [
                [count(method, touch, bool(folio)) for _ in range(COUNTS)] for method in METHODS
            ]
            metric, values = f"refpage.{folio}{{touched}}.instructions", (both[0], both[1])
            run.add(metric, values, {"touched": name}, accelerator=COUNTING)


def measure(run: Run) -> None:
    run.job = {
        "mapped": MAPPED,
        "loops": LOOPS,
        "memory": run.options.memory,
        "cpus": 1,
        "pairs": run.pairs,
    }
    run.note(*NOTES)
    with run.guests([Wanted("ours", run.spec("ours", devices=[]))]) as (side,):
        if side.sh("refpage_bench --method refpage --loops 1 >/dev/null; echo $?")[-1] != "0":
            why = f"refpage_bench failed in the guest (kernel {run.images.ours})"
            fix = "build it with CONFIG_REFPAGE (`kz build linux --variant knownzero`)"
            raise TestFailure("The kernel has no refpage_create()", why, fix)
        for method in METHODS:
            # A method without the pattern has no speed.
            side.sh(
                f"refpage_bench --method {method} --map {MAPPED} --touch 1024000 --loops 1 --check"
            )
        methods(run, side)
    if run.native:
        return
    counting = run.spec("ours", devices=[], accel="tcg", extra_qemu=["-icount", "shift=0"])
    with run.guests([Wanted("ours", counting)]) as (side,):
        instructions(run, side)
