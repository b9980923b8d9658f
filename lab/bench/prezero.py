# SPDX-License-Identifier: GPL-2.0
"""Pre-zeroing: most of a guest's memory populated, with and without free memory having been zeroed before."""

from __future__ import annotations

import time
from dataclasses import replace

from lab.bench import BenchOptions, prezero_cost
from lab.bench.jobs import BASE_COUNTS, MODES, check_huge, clock_metric, elapsed, zeroed_metric
from lab.bench.kzeropaged import PACE, WORDS, Cost, allocate, background_metrics, corunner_metric
from lab.bench.session import Pair, built, host_facts, pair, reproduce
from lab.report.results import Metric, Result

# The seed's own figures: 24.3 to 10.6 s with 4 KiB pages, 15.9 to 1.9 s with huge pages.
SAVINGS = {"nothp": 57.0, "thp": 88.0}
SHARE = 0.75


def measure(both: Pair, options: BenchOptions) -> tuple[list[Metric], list[str]]:
    """All phases on a running pair: metrics and notes."""
    both.ours.sh(PACE)
    cost = Cost()
    metrics: list[Metric] = []
    for pages, word in WORDS.items():
        for mode in MODES:
            phase = allocate(both, options, mode, pages, cost)
            if pages == "thp":
                check_huge(phase, options)
            saving = SAVINGS[pages] if mode == "populate" else None
            name = f"prezero.{word}.{mode}"
            metrics.append(clock_metric(f"{name}.task_clock", mode, phase, saving))
            metrics.append(zeroed_metric(f"{name}.guest_zeroed_bytes", mode, phase, options, None))
    metrics += background_metrics(cost)
    metrics.append(corunner_metric(both))
    return metrics, [BASE_COUNTS]


def run(options: BenchOptions) -> Result:
    """Measure pre-zeroing; raises LabError when that is not possible."""
    began = time.monotonic()
    unit = {"G": 1024, "M": 1}[options.memory[-1]]
    options = replace(options, size_mb=int(int(options.memory[:-1]) * unit * SHARE) // 2 * 2)
    images = built(options)
    # Without a balloon: what the host does would be a second source.
    with pair(options, images, balloon=None) as both:
        accel = both.accel
        metrics, notes = measure(both, options)
    more, remarks = prezero_cost.measure(options, images)
    return Result(
        name="prezero",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("prezero", options, accel),
        metrics=metrics + more,
        job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=notes + remarks,
        seconds=elapsed(began),
    )
