# SPDX-License-Identifier: GPL-2.0
"""Pre-zeroing: most of a guest's memory populated, with and without free memory zeroed before."""

from __future__ import annotations

from dataclasses import replace

from lab.bench import prezero_cost
from lab.bench.jobs import BASE_COUNTS, MODES
from lab.bench.kzeropaged import PACE, WORDS, allocate, background, corunner
from lab.bench.repeat import Values
from lab.bench.runner import Pair, Run

# Of the posted series: 24.3 to 10.6 s with 4 KiB pages, 15.9 to 1.9 s with huge pages.
SAVINGS = {"nothp": 57.0, "thp": 88.0}
SHARE = 0.75


def figures(run: Run, both: Pair) -> None:
    """All modes with both kinds of pages, the thread, and the co-runner."""
    run.note(BASE_COUNTS)
    both.ours.sh(PACE)
    cost = Values()
    for pages, word in WORDS.items():
        for mode in MODES:
            phase = allocate(run, both, f"prezero.{word}.{mode}", mode, pages, cost)
            if pages == "thp":
                phase.check_huge()
            phase.clock(SAVINGS[pages] if mode == "populate" else None)
            phase.zeroed()
    background(run, cost)
    corunner(run, both.ours)


def measure(run: Run) -> None:
    """The job, and then the whole cost."""
    run.options = replace(run.options, size_mb=int(run.options.memory_mb * SHARE) // 2 * 2)
    # Without a balloon: the host would be a second source of zeros.
    with run.pair(balloon=None) as both:
        figures(run, both)
    prezero_cost.figures(run)
