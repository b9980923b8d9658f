# SPDX-License-Identifier: GPL-2.0
"""Instructions of the hot paths: base against ours, compiled out, without a source of zeros, and with one."""

from __future__ import annotations

import bisect
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed
from lab.bench.plugin import build_plugin
from lab.bench.session import FLUSH, LATE, Built, Side, built, host_facts, reproduce, spec_for
from lab.boot.guest import boot, running
from lab.build.linux import build_linux
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.evidence import SNAPSHOT
from lab.report.results import Metric, Result, Target

BOOTS = 2
REPS = 1001
FEW = 101
LIMIT = 0.5
WARM_UPS = 16  # of guest/hotpath.c
SKIPPED_AT_LEAST = 0.9
# User space where it always is: how much page table a process has depends on it.
APPEND = "nokaslr norandmaps"
ICOUNT = ("-icount", "shift=0")
# By the guest's own clock. A kernel without flush reports in rounds: a few dozen of them, 10 ms apart, after the
# first at the usual delay. The host's view tells nothing here: it never had this memory.
REPORTED = "sleep 5"


@dataclass(frozen=True)
class HotPath:
    """A path that guest/hotpath.c knows as ``name``; its metric is hotpath.``metric``.instructions.

    For a breakdown ``loop`` of guest/hotpath.c is repeated, which does it ``operations`` times in each
    repetition; ``worth`` is how many instructions a function must differ by for each operation to be named.
    ``bound``: whether the limit holds for it.
    """

    name: str
    metric: str
    words: str
    loop: str
    operations: int = 1
    reps: int = REPS
    worth: float = 0.5
    bound: bool = True


# Emulated, a huge page or a process takes as long as hundreds of others: these are repeated less often.
PATHS = (
    HotPath("fault", "fault", "an anonymous 4 KiB page fault with its share of the unmapping", "fault", 32),
    HotPath(
        "alloc_free",
        "alloc_free",
        "one order-0 page allocated and freed through the per-CPU list",
        "pipe_deep",
        13,
    ),
    HotPath(
        "buddy",
        "buddy_alloc_free",
        "the same when the per-CPU list overflows into the buddy lists",
        "buddy",
        221,
        FEW,
        bound=False,
    ),
    HotPath("thp_fault", "thp_fault", "a 2 MiB page fault with its unmapping", "thp_fault", 1, FEW),
)
MORE = (
    HotPath("order3", "alloc_free_order3", "one order-3 page (32 KiB) allocated and freed", "list3"),
    HotPath("order9", "alloc_free_order9", "one order-9 page (2 MiB) allocated and freed", "list9"),
    HotPath(
        "fork", "fork_exit", "a process that is forked, ends at once and is waited for", "fork", 1, FEW, 200.0
    ),
    HotPath(
        "exec", "fork_exec", "a process that is forked, executes a program and ends", "exec", 1, FEW, 200.0
    ),
)
# Each repetition uses memory that nobody had since it was reported.
NEW = (
    HotPath(
        "new_fault", "new_fault", "a 4 KiB page fault in memory that was not used before", "new_fault", 32
    ),
    HotPath("new_thp", "new_thp_fault", "a 2 MiB page fault in such memory", "new_thp", 1, FEW),
)
PAGES = {"new_fault": 32, "new_thp": 512}  # of a repetition

IDLE = ""
OFF = "off."
ACTIVE = "active."
WORDS = {
    IDLE: "no source of zeros",
    OFF: "the series applied and compiled out",
    ACTIVE: "a balloon that has reported all free memory, on both sides, with bit 6 on ours",
}
NOTE = (
    "Instructions are counted by the guest's own clock under -icount shift=0, where each emulated "
    "instruction takes one nanosecond; each boot gives the median of 1001 repetitions (of 101 where an "
    "operation is long), and the figures here are over the boots. "
    "No balloon device is there, so nothing is ever known to be zero. "
    "alloc_free is the difference of two pipe loops, one that needs a page for each packet and one "
    "that does not."
)
MORE_NOTE = (
    "alloc_free_order3 and alloc_free_order9 are listmount(2) with room for 4096 and for 262144 mounts, less the "
    "same with room for none: the kernel allocates that room in one block with kvmalloc() and frees it, and "
    "no mount is found, so that nothing is written to it. fork_exec is fork, execve, exit and wait, with the "
    "start of a static program in user space. User space is not randomized (norandmaps)."
)
ACTIVE_NOTE = (
    "hotpath.off.* has the series with every option of it compiled out in the second column. For hotpath.active.* "
    "both guests have a balloon that has reported all free memory; from then on nothing is reported. "
    "new_fault and new_thp_fault use memory that is still free since then, and on ours known to be zero. The other "
    "paths free what they use and get it again: it is not zero, and there is nothing to skip."
)

Counts = dict[str, float]


def _failed(kernel: object, code: int, console: object) -> TestFailure:
    return TestFailure(
        "The instruction count failed in the guest",
        f"hotpath ended with exit code {code} on kernel {kernel}; console: {console}",
        "read the console log",
    )


def medians(lines: Sequence[str]) -> Counts:
    """The median of each path, from what hotpath printed."""
    found = {}
    for line in lines:
        if line.startswith("{"):
            told = json.loads(line)
            found[str(told["path"])] = float(told["median"])
    return found


def _boot(
    options: BenchOptions,
    kernel: str | Path,
    qemu: Path,
    runs: Sequence[tuple[int, str]],
    extra: Sequence[str] = (),
) -> Counts:
    """One boot of one kernel without a balloon; the median of each path. ``runs``: how often which path."""
    steps = [f"hotpath --reps {reps} {name}" for reps, name in runs]
    spec = spec_for(
        options.with_accel("tcg"),
        kernel,
        qemu,
        devices=[],
        extra_qemu=[*ICOUNT, *extra],
        append=APPEND,
        timeout=900.0,
        # A process for each, so that none has what another leaves behind.
        command=["sh", "-ec", "; ".join((SNAPSHOT, *steps, SNAPSHOT))],
    )
    done = boot(spec)
    if done.exit_code:
        raise _failed(kernel, done.exit_code, done.console)
    return medians(done.stdout.splitlines())


def _plain(options: BenchOptions, kernel: str | Path, qemu: Path, paths: Sequence[HotPath]) -> Counts:
    return _boot(options, kernel, qemu, [(path.reps, path.name) for path in paths])


def check_skipped(path: HotPath, pages: int, name: str) -> None:
    """TestFailure unless the memory that a path of NEW got was known to be zero; ``pages`` were skipped."""
    wanted = (path.reps + WARM_UPS) * PAGES[path.name]
    if pages < SKIPPED_AT_LEAST * wanted:
        raise TestFailure(
            f"The source of zeros is not active in the {name} guest",
            f"{pages} of {wanted} pages of {path.name} were known to be zero",
            "look at pgzeroed_* in its /proc/vmstat, or give it more memory (--memory)",
        )


def _active(options: BenchOptions, kernel: str | Path, qemu: Path, paths: Sequence[HotPath]) -> Counts:
    """One boot of one kernel with a balloon that has reported all free memory; the median of each path."""
    spec = spec_for(options.with_accel("tcg"), kernel, qemu, extra_qemu=[*ICOUNT], append=APPEND)
    found: Counts = {}
    with running(spec) as guest:
        side = Side(str(kernel), guest)
        side.has_flush = side.sh(f"test -e {FLUSH} && echo yes || echo no")[-1] == "yes"
        side.free_and_report()
        side.sh(f"{REPORTED}; {LATE}")
        side.sh(SNAPSHOT)
        for path in paths:
            before = _skipped(side)
            found |= medians(side.sh(f"hotpath --reps {path.reps} {path.name}"))
            if before is not None and path.name in PAGES:
                check_skipped(path, (_skipped(side) or 0) - before, side.name)
        side.sh(SNAPSHOT)
    return found


def _skipped(side: Side) -> int | None:
    """Pages that were not zeroed because they had been reported; None on a kernel that does not count them."""
    lines = side.sh("grep pgzeroed_skip /proc/vmstat || true")
    return int(lines[-1].split()[1]) if lines else None


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


def _functions(options: BenchOptions, kernel: Path, qemu: Path, path: HotPath) -> Counts:
    """Instructions in each function of the kernel for one operation of a path."""
    plugin = build_plugin("functions")
    table = symbols(kernel.parent / "System.map")
    counts = []
    repetitions = (path.reps // 10, path.reps)
    with tempfile.TemporaryDirectory(prefix="functions-") as folder:
        for reps in repetitions:
            file = Path(folder) / str(reps)
            _boot(options, kernel, qemu, [(reps, path.loop)], ["-plugin", f"{plugin},out={file}"])
            counts.append(by_function(file.read_text(encoding="utf-8"), *table))
    few, many = counts
    done = (repetitions[1] - repetitions[0]) * path.operations
    return {function: (many[function] - few[function]) / done for function in many | few}


def breakdown(options: BenchOptions, images: Built, path: HotPath, prefix: str = IDLE) -> list[Metric]:
    """Which functions make the difference: those whose share of a path is another one in ours."""
    kernels = [Path(images.base), Path(images.ours)]
    if not all((kernel.parent / "System.map").is_file() for kernel in kernels):
        return []
    with step(f"instructions of {path.name} by function"), ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(_functions, options, kernel, images.qemu, path) for kernel in kernels]
        base, ours = (job.result() for job in jobs)
    # No boot is quite like the next one: a count below nothing is of what is waited for there, not of the path.
    names = [name for name in base | ours if min(base.get(name, 0.0), ours.get(name, 0.0)) >= 0]
    differs = {name: ours.get(name, 0.0) - base.get(name, 0.0) for name in names}
    return [
        Metric.of(
            f"hotpath.{prefix}{path.metric}.in.{name}",
            "instructions",
            [base.get(name, 0.0)],
            [ours.get(name, 0.0)],
            sentence=f"Of these, those in {name}(), whatever it was called for meanwhile.",
        )
        for name in sorted(differs, key=lambda name: -abs(differs[name]))
        if abs(differs[name]) >= path.worth
    ]


Count = Callable[[BenchOptions, "str | Path", Path, Sequence[HotPath]], Counts]


def _count(
    options: BenchOptions,
    kernels: Mapping[str, str | Path],
    qemu: Path,
    paths: Sequence[HotPath],
    boots: int,
    how: Count,
    what: str,
) -> dict[str, list[Counts]]:
    """Boot each kernel so many times; the counts of each boot, by the name of the kernel."""
    # Two at once: a count does not care what else the machine does.
    with step(f"{what}: {boots} boots of each kernel"), ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [
            (name, pool.submit(how, options, kernel, qemu, paths))
            for _ in range(boots)
            for name, kernel in kernels.items()
        ]
        found: dict[str, list[Counts]] = {name: [] for name in kernels}
        for name, job in jobs:
            found[name].append(job.result())
    return found


def compare(
    options: BenchOptions,
    images: Built,
    base: Sequence[Counts],
    ours: Sequence[Counts],
    paths: Sequence[HotPath],
    prefix: str,
) -> list[Metric]:
    """The metrics of one comparison; those without an active source have a limit, and a breakdown beyond it."""
    metrics = []
    for path in paths:
        name = f"hotpath.{prefix}{path.metric}.instructions"
        made = Metric.of(
            name,
            "instructions",
            [row[path.name] for row in base],
            [row[path.name] for row in ours],
            sentence=f"Instructions of {path.words}: {WORDS[prefix]}.",
        )
        if path.bound and prefix != ACTIVE:
            change = made.change_percent
            met = change is not None and change <= LIMIT
            made = replace(made, target=Target(f"at most {LIMIT} % more than base", met))
        metrics.append(made)
        if made.target and not made.target.met:
            metrics += breakdown(options, images, path, prefix)
    return metrics


def measure(options: BenchOptions, images: Built, boots: int = BOOTS) -> tuple[list[Metric], list[str]]:
    """Boot both kernels and compare. The counts of one boot are as good as those of many: they are the same."""
    kernels = {"base": images.base, "ours": images.ours}
    rows = _count(options, kernels, images.qemu, PATHS, boots, _plain, "instruction counts")
    return compare(options, images, rows["base"], rows["ours"], PATHS, IDLE), [NOTE]


def run(options: BenchOptions) -> Result:
    """Count instructions alone, everything; always under TCG; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    off = build_linux("off")
    paths = [*PATHS, *MORE]
    kernels = {"base": images.base, "ours": images.ours}
    reported = _count(
        options, kernels, images.qemu, [*NEW, *paths], BOOTS, _active, "instruction counts, memory reported"
    )
    kernels["off"] = off
    rows = _count(options, kernels, images.qemu, paths, BOOTS, _plain, "instruction counts")
    metrics = compare(options, images, rows["base"], rows["ours"], paths, IDLE)
    metrics += compare(options, replace(images, ours=off), rows["base"], rows["off"], paths, OFF)
    metrics += compare(options, images, reported["base"], reported["ours"], [*NEW, *paths], ACTIVE)
    return Result(
        name="hotpath",
        accelerator="tcg",
        versions=images.versions() | {"image_off": off.parent.name},
        reproduce=reproduce("hotpath", options, "tcg"),
        metrics=metrics,
        job={"memory": options.memory, "cpus": 1, "boots": BOOTS, "icount": "shift=0"},
        host=host_facts(),
        notes=[
            NOTE.replace("No balloon device is there", "But for hotpath.active.* no balloon device is there"),
            MORE_NOTE,
            ACTIVE_NOTE,
        ],
        seconds=elapsed(began),
    )
