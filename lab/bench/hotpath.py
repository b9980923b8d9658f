# SPDX-License-Identifier: GPL-2.0
"""Instructions of the hot paths with the feature compiled in and no reporting: base against ours."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed
from lab.bench.session import Built, built, host_facts, reproduce, spec_for
from lab.boot import boot
from lab.errors import TestFailure
from lab.progress import step
from lab.results import Metric, Result, Target

BOOTS = 2
LIMIT = 0.5
PATHS = {
    "fault": (
        "hotpath.fault.instructions",
        "an anonymous 4 KiB page fault with its share of the unmapping",
        True,
    ),
    "alloc_free": (
        "hotpath.alloc_free.instructions",
        "one order-0 page allocated and freed through the per-CPU list",
        True,
    ),
    "buddy": (
        "hotpath.buddy_alloc_free.instructions",
        "the same when the per-CPU list overflows into the buddy lists",
        False,
    ),
    "thp_fault": ("hotpath.thp_fault.instructions", "a 2 MiB page fault with its unmapping", False),
}
NOTE = (
    "Instructions are counted by the guest's own clock under -icount shift=0, where each emulated "
    "instruction takes one nanosecond; each boot gives the median of 1001 repetitions, and the figures "
    "here are over the boots. "
    "No balloon device is there, so nothing is ever known to be zero. "
    "alloc_free is the difference of two pipe loops, one that needs a page for each packet and one "
    "that does not."
)


def _boot(options: BenchOptions, kernel: str | Path, qemu: Path) -> dict[str, float]:
    """One boot of one kernel; the median of each path."""
    spec = spec_for(
        options.with_accel("tcg"),
        kernel,
        qemu,
        devices=[],
        extra_qemu=["-icount", "shift=0"],
        append="nokaslr",
        timeout=300.0,
        command=["hotpath", "--reps", "1001", *PATHS],
    )
    done = boot(spec)
    if done.exit_code:
        raise TestFailure(
            "The instruction count failed in the guest",
            f"hotpath ended with exit code {done.exit_code} on kernel {kernel}; console: {done.console}",
            "read the console log",
        )
    text = done.stdout if isinstance(done.stdout, str) else done.stdout.decode(errors="replace")
    found = {}
    for line in text.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            found[str(told["path"])] = float(told["median"])
    return found


def measure(options: BenchOptions, images: Built) -> tuple[list[Metric], list[str]]:
    """Boot both kernels and compare."""
    counts: dict[str, list[dict[str, float]]] = {"base": [], "ours": []}
    # Both kernels at once: a count does not care what else the machine does.
    with step(f"instruction counts: {BOOTS} boots of each kernel"), ThreadPoolExecutor(max_workers=2) as pool:
        for _ in range(BOOTS):
            both = [pool.submit(_boot, options, kernel, images.qemu) for kernel in (images.base, images.ours)]
            counts["base"].append(both[0].result())
            counts["ours"].append(both[1].result())
    metrics = []
    for path, (name, words, bound) in PATHS.items():
        base = [row[path] for row in counts["base"]]
        ours = [row[path] for row in counts["ours"]]
        made = Metric.of(name, "instructions", base, ours)
        target = None
        if bound and made.change_percent is not None:
            target = Target(f"at most {LIMIT} % more than base", made.change_percent <= LIMIT)
        metrics.append(
            Metric.of(name, "instructions", base, ours, sentence=f"Instructions of {words}.", target=target)
        )
    return metrics, [NOTE]


def run(options: BenchOptions) -> Result:
    """Count instructions alone; always under TCG; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    metrics, notes = measure(options, images)
    return Result(
        name="hotpath",
        accelerator="tcg",
        versions=images.versions(),
        reproduce=reproduce("hotpath", options, "tcg"),
        metrics=metrics,
        job={"memory": options.memory, "cpus": 1, "boots": BOOTS, "icount": "shift=0"},
        host=host_facts(),
        notes=notes,
        seconds=elapsed(began),
    )
