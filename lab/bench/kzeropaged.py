# SPDX-License-Identifier: GPL-2.0
"""Driving kzeropaged in the guests of a bench, and the figures of its work."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from lab.bench.jobs import SPARE, Job
from lab.bench.jobs import allocate as allocate_once
from lab.bench.repeat import Values, measured
from lab.bench.runner import Pair, Run
from lab.bench.session import DROP, PAGE, Side, cpu_ns
from lab.core.errors import TestFailure

GIB = 1 << 30
WORDS = {"nothp": "4k", "thp": "thp"}
FOLDER = "/sys/kernel/mm/zero_page"
OFF, ON = (f"echo {value} > {FOLDER}/enabled" for value in (0, 1))
DIRTY = f"fillfree --share 90 > /dev/null; {DROP}"
# The thread is done when the guest used less than this share of each slice for so long; after steal
# time the thread pauses for a second.
LOOK_S, BUSY, STILL_S, WAIT_S = 0.05, 0.2, 2.0, 300.0
CORUNNER_MS = 1500
CORUNNER_TURNS, CORUNNER_MOST = 10, 30
FAULT_TURNS = 10
PREZEROED = "pgzeroed_set_prezeroed"
ZEROED = f"awk '/^{PREZEROED}/ {{ print $2 }}' /proc/vmstat"
KNOWN = (
    "awk '/^pgzeroed_set/ { n += $2 } /^pgzeroed_(skip|lost)/ { n -= $2 } END { print n }' "
    "/proc/vmstat"
)
FREE = "awk '/^nr_free_pages / { print $2 }' /proc/vmstat"
# In hundredths of a second. The threads end when the thread is turned off.
CPU = "cat /proc/[0-9]*/stat 2>/dev/null | awk '/kzeropaged/ { n += $15 } END { print n + 0 }'"


def known_percent(side: Side) -> float:
    """Free memory that is known to be zero."""
    return side.number(KNOWN) / side.number(FREE) * 100


def make_dirty(side: Side) -> None:
    side.sh(DIRTY)


def wait_until_idle(side: Side) -> None:
    """Wait until the guest has been idle for STILL_S.

    Seen from outside: the thread gives up its block and pauses when a program in the guest looks.
    """
    began = last = time.monotonic()
    seen = cpu_ns(side.guest.pid)
    while time.monotonic() - last < STILL_S:
        time.sleep(LOOK_S)
        now, spent = time.monotonic(), cpu_ns(side.guest.pid)
        if spent - seen > BUSY * LOOK_S * 1e9:
            last = now
        seen = spent
        if last - began > WAIT_S:
            why = f"after {WAIT_S:.0f} s the guest is still busy"
            fix = f"see {FOLDER} in the guest: a program may free memory all the time"
            raise TestFailure("Free memory does not become zero", why, fix)


def zero_all(side: Side, dirty: Callable[[Side], object] = make_dirty) -> dict[str, float]:
    """Turn the thread on, make memory dirty, and wait until the thread is done.

    It zeroes as much as programs have waited for while it was on, so it must be on before
    ``dirty``. CPU seconds, in all and for each GiB, and percent known zero.
    """
    side.sh(ON)
    before, cpu_before = side.number(ZEROED), side.number(CPU)
    dirty(side)
    wait_until_idle(side)
    gib = (side.number(ZEROED) - before) * PAGE / GIB or 1.0
    cpu = (side.number(CPU) - cpu_before) / 100
    return {"cpu": cpu, "gib_cpu": cpu / gib, "known_zero": known_percent(side)}


def allocate(run: Run, both: Pair, mode: str, pages: str) -> Values:
    """The job, each time with free memory dirty before, which ours zeroes first."""

    def prepare(side: Side) -> dict[str, float]:
        if side.name == "ours":
            return zero_all(side)
        make_dirty(side)
        wait_until_idle(side)
        return {}

    job = Job("prezero.{pages}.{mode}", mode, pages, {"pages": WORDS[pages], "mode": mode})
    return allocate_once(run, both, job, prepare=prepare, warm=SPARE)


def background(run: Run, found: Sequence[Values]) -> None:
    """Add the figures of the thread, which no other figure includes; base has no such thread."""
    for name in ("known_zero", "gib_cpu"):
        values = [value for job in found for value in job["ours", name]]
        run.add(f"prezero.{name}", ([0.0] * len(values), values))


def beside(side: Side, works: bool, command: str) -> dict[str, Any]:
    """The answer of a program that runs while memory is dirty, and the thread on or off."""
    # In one step: between two steps the guest is idle, and the thread would work then. Turned on
    # before the fill, it has to zero as much as the fill has waited for.
    script = f"{ON if works else OFF}; {DIRTY}; {command}; {OFF}"
    answer: dict[str, Any] = side.json("sh", "-c", script)
    if works and known_percent(side) > 90:
        why = "all free memory was zero before the end of a run"
        fix = "give the guest more memory with --memory"
        raise TestFailure("The thread was done before the program beside it was", why, fix)
    return answer


def faults(run: Run, side: Side) -> None:
    """Add how long a page fault takes, with its mapping, with the thread off and with the thread on
    and memory to zero.
    """
    statistics = ("median", "p99", "longest")

    def once(name: str) -> dict[str, float]:
        answer = beside(side, name == "ours", f"stall --mode alloc --ms {CORUNNER_MS}")
        return {key: answer[f"{key}_ns"] / 1e3 for key in statistics}

    words = f"page faults for {CORUNNER_MS} ms on ours, the thread off and on"
    found = measured(words, ("base", "ours"), once, FAULT_TURNS)
    for key in statistics:
        run.add("prezero.fault.{statistic}", found.both(key), {"statistic": key})


def corunner(run: Run, side: Side) -> None:
    """Add the speed of another program on the only CPU, with the thread off and with the thread on
    and memory to zero.
    """

    def once(name: str) -> dict[str, float]:
        answer = beside(side, name == "ours", f"corunner --ms {CORUNNER_MS}")
        return {"rate": answer["steps"] / answer["wall_ns"] * 1e9}

    found = measured(
        f"co-runner for {CORUNNER_MS} ms on ours, the thread off and on",
        ("base", "ours"),
        once,
        CORUNNER_MOST,
        known=[("base", "rate"), ("ours", "rate")],
        least=CORUNNER_TURNS,
        warm_ups=0,
    )
    run.add("prezero.corunner", found.both("rate"))
