# SPDX-License-Identifier: GPL-2.0
"""The same memory in 4 KiB pages: the share that comes from blocks the host has zeroed."""

from __future__ import annotations

from lab.bench.jobs import BASE_COUNTS, allocate
from lab.bench.runner import Pair, Run
from lab.report.results import Metric, Target

SKIPPED_AT_LEAST = 21.0


def _enough(metric: Metric) -> Target:
    return Target(f"at least {SKIPPED_AT_LEAST:.0f} %", metric.ours.median >= SKIPPED_AT_LEAST)


def figures(run: Run, both: Pair) -> None:
    """Populate with huge pages off."""
    run.note(BASE_COUNTS)
    phase = allocate(run, both, "order0.populate", "populate", "nothp", kind=", 4 KiB pages")
    values = phase.base.skipped_percent, phase.ours.skipped_percent
    words = "4 KiB pages whose zeroing was skipped: of all pages of the job; they were known to be zero."
    run.add("order0.populate.skipped_percent", "percent", values, words, _enough)
    phase.clock()
    phase.zeroed()


def measure(run: Run) -> None:
    """Order 0 alone."""
    with run.pair() as both:
        figures(run, both)
