# SPDX-License-Identifier: GPL-2.0
"""Memory that was in the balloon and is used again: the host has zeroed it, and the guest need not."""

from __future__ import annotations

import time

from lab.bench import BenchOptions
from lab.bench.jobs import (
    BASE_COUNTS,
    WARM_UPS,
    Phase,
    check_huge,
    clock_metric,
    elapsed,
    host_metrics,
    zeroed_metric,
)
from lab.bench.session import DROP, MIB, Pair, Side, built, host_facts, pair, reproduce, warm_host
from lab.boot import balloon
from lab.core.progress import step
from lab.report.results import Metric, Result

# Without reporting: nothing else tells the guest what is zero.
DEVICE = balloon.device(device_init_on_inflate="on")
LEFT_MB = 448  # what the guest keeps while the balloon is full
# What was never in the balloon would be taken as well: all of it but what the kernel wants for itself is in use.
SPARE_MB = 80
REST = "/tmp/rest"
# What was spared is in smaller blocks than what the balloon gives back, so it is what would be taken first.
FRAGMENTS = "/tmp/fragments"
KEEP_FRAGMENTS = f"dd if=/dev/zero of={FRAGMENTS} bs=1M count={SPARE_MB}"
KEEP_REST = f"dd if=/dev/zero of={REST} bs=1M count=$(($(awk '/^MemFree/ {{ print $2 }}' /proc/meminfo) / 1024 - {SPARE_MB}))"
REST_IN_USE = (
    f"What is free while the balloon is full is taken by a file in memory, but for {SPARE_MB} MB, so that the job uses "
    "pages that were in the balloon. As much is taken once more afterwards, since the smallest free blocks go first."
)
LIMIT = 1.0
KINDS = ("thp", "nothp")


def in_and_out(side: Side) -> None:
    """Make free memory dirty, put it into the balloon, and take it out again."""
    full = balloon.actual(side.guest)
    side.sh(f"rm -f {REST} {FRAGMENTS}; fillfree --share 85")
    side.sh(DROP)
    balloon.resize(side.guest, LEFT_MB * MIB)
    side.sh(f"{KEEP_REST} 2> /dev/null")
    balloon.resize(side.guest, full)
    side.sh(f"{KEEP_FRAGMENTS} 2> /dev/null")


def allocate(both: Pair, options: BenchOptions, kind: str) -> Phase:
    """The job on both sides by turns, each time on memory that has just left the balloon."""
    phase = Phase()
    argv = ["alloc_once", "--size", str(options.size_mb), "--mode", "populate", "--pages", kind]
    with step(f"{kind} after deflation: {options.pairs} pairs of {options.size_mb} MB"):
        for turn in range(-WARM_UPS, options.pairs):
            for side in both.sides(turn):
                in_and_out(side)
                warm_host((options.size_mb + 64) * MIB)
                with side.host_cost() as cost:
                    told = side.json(*argv)
                if turn >= 0:
                    phase.of(side).add(side, told, cost[0])
    return phase


def measure(both: Pair, options: BenchOptions) -> list[Metric]:
    """Both kinds of pages on a running pair."""
    metrics: list[Metric] = []
    for kind in KINDS:
        phase = allocate(both, options, kind)
        if kind == "thp":
            check_huge(phase, options)
        name = f"deflate.{kind}"
        metrics.append(zeroed_metric(f"{name}.guest_zeroed_bytes", "populate", phase, options, LIMIT))
        metrics.append(clock_metric(f"{name}.task_clock", "populate", phase, None))
        metrics += host_metrics(name, phase)
    return metrics


def run(options: BenchOptions) -> Result:
    """Measure what is saved after deflation; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images, balloon=DEVICE) as both:
        metrics = measure(both, options)
        accel = both.accel
    return Result(
        name="deflate",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("deflate", options, accel),
        metrics=metrics,
        job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=[BASE_COUNTS, REST_IN_USE],
        seconds=elapsed(began),
    )
