# SPDX-License-Identifier: GPL-2.0
"""The main job: huge pages for 256 MB, and everything that must hold around them."""

from __future__ import annotations

import time

from lab.bench import BenchOptions, hostmemory, hotpath, order0
from lab.bench.jobs import (
    BASE_COUNTS,
    MODES,
    allocate,
    check_huge,
    clock_metric,
    elapsed,
    host_metrics,
    host_share_note,
    zeroed_metric,
)
from lab.bench.session import Pair, built, host_facts, pair, reproduce
from lab.report.results import Metric, Result

# The seed's own figure for populate, and the project's for everything touched.
SAVINGS: dict[str, float | None] = {"populate": 78.0, "touch_line": None, "touch_all": 40.0}
ZEROED_LIMIT = 1.0


def measure(both: Pair, options: BenchOptions) -> tuple[list[Metric], list[str]]:
    """The three phases on a running pair: metrics and notes."""
    metrics: list[Metric] = []
    notes = [BASE_COUNTS]
    for mode in MODES:
        phase = allocate(both, options, mode, "thp")
        check_huge(phase, options)
        metrics.append(clock_metric(f"thp.{mode}.task_clock", mode, phase, SAVINGS[mode]))
        metrics.append(zeroed_metric(f"thp.{mode}.guest_zeroed_bytes", mode, phase, options, ZEROED_LIMIT))
        metrics += host_metrics(f"thp.{mode}", phase)
        if mode == "touch_all":
            notes.append(host_share_note(phase))
    return metrics, notes


def run(options: BenchOptions) -> Result:
    """Measure everything the main job must show (a minute or two); raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images) as both:
        metrics, notes = measure(both, options)
        more, more_notes = order0.measure(both, options)
        metrics += more
        notes += more_notes
        metrics += hostmemory.measure(both, options, options.pairs, least=options.pairs)
        accel = both.accel
    counts, count_notes = hotpath.measure(options, images, boots=1)
    return Result(
        name="thp",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("thp", options, accel),
        metrics=metrics + counts,
        job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=notes + count_notes,
        seconds=elapsed(began),
    )
