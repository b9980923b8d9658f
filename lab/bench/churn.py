# SPDX-License-Identifier: GPL-2.0
"""Memory allocated and freed all the time, at short and long delays before it is reported."""

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lab.bench.host import fill, release, until_back
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import Values, turns, until_known
from lab.bench.runner import Run
from lab.bench.session import DELAY, MIB, PAGE, Side, Wanted, warm_host
from lab.boot import balloon
from lab.core.progress import step

CPUS = 2
# Milliseconds before free memory is reported, and the length of a run that has some reports.
RUN_MS = {2000: 3200, 250: 1200, 50: 1000}
WARM_UP_MS = 400
LONG, SHORT = 2000, 250
PAUSE_MS = 50
BACK_PERCENT = 90
BEYOND = 10.0  # as in metrics.toml


@dataclass(frozen=True)
class Job:
    """Processes that each allocate, free and pause, repeatedly."""

    words: str
    processes: int
    size_mb: int

    def argv(self, run_ms: int) -> list[str]:
        """The command in the guest.

        Its first cycle, with memory that was free before, does not count.
        """
        options = (
            f"--tasks {self.processes} --size {self.size_mb} --pause-ms {PAUSE_MS} --ms {run_ms}"
        )
        return ["page_fault", *options.split(), "--skip", "1", "--cycles", "1"]


JOBS = {
    "loop": Job("one process with 256 MB", 1, 256),
    "six": Job("six processes with 352 MB each", 6, 352),
}
SIX = JOBS["six"]
FILL_MB = SIX.processes * SIX.size_mb  # a bit more than 2 GiB
MEMORY = "3G"
TIMES = ("alloc_wall", "alloc_task_clock")


def key(side: Side) -> tuple[str, int]:
    """The kernel and the delay of a guest."""
    return side.kernel, side.amount


def allocations(sides: Sequence[Side], pairs: int, found: Values) -> None:
    for name, job in JOBS.items():
        with step(f"{job.words}: up to {pairs} runs in each of {len(sides)} guests"):
            for side in sides:
                side.json(*job.argv(WARM_UP_MS))
            known = [found[(*key(side), name, kind)] for side in sides for kind in TIMES]
            for side, _ in turns(sides, pairs, known, warm_ups=0):
                warm_host(job.processes * job.size_mb * MIB)
                answer = side.json(*job.argv(RUN_MS[key(side)[1]]))
                wall, clock = (
                    answer[f"cycle_{of}_ns"] / answer["cycles"] / 1e6 for of in ("wall", "cpu")
                )
                cycles = answer["per_second"] * PAGE / (job.size_mb * MIB)
                found.note(*key(side), name, alloc_wall=wall, alloc_task_clock=clock, cycles=cycles)


def time_until_back(side: Side, timeout: float = 120.0) -> float:
    """Seconds from freeing memory until the host has most of it back.

    TestFailure after ``timeout`` seconds.
    """
    full = fill(side, SIX.size_mb, SIX.processes)
    began = time.monotonic()
    release(side)
    until_back(side, full, FILL_MB * MIB * BACK_PERCENT // 100, timeout)
    seconds = time.monotonic() - began
    side.sh("wait")
    return seconds


def give_back(sides: Sequence[Side], pairs: int, found: Values) -> None:
    """Free memory in both guests of a delay at once: most of the time is waiting."""
    what = f"host memory: {FILL_MB} MB freed, up to {pairs} times in each of {len(sides)} guests"
    with step(what), ThreadPoolExecutor(max_workers=2) as pool:
        for delay in dict.fromkeys(side.amount for side in sides):
            both = [side for side in sides if side.amount == delay]
            done = [found[(*key(side), "back")] for side in both]
            for _ in until_known(pairs, done):
                for series, seconds in zip(done, pool.map(time_until_back, both), strict=True):
                    series.append(seconds)


def figures(run: Run, found: Values) -> None:
    """Each delay on both kernels, and ours at the short delay against base at the long one."""
    rows = {f"{delay}ms": (delay, delay) for delay in RUN_MS if found["base", delay, "back"]}
    rows["early"] = LONG, SHORT
    for process, kind in itertools.product(JOBS, (*TIMES, "cycles")):
        for row, (one, two) in rows.items():
            if row == "early" and kind == "cycles":
                continue
            values = found["base", one, process, kind], found["ours", two, process, kind]
            run.add(
                f"churn.{{process}}.{{delay}}.{kind}", values, {"process": process, "delay": row}
            )
    for row, (one, two) in rows.items():
        values = found["base", one, "back"], found["ours", two, "back"]
        more = {"fill_mb": FILL_MB, "back": BACK_PERCENT}
        run.add("churn.{delay}.time_until_back", values, {"delay": row, **more})


def measure(run: Run) -> None:
    # Native guests have one CPU, and their memory at once: four of them fit.
    found, cpus = Values(), 1 if run.native else CPUS
    delays = (LONG, SHORT) if run.native else tuple(RUN_MS)
    run.job = {"memory": MEMORY, "cpus": cpus, "pairs": run.pairs, "fill_mb": FILL_MB}
    run.note(
        "An allocation is a mapping with a byte written to each page of 4 KiB, in huge pages; "
        f"the next one comes {PAUSE_MS} ms after it was freed. If it was reported meanwhile, the "
        "host has to find memory again: the figures of both sides include that. The first "
        "allocation of a run does not count.",
        f"The six processes have {FILL_MB} MB together, so that no guest swaps or runs out of "
        "memory. Each kernel and delay has its own guest; a run is "
        f"{', '.join(f'{ms} ms' for ms in RUN_MS.values())} long at a delay of "
        f"{', '.join(f'{ms} ms' for ms in RUN_MS)}, and its value is the mean of its allocations.",
        REPEATED,
        "Slower means that the 95 % bootstrap interval of the change of the median is above 0, "
        f"or that the change is more than {BEYOND:.0f} %, however wide that interval.",
    )
    device = balloon.device(free_page_reporting="on")
    specs = [
        Wanted(
            f"{name}-{delay}",
            run.spec(name, cpus=cpus, memory=MEMORY, devices=[device]),
            name,
            delay,
        )
        for delay in delays
        for name in ("base", "ours")
    ]
    with run.guests(specs) as sides:
        for side in sides:
            side.sh(f"echo {key(side)[1]} > {DELAY}")
        allocations(sides, run.pairs, found)
        give_back(sides, run.pairs, found)
    figures(run, found)
