# SPDX-License-Identifier: GPL-2.0
"""What guest/hotpath.c repeats does what the bench says of it, and takes few instructions more than
on the base.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from lab.bench import hotpath, plan, runner
from lab.bench.plan import BenchOptions
from lab.bench.table import BENCHES
from tests.guest.guests import fine, run

pytestmark = pytest.mark.boots

TRACE = "/sys/kernel/tracing"
REPS = 7
LISTED = {"list0": None, "list3": 3, "list9": 9}
PATHS = [*hotpath.PATHS, *hotpath.MORE, *hotpath.NEW]


def test_listed_mounts_take_one_block() -> None:
    """As the kernel traces it.

    A block of that order for each call, which is freed, and none without room.
    """
    every = sorted({path.name for path in PATHS})
    lines = [f"cd {TRACE}", "echo 8192 > buffer_size_kb"]
    lines += [f"echo 1 > events/kmem/{event}/enable" for event in ("mm_page_alloc", "mm_page_free")]
    for name in LISTED:
        lines += ["echo > trace", f"hotpath --reps {REPS} {name}", f"echo after {name}"]
        lines.append("grep -E 'hotpath-.* mm_page_(alloc|free):' trace")
    lines += ["echo 0 > tracing_on", f"hotpath --reps {REPS} {' '.join(every)}"]
    done = run("; ".join(lines), kernel="knownzero", devices=[])
    fine(done)

    seen: dict[str, Counter[tuple[str, int]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("after "):
            seen[line.split()[1]] = Counter()
        elif found := re.search(r"mm_page_(alloc|free): .*order=(\d+)", line):
            seen[list(seen)[-1]][found[1], int(found[2])] += 1
    calls = REPS + hotpath.WARM_UPS
    for name, order in LISTED.items():
        for other in (3, 9):
            for event in ("alloc", "free"):
                assert seen[name][event, other] == (calls if other == order else 0), (
                    name,
                    seen[name],
                )
    assert set(hotpath.medians(done.stdout.splitlines())) == {*LISTED, *every}


@pytest.mark.nightly
def test_idle_paths_are_within_the_limit() -> None:
    """Load changes no count, nor does chance: compilers do."""
    options = BenchOptions(pairs=1, accel="tcg")
    wanted = plan.plan(BENCHES["hotpath"], options)
    both = {name: wanted.kernels[name] for name in ("base", "ours")}
    images = plan.build(replace(wanted, kernels=both))
    run = runner.Run(BENCHES["hotpath"], options, images)
    rows = hotpath._count(run, images.kernels, hotpath.PATHS, 1)
    hotpath.compare(run, rows, hotpath.PATHS, hotpath.IDLE)
    assert sum(metric.target is not None for metric in run.metrics) == 3
    assert not [metric for metric in run.metrics if metric.target and not metric.target.met]
