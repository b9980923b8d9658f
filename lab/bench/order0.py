# SPDX-License-Identifier: GPL-2.0
"""The same memory in 4 KiB pages: how much of it comes from blocks the host has zeroed."""

from __future__ import annotations

import time
from dataclasses import replace

from lab.bench import BenchOptions
from lab.bench.jobs import BASE_COUNTS, allocate, clock_metric, elapsed, zeroed_metric
from lab.bench.session import Pair, built, host_facts, pair, reproduce
from lab.report.results import Metric, Result, Target

SKIPPED_AT_LEAST = 21.0


def measure(both: Pair, options: BenchOptions) -> tuple[list[Metric], list[str]]:
    """Populate with huge pages off, on a running pair."""
    phase = allocate(both, options, "populate", "nothp")
    skipped = Metric.of(
        "order0.populate.skipped_percent",
        "percent",
        phase.base.skipped_percent,
        phase.ours.skipped_percent,
        sentence="4 KiB pages known to be zero, so that zeroing them was skipped, of all pages of the job.",
    )
    met = skipped.ours.median >= SKIPPED_AT_LEAST
    skipped = replace(skipped, target=Target(f"at least {SKIPPED_AT_LEAST:.0f} %", met))
    return [
        skipped,
        clock_metric("order0.populate.task_clock", "populate", phase, None),
        zeroed_metric("order0.populate.guest_zeroed_bytes", "populate", phase, options, None),
    ], []


def run(options: BenchOptions) -> Result:
    """Measure order 0 alone; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images) as both:
        metrics, notes = measure(both, options)
        return Result(
            name="order0",
            accelerator=both.accel,
            versions=images.versions(),
            reproduce=reproduce("order0", options, both.accel),
            metrics=metrics,
            job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
            host=host_facts(),
            notes=[BASE_COUNTS, *notes],
            seconds=elapsed(began),
        )
