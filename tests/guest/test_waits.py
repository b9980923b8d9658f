# SPDX-License-Identifier: GPL-2.0
"""How long other tasks wait beside a load, on base and with all that the series does."""

from __future__ import annotations

import os
from typing import Any

import pytest

from lab.build.linux import build_linux
from tests.guest import test_stress_ng as stress_ng
from tests.guest.guests import (
    BALLOON,
    DELAY,
    HUGE_PAGES,
    KZEROPAGED,
    STRESS_SEED,
    Record,
    expect_at_most,
    fine,
    objects,
    run,
)

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.hunt]

SECONDS = 60
TURNS = 3
# As often as the knobs allow, so that as much as possible is under way at any moment.
SOURCES = {
    "kzeropaged": KZEROPAGED,
    "reports": f"echo 200 > {DELAY}",
}
# Configuration, command line, sources. A real-time kernel has no kzeropaged.
KERNELS = {
    "lazy": ("", "preempt=lazy", ("reports", "kzeropaged")),
    "full": ("", "preempt=full", ("reports", "kzeropaged")),
    "real-time": ("rt", "", ("reports",)),
}
# In the background: the leak hunter with its drivers; the stressors of a foreign suite; a program
# that uses the same memory again and again, as in test_soak.py.
HUNT = (
    f"stress --seconds {SECONDS} --seed {STRESS_SEED} compact pressure hugetlb > /dev/null & "
    f"leak_hunter --setup --seconds {SECONDS} --seed {STRESS_SEED} --workers 2 > /dev/null & "
)
SOAK = (
    f"timeout {SECONDS} sh -c 'while :; do alloc_once --size 384 --pages thp --mode touch_all "
    "> /dev/null; done' & "
)
LOADS = {
    "hunt": HUNT,
    "stress-ng": stress_ng.started(stress_ng.together(stress_ng.STRESSORS["all sorts"]), SECONDS),
    "soak": SOAK,
}
# Contiguous memory needs a file of debug kernels: test_no_task_waits_for_it allocates some.
TASKS = {"map", "fault", "huge", "compact", "offline", "flush"}


def watched(kernel: str, append: str, load: str, before: str) -> dict[str, dict[str, Any]]:
    """The times of the watcher's tasks in a guest."""
    foreign = ("stress-ng", "usr/bin/stress-ng")
    result = run(
        f"{before}; {LOADS[load]}waits --seconds {SECONDS}; wait",
        kernel=kernel,
        devices=[BALLOON],
        cpus=2,
        memory="1G",
        append=append,
        timeout=300.0 + 4 * SECONDS,
        add=stress_ng.with_libraries(*foreign) if load == "stress-ng" else [],
    )
    fine(result)
    (found,) = (one["waits"] for one in objects(result) if "waits" in one)
    return dict(found)


def longest(rounds: list[dict[str, dict[str, Any]]], task: str, what: str) -> float:
    return max(float(one[task][what]) for one in rounds if task in one)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("name", "load"),
    [*((name, "hunt") for name in KERNELS), ("lazy", "stress-ng"), ("lazy", "soak")],
)
def test_no_task_waits_longer_than_on_base(name: str, load: str, record_property: Record) -> None:
    config, append, sources = KERNELS[name]
    ours = os.environ.get("KNOWNZERO_TEST_KERNEL") or str(build_linux("knownzero", config=config))
    base = str(build_linux("base", config=config))
    # A real-time kernel has no huge pages.
    without = {"huge"} if name == "real-time" else set()
    setup = "true" if without else HUGE_PAGES
    both = "; ".join([setup, *(SOURCES[source] for source in sources)])
    on, off = [], []
    for _ in range(TURNS):
        off.append(watched(base, append, load, setup))
        on.append(watched(ours, append, load, both))
    done = set().union(*on)
    assert TASKS - done <= without
    # Base has no flush.
    expect_at_most(longest(on, "flush", "worst_us"), 5_000_000)
    for task in sorted(done & set().union(*off)):
        for what in ("p999_us", "worst_us"):
            before, after = longest(off, task, what), longest(on, task, what)
            record_property(f"{task}_{what}", f"{before:.0f} {after:.0f}")
            print(f"{task} {what}: {before:.0f} on base, {after:.0f} with the series")
            # As in test_no_task_waits_for_it: what waits for kzeropaged waits for seconds.
            expect_at_most(after, 1.2 * before + 200_000)
