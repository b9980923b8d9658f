# SPDX-License-Identifier: GPL-2.0
"""Memory allocated and freed all the time, at short and long delays before it is reported."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from lab.bench import BenchOptions
from lab.bench.hostmemory import fill, release, until_back
from lab.bench.jobs import elapsed, within
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import until_known
from lab.bench.session import (
    DELAY,
    MIB,
    Built,
    Side,
    built,
    by_turns,
    guests,
    host_facts,
    reproduce,
    spec_for,
    warm_host,
)
from lab.boot import balloon
from lab.boot.spec import BootSpec
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

CPUS = 2
# Milliseconds before free memory is reported, and how long a run has to be to see some of that.
RUN_MS = {2000: 3200, 250: 1200, 50: 1000}
WARM_UP_MS = 400
LONG, SHORT = 2000, 250
PAUSE_MS = 50
DEVICE = balloon.device(free_page_reporting="on")
BACK_PERCENT = 90
BEYOND = 10.0


@dataclass(frozen=True)
class Job:
    """What is done over and over: processes that each allocate, free and wait a moment."""

    name: str
    words: str
    processes: int
    size_mb: int

    def argv(self, run_ms: int) -> list[str]:
        """The command in the guest; the first cycle uses what was free before, and does not count."""
        found = ["page_fault", "--tasks", str(self.processes), "--size", str(self.size_mb)]
        return [*found, "--pause-ms", str(PAUSE_MS), "--ms", str(run_ms), "--skip", "1", "--cycles", "1"]


JOBS = (
    Job("loop", "one process that allocates and frees 256 MB", 1, 256),
    Job("six", "six processes that allocate and free 352 MB each", 6, 352),
)
SIX = JOBS[1]
FILL_MB = SIX.processes * SIX.size_mb  # a bit more than 2 GiB
MEMORY = "3G"


@dataclass
class Series:
    """What one guest did in one job, an entry for each run."""

    wall_ms: list[float] = field(default_factory=list)  # of an allocation, on average
    cpu_ms: list[float] = field(default_factory=list)  # the same, task-clock
    cycles: list[float] = field(default_factory=list)  # a second, of all processes

    @property
    def times(self) -> tuple[list[float], list[float]]:
        """What an allocation took."""
        return self.wall_ms, self.cpu_ms


# (side, delay)
Key = tuple[str, int]


@dataclass
class Found:
    """What came of all guests."""

    runs: dict[tuple[str, Key], Series] = field(default_factory=dict)
    back_s: dict[Key, list[float]] = field(default_factory=dict)


def key_of(side: Side) -> Key:
    """Kernel and delay of a guest, from its name."""
    name, delay = side.name.split("-")
    return name, int(delay)


def specs(options: BenchOptions, images: Built) -> list[tuple[str, BootSpec]]:
    """A guest for each kernel and delay, so that all can take turns."""
    return [
        (
            f"{name}-{delay}",
            spec_for(options, kernel, images.qemu, cpus=CPUS, memory=MEMORY, devices=[DEVICE]),
        )
        for delay in RUN_MS
        for name, kernel in (("base", images.base), ("ours", images.ours))
    ]


def allocations(sides: Sequence[Side], pairs: int, found: Found) -> None:
    """Both jobs in all guests by turns."""
    for job in JOBS:
        done: dict[Key, Series] = {}
        with step(f"{job.words}: up to {pairs} runs in each of {len(sides)} guests"):
            for side in sides:
                side.json(*job.argv(WARM_UP_MS))
                done[key_of(side)] = found.runs.setdefault((job.name, key_of(side)), Series())
            for turn in until_known(pairs, [one for series in done.values() for one in series.times]):
                for side in by_turns(sides, turn):
                    key = key_of(side)
                    warm_host(job.processes * job.size_mb * MIB)
                    told = side.json(*job.argv(RUN_MS[key[1]]))
                    series = done[key]
                    series.wall_ms.append(told["cycle_wall_ns"] / told["cycles"] / 1e6)
                    series.cpu_ms.append(told["cycle_cpu_ns"] / told["cycles"] / 1e6)
                    series.cycles.append(told["per_second"] * 4096 / (job.size_mb * MIB))


def time_until_back(side: Side, timeout: float = 120.0) -> float:
    """Seconds from freeing memory until the host has most of it back; TestFailure when it never has."""
    full = fill(side, SIX.size_mb, SIX.processes)
    began = time.monotonic()
    release(side)
    until_back(side, full, FILL_MB * MIB * BACK_PERCENT // 100, timeout)
    seconds = time.monotonic() - began
    side.sh("wait")
    return seconds


def give_back(sides: Sequence[Side], pairs: int, found: Found) -> None:
    """Memory freed in the two guests of each delay at the same time: what takes long is waiting."""
    with (
        step(f"host memory: {FILL_MB} MB freed, up to {pairs} times in each of {len(sides)} guests"),
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        for delay in RUN_MS:
            both = [side for side in sides if key_of(side)[1] == delay]
            done = [found.back_s.setdefault(key_of(side), []) for side in both]
            for _ in until_known(pairs, done):
                for series, seconds in zip(done, pool.map(time_until_back, both), strict=True):
                    series.append(seconds)


def metrics_of(found: Found) -> list[Metric]:
    """Each delay on both kernels, and ours at the short delay against base at the long one."""
    metrics = []
    for job in JOBS:
        for delay in RUN_MS:
            base, ours = (found.runs[job.name, (side, delay)] for side in ("base", "ours"))
            at = f"churn.{job.name}.{delay}ms"
            words = f"{job.words}, reports after {delay} ms"
            metrics += [
                Metric.of(
                    f"{at}.alloc_wall",
                    "ms",
                    base.wall_ms,
                    ours.wall_ms,
                    sentence=f"Time of one allocation: {words}.",
                ),
                Metric.of(
                    f"{at}.alloc_task_clock",
                    "ms",
                    base.cpu_ms,
                    ours.cpu_ms,
                    sentence=f"CPU time of one allocation: {words}.",
                ),
                Metric.of(
                    f"{at}.cycles",
                    "cycles/s",
                    base.cycles,
                    ours.cycles,
                    sentence=f"Mappings a second, of all processes: {words}.",
                ),
            ]
        base, ours = found.runs[job.name, ("base", LONG)], found.runs[job.name, ("ours", SHORT)]
        for name, kind, one, two in (
            ("alloc_wall", "Time", base.wall_ms, ours.wall_ms),
            ("alloc_task_clock", "CPU time", base.cpu_ms, ours.cpu_ms),
        ):
            made = Metric.of(
                f"churn.{job.name}.early.{name}",
                "ms",
                one,
                two,
                sentence=f"{kind} of one allocation, {job.words}: base with reports after {LONG} ms, ours after "
                f"{SHORT} ms.",
            )
            metrics.append(replace(made, target=within(made, 0, BEYOND, "no slower beyond noise")))
    for delay in RUN_MS:
        metrics.append(
            Metric.of(
                f"churn.{delay}ms.time_until_back",
                "s",
                found.back_s["base", delay],
                found.back_s["ours", delay],
                sentence=f"From freeing {FILL_MB} MB, by six processes, until the host has {BACK_PERCENT} % of them, reports after "
                f"{delay} ms.",
            )
        )
    made = Metric.of(
        "churn.early.time_until_back",
        "s",
        found.back_s["base", LONG],
        found.back_s["ours", SHORT],
        sentence=f"The same: base with reports after {LONG} ms, ours after {SHORT} ms.",
    )
    sooner = max(found.back_s["ours", SHORT]) < min(found.back_s["base", LONG])
    metrics.append(replace(made, target=Target("sooner, each time", sooner)))
    return metrics


def run(options: BenchOptions) -> Result:
    """Measure both jobs at all delays; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    found = Found()
    with guests(specs(options, images)) as sides:
        for side in sides:
            side.sh(f"echo {key_of(side)[1]} > {DELAY}")
        accel = sides[0].guest.accel
        allocations(sides, options.pairs, found)
        give_back(sides, options.pairs, found)
    return Result(
        name="churn",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("churn", options, accel),
        metrics=metrics_of(found),
        job={
            "memory": MEMORY,
            "cpus": CPUS,
            "pairs": options.pairs,
            "fill_mb": FILL_MB,
        },
        host=host_facts(),
        notes=[
            f"An allocation is a mapping with a byte written to each page of 4 KiB, in huge pages; {PAUSE_MS} ms "
            "after it was freed comes the next. Where it was reported meanwhile, the host has to find memory "
            "again: that is in the figures of both sides. The first of a run is not counted.",
            f"The six processes have {FILL_MB} MB together, so that no guest swaps or runs out of memory. Each "
            f"kernel and delay has a guest of its own; a run is {', '.join(f'{ms} ms' for ms in RUN_MS.values())} "
            f"long at a delay of {', '.join(f'{ms} ms' for ms in RUN_MS)}, and its value is the mean of its "
            f"allocations.",
            REPEATED,
            f"Slower is what the 95 % bootstrap interval of the change of the median says, or a change of more "
            f"than {BEYOND:.0f} %, however wide that interval.",
        ],
        seconds=elapsed(began),
    )
