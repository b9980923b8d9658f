# SPDX-License-Identifier: GPL-2.0
"""Instructions of the hot paths with the feature compiled in and no reporting: base against ours."""

from __future__ import annotations

import bisect
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed
from lab.bench.plugin import build_plugin
from lab.bench.session import Built, built, host_facts, reproduce, spec_for
from lab.boot import boot
from lab.errors import TestFailure
from lab.progress import step
from lab.results import Metric, Result, Target

BOOTS = 2
REPS = 1001
LIMIT = 0.5
# How often the operation of a path is done in one repetition of what hotpath calls by the second name.
OPERATIONS = {"fault": (32, "fault"), "alloc_free": (13, "pipe_deep")}
FEW = 101
WORTH_NAMING = 0.5  # instructions for each operation
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
# What is held against the limit is repeated often. Emulated, a huge page takes as long as thousands of others.
RUNS = (
    (REPS, [path for path, (_, _, bound) in PATHS.items() if bound]),
    (FEW, [path for path, (_, _, bound) in PATHS.items() if not bound]),
)
NOTE = (
    "Instructions are counted by the guest's own clock under -icount shift=0, where each emulated "
    "instruction takes one nanosecond; each boot gives the median of 1001 repetitions (of 101 where there is no limit), and the figures "
    "here are over the boots. "
    "No balloon device is there, so nothing is ever known to be zero. "
    "alloc_free is the difference of two pipe loops, one that needs a page for each packet and one "
    "that does not."
)


def _boot(
    options: BenchOptions,
    kernel: str | Path,
    qemu: Path,
    runs: Sequence[tuple[int, Sequence[str]]] = RUNS,
    extra: Sequence[str] = (),
) -> dict[str, float]:
    """One boot of one kernel; the median of each path. ``runs``: how often which paths."""
    spec = spec_for(
        options.with_accel("tcg"),
        kernel,
        qemu,
        devices=[],
        extra_qemu=["-icount", "shift=0", *extra],
        append="nokaslr",
        timeout=300.0,
        command=["sh", "-ec", "; ".join(f"hotpath --reps {reps} {' '.join(names)}" for reps, names in runs)],
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


def symbols(system_map: Path) -> tuple[list[int], list[str]]:
    """The addresses of a kernel's functions, sorted, and their names."""
    found = []
    for line in system_map.read_text(encoding="utf-8").splitlines():
        address, kind, name = line.split()[:3]
        if kind in "tTwW":
            found.append((int(address, 16), name))
    found.sort()
    return [address for address, _ in found], [name for _, name in found]


def by_function(counted: str, addresses: list[int], names: list[str]) -> Counter[str]:
    """What the plugin wrote, ``ADDRESS INSTRUCTIONS`` a line, added up by function."""
    total: Counter[str] = Counter()
    for line in counted.splitlines():
        address, count = line.split()
        at = bisect.bisect_right(addresses, int(address, 16)) - 1
        if at >= 0:
            total[names[at]] += int(count)
    return total


def _functions(options: BenchOptions, kernel: Path, qemu: Path, path: str) -> dict[str, float]:
    """Instructions in each function of the kernel for one operation of a path."""
    operations, name = OPERATIONS[path]
    plugin = build_plugin("functions")
    table = symbols(kernel.parent / "System.map")
    counts = []
    with tempfile.TemporaryDirectory(prefix="functions-") as folder:
        for reps in (FEW, REPS):
            file = Path(folder) / str(reps)
            _boot(options, kernel, qemu, [(reps, [name])], ["-plugin", f"{plugin},out={file}"])
            counts.append(by_function(file.read_text(encoding="utf-8"), *table))
    few, many = counts
    return {function: (many[function] - few[function]) / (REPS - FEW) / operations for function in many | few}


def breakdown(options: BenchOptions, images: Built, path: str) -> list[Metric]:
    """Which functions make the difference: those whose share of a path is another one in ours."""
    kernels = [Path(images.base), Path(images.ours)]
    if not all((kernel.parent / "System.map").is_file() for kernel in kernels):
        return []
    with step(f"instructions of {path} by function"), ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(_functions, options, kernel, images.qemu, path) for kernel in kernels]
        base, ours = (job.result() for job in jobs)
    differs = {name: ours.get(name, 0.0) - base.get(name, 0.0) for name in base | ours}
    return [
        Metric.of(
            f"hotpath.{path}.in.{name}",
            "instructions",
            [base.get(name, 0.0)],
            [ours.get(name, 0.0)],
            sentence=f"Of these, those in {name}(), whatever it was called for meanwhile.",
        )
        for name in sorted(differs, key=lambda name: -abs(differs[name]))
        if abs(differs[name]) >= WORTH_NAMING
    ]


def measure(options: BenchOptions, images: Built, boots: int = BOOTS) -> tuple[list[Metric], list[str]]:
    """Boot both kernels and compare. The counts of one boot are as good as those of many: they are the same."""
    counts: dict[str, list[dict[str, float]]] = {"base": [], "ours": []}
    # Both kernels at once: a count does not care what else the machine does.
    with step(f"instruction counts: {boots} boots of each kernel"), ThreadPoolExecutor(max_workers=2) as pool:
        for _ in range(boots):
            both = [pool.submit(_boot, options, kernel, images.qemu) for kernel in (images.base, images.ours)]
            counts["base"].append(both[0].result())
            counts["ours"].append(both[1].result())
    metrics = []
    for path, (name, words, bound) in PATHS.items():
        base = [row[path] for row in counts["base"]]
        ours = [row[path] for row in counts["ours"]]
        made = Metric.of(name, "instructions", base, ours, sentence=f"Instructions of {words}.")
        target = None
        if bound and made.change_percent is not None:
            target = Target(f"at most {LIMIT} % more than base", made.change_percent <= LIMIT)
        metrics.append(
            Metric.of(name, "instructions", base, ours, sentence=f"Instructions of {words}.", target=target)
        )
        if target and not target.met and path in OPERATIONS:
            metrics += breakdown(options, images, path)
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
