# SPDX-License-Identifier: GPL-2.0
"""Memory that starts with a pattern: memset() against refpage_create(), and its peers, on one kernel."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed
from lab.bench.session import Side, built, host_facts, reproduce, spec_for
from lab.boot.guest import running
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.evidence import SNAPSHOT
from lab.report.results import Metric, Result, Target

MAPPED = 4096000
# What is used of the mapping, and the least that the posted series saved of time and of peak RSS.
TOUCHED: dict[str, tuple[int, float, float]] = {
    "page": (4096, 98.8, 49.0),
    "half": (2048000, 61.8, 31.0),
    "all": (4096000, 15.1, 0.0),
}
# How often it is mapped: for about a second each, whatever one mapping takes. Each figure is per mapping.
LOOPS: dict[str, dict[str, int]] = {
    "page": {"memset": 20, "refpage": 400, "memset_huge": 20, "memfd": 100, "uffd": 50},
    "half": {"memset": 20, "refpage": 30, "memset_huge": 20, "memfd": 20, "uffd": 3},
    "all": {"memset": 20, "refpage": 20, "memset_huge": 20, "memfd": 10, "uffd": 1},
}
METHODS = tuple(LOOPS["page"])
WORDS = {
    "memset": "anonymous memory in 4 KiB pages, written with memset()",
    "memset_huge": "anonymous memory with huge pages where they fit, written with memset()",
    "memfd": "a private mapping of a memfd that holds the pattern",
    "uffd": "anonymous memory, filled page by page by a userfaultfd thread",
}
NOTES = (
    "Both columns are the same kernel, ours: 'base' is memory initialised by the other method, "
    "'knownzero' a private mapping from refpage_create(). Each figure is of one child process that maps "
    f"{MAPPED} bytes again and again, in each mapping writes one byte in each page of what is touched, and "
    "unmaps it; time is wall time from its exec to its exit, divided by the number of mappings.",
    "Huge pages are off for the child, but for memset_huge: the posted series was measured without them. "
    "Where all of a mapping is used, one fault for 2 MiB is cheaper than 512, whatever the content.",
    "Instructions are counted by the guest's clock under -icount shift=0, in a boot of their own. Where the "
    "accelerator is tcg, emulating a fault takes most of the time, which both methods have in common: what "
    "is saved there is less than on hardware, where memory is what takes the time.",
)
# Instructions are those of the mappings by which these numbers differ.
FEW, MANY = 2, 6
COUNTS = 3
TABLES = 40
HEAP_ARGS = ("--tables", str(TABLES), "--used", "10")


def _method(side: Side, method: str, touch: int, loops: int) -> dict[str, Any]:
    huge = method == "memset_huge"
    argv = ["refpage_bench", "--method", "memset" if huge else method, "--map", str(MAPPED)]
    argv += ["--touch", str(touch), "--loops", str(loops), *([] if huge else ["--nothp"])]
    return side.json(*argv)


def _check(side: Side) -> None:
    """All methods give the pattern, or their speed means nothing."""
    for method in ("memset", "refpage", "memfd", "uffd"):
        side.sh(f"refpage_bench --method {method} --map {MAPPED} --touch 1024000 --loops 1 --check")


def _target(metric: Metric, at_least: float) -> Target | None:
    if metric.change_percent is None:
        return None
    if at_least <= 0:
        # The peak may differ by the odd page of the program itself.
        return Target("no more than with memset", metric.change_percent <= 1.0)
    return Target(f"at least {at_least:g} % less", metric.change_percent <= -at_least)


def _metric(name: str, unit: str, base: list[float], ours: list[float], sentence: str,
            at_least: float | None) -> Metric:  # fmt: skip
    made = Metric.of(name, unit, base, ours, sentence=sentence)
    return made if at_least is None else replace(made, target=_target(made, at_least))


def measure(side: Side, repetitions: int) -> list[Metric]:
    """Every method for each amount touched, by turns."""
    found: list[Metric] = []
    for touch_name, (touch, time_saved, rss_saved) in TOUCHED.items():
        loops = LOOPS[touch_name]
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        peaks: dict[str, list[float]] = {method: [] for method in METHODS}
        with step(f"{touch} of {MAPPED} bytes touched: {repetitions} repetitions of {len(METHODS)} methods"):
            for turn in range(repetitions):
                for method in METHODS if turn % 2 == 0 else reversed(METHODS):
                    told = _method(side, method, touch, loops[method])
                    times[method].append(told["wall_ns"] / loops[method] / 1e6)
                    peaks[method].append(told["max_rss_kb"] * 1024.0)
        for method, words in WORDS.items():
            with_seed = method == "memset"
            prefix = f"refpage.{touch_name}" + ("" if with_seed else f".against_{method}")
            found.append(
                _metric(
                    f"{prefix}.time",
                    "ms",
                    times[method],
                    times["refpage"],
                    f"Time of one mapping of which {touch} bytes are touched; against {words}.",
                    time_saved if with_seed else None,
                )
            )
            if with_seed or method == "memset_huge":
                found.append(
                    _metric(
                        f"{prefix}.max_rss",
                        "bytes",
                        peaks[method],
                        peaks["refpage"],
                        f"Peak resident size when {touch} bytes are touched; against {words}.",
                        rss_saved if with_seed else None,
                    )
                )
    return found


def measure_heap(side: Side, repetitions: int) -> list[Metric]:
    """An allocator that hands out memory with a pattern, before and after."""
    told: dict[str, list[dict[str, Any]]] = {"memset": [], "refpage": []}
    with step(f"an allocator that initialises its heap: {repetitions} pairs"):
        for turn in range(repetitions):
            for init in ("memset", "refpage") if turn % 2 == 0 else ("refpage", "memset"):
                told[init].append(side.json("refpage_heap", "--init", init, *HEAP_ARGS))

    def values(init: str, key: str, scale: float) -> list[float]:
        return [one[key] * scale for one in told[init]]

    what = f"{TABLES} tables of 1 MiB from an allocator that gives them a pattern, 10 % of each used"
    return [
        Metric.of("refpage.heap.time", "ms", values("memset", "wall_ns", 1e-6),
                  values("refpage", "wall_ns", 1e-6), sentence=f"Time for {what}."),
        Metric.of("refpage.heap.max_rss", "bytes", values("memset", "max_rss_kb", 1024),
                  values("refpage", "max_rss_kb", 1024), sentence=f"Peak resident size for {what}."),
    ]  # fmt: skip


def measure_instructions(side: Side) -> list[Metric]:
    """Instructions of one mapping; ``side`` is a guest whose clock counts them."""

    def count(method: str, touch: int) -> float:
        few, many = (_method(side, method, touch, loops)["wall_ns"] for loops in (FEW, MANY))
        return float(many - few) / (MANY - FEW)

    found = []
    with step(f"instructions, counted {COUNTS} times"):
        for touch_name, (touch, _, _) in TOUCHED.items():
            memset, refpage = ([count(m, touch) for _ in range(COUNTS)] for m in ("memset", "refpage"))
            sentence = (
                f"Instructions of one mapping of which {touch} bytes are touched, kernel and program: exact, but "
                "blind to what memory costs; against anonymous memory in 4 KiB pages, written with memset()."
            )
            name = f"refpage.{touch_name}.instructions"
            found.append(Metric.of(name, "instructions", memset, refpage, sentence=sentence))
    return found


def run(options: BenchOptions) -> Result:
    """Measure in one guest with our kernel; raises LabError when it cannot."""
    began = time.monotonic()
    # One kernel does both: the base kernel is not needed, and not built.
    images = built(replace(options, base=options.ours))
    spec = spec_for(options, images.ours, images.qemu, devices=[])
    with running(spec) as guest:
        side = Side("ours", guest)
        if side.sh("refpage_bench --method refpage --loops 1 >/dev/null; echo $?")[-1] != "0":
            raise TestFailure(
                "The kernel has no refpage_create()",
                f"refpage_bench failed in the guest (kernel {images.ours})",
                "build it with CONFIG_REFPAGE (`kz build linux --variant knownzero`)",
            )
        _check(side)
        side.sh(SNAPSHOT)
        metrics = measure(side, options.pairs) + measure_heap(side, options.pairs)
        side.sh(SNAPSHOT)
        accel = guest.accel
    counting = spec_for(
        options.with_accel("tcg"), images.ours, images.qemu, devices=[], extra_qemu=["-icount", "shift=0"]
    )
    with running(counting) as guest:
        side = Side("ours", guest)
        side.sh(SNAPSHOT)
        metrics += measure_instructions(side)
        side.sh(SNAPSHOT)
    return Result(
        name="refpage",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("refpage", options, accel),
        metrics=metrics,
        job={"mapped": MAPPED, "loops": LOOPS, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=list(NOTES),
        seconds=elapsed(began),
    )
