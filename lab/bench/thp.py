# SPDX-License-Identifier: GPL-2.0
"""The main job: huge pages for 256 MB, and the costs around it."""

from __future__ import annotations

from lab.bench import host, hotpath, order0
from lab.bench.jobs import BASE_COUNTS, MODES, TOUCHED, Phase, allocate
from lab.bench.runner import Pair, Run

# The saving of the posted series for populate, and this project's target for touch_all.
SAVINGS: dict[str, float | None] = {"populate": 78.0, "touch_line": None, "touch_all": 40.0}
ZEROED_LIMIT = 1.0


def figures(run: Run, both: Pair) -> None:
    """The three modes of the job."""
    run.note(BASE_COUNTS, TOUCHED)
    for mode in MODES:
        phase = allocate(run, both, f"thp.{mode}", mode, "thp")
        phase.check_huge()
        phase.zeroed(ZEROED_LIMIT)
        phase.clock(SAVINGS[mode])
        phase.host()
    run.note(_host_share(phase))


def _host_share(phase: Phase) -> str:
    base, ours = (sum(runs.host_system_ms) / len(runs.host_system_ms) for runs in (phase.base, phase.ours))
    return (
        f"When everything is touched, the host's kernel takes {phase.ours.host_share[0]:.0f} % of the task-clock on ours, "
        f"{ours:.0f} ms a run ({base:.0f} ms on base): mostly page faults, since the host finds and zeroes the memory "
        "when it is touched. The guest cannot save that part."
    )


def measure(run: Run) -> None:
    """The main job, order 0, host memory, and the hot paths."""
    with run.pair() as both:
        figures(run, both)
        order0.figures(run, both)
        host.figures(run, both, least=run.pairs)
    hotpath.idle(run, boots=1)
