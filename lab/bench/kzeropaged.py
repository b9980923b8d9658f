# SPDX-License-Identifier: GPL-2.0
"""Driving kzeropaged in the guests of a bench, and the figures of its work."""

from __future__ import annotations

import time

from lab.bench import BenchOptions
from lab.bench.jobs import SPARE, Phase
from lab.bench.jobs import allocate as allocate_once
from lab.bench.repeat import Values, turns
from lab.bench.runner import Pair, Run
from lab.bench.session import DROP, Side
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Target

WORDS = {"nothp": "4k", "thp": "thp"}
PAGES = {"nothp": "4 KiB pages", "thp": "huge pages"}
SLOWDOWN_LIMIT = 1.0
FOLDER = "/sys/kernel/mm/zero_page"
OFF, ON = (f"echo {value} > {FOLDER}/enabled" for value in (0, 1))
PACE = f"echo 0 > {FOLDER}/delay_millisecs"  # no pauses: they do not change its CPU time, and take long
DIRTY = f"fillfree --share 90 > /dev/null; {DROP}"
CORUNNER_MS = 1500
CORUNNER_TURNS, CORUNNER_MOST = 10, 30


def number(side: Side, name: str) -> int:
    """A file of /sys/kernel/mm/zero_page."""
    return side.number(f"cat {FOLDER}/{name}")


def free_bytes(side: Side) -> int:
    """MemFree."""
    return side.number("awk '/^MemFree/ { print $2 }' /proc/meminfo") * 1024


def zero_all(side: Side, timeout: float = 300.0, look: float = 0.1) -> dict[str, float]:
    """Turn the thread on and wait until it has no more work; bytes, CPU seconds, seconds, percent known to be zero.

    It looks every ``look`` seconds: that takes CPU time from the thread.
    """
    bytes_before, cpu_before = number(side, "bytes_zeroed"), number(side, "cpu_millisecs")
    began = last = time.monotonic()
    side.sh(ON)
    seen = bytes_before
    while time.monotonic() - last < 1.0:
        time.sleep(look)
        now = number(side, "bytes_zeroed")
        if now != seen:
            seen, last = now, time.monotonic()
        if last - began > timeout:
            raise TestFailure(
                "Free memory does not become zero",
                f"after {timeout:.0f} s {seen - bytes_before} bytes were zeroed, and there is still more to do",
                f"see {FOLDER} in the guest: a program may free memory all the time",
            )
    return {
        "bytes": float(seen - bytes_before),
        "cpu": (number(side, "cpu_millisecs") - cpu_before) / 1e3,
        "seconds": last - began,
        "known": number(side, "node0/free_zeroed_bytes") / free_bytes(side) * 100,
    }


def allocate(
    run: Run,
    both: Pair,
    name: str,
    mode: str,
    pages: str,
    cost: Values,
    *,
    options: BenchOptions | None = None,
    dirty: str = DIRTY,
    where: str = "",
) -> Phase:
    """The job, each time with free memory dirty before, which ours zeroes first; ``cost`` is that of the thread."""

    def prepare(side: Side, counts: bool) -> None:
        if side.name == "ours":
            side.sh(OFF)
        side.sh(dirty)
        if side.name == "ours":
            spent = zero_all(side)
            if counts:
                cost.note(**spent)

    kind = f" after pre-zeroing, {PAGES[pages]}{where}"
    return allocate_once(
        run, both, name, mode, pages, options=options, prepare=prepare, warm=SPARE, kind=kind
    )


def background(run: Run, cost: Values, prefix: str = "prezero", where: str = "") -> None:
    """Add the figures of the thread, which no other figure includes; base has no such thread."""
    for name, unit, key, words in (
        ("background_cpu", "s", "cpu", "CPU time to zero all dirty memory once"),
        ("background_bytes", "bytes", "bytes", "bytes zeroed"),
        ("time_until_zero", "s", "seconds", "time until done, without pauses"),
        ("known_zero", "percent", "known", "free memory known to be zero then"),
    ):
        both = [0.0] * len(cost[key,]), cost[key,]
        run.add(f"{prefix}.{name}", unit, both, f"Work of kzeropaged beforehand{where}: {words}.")


def _slowdown(metric: Metric) -> Target:
    change = metric.change_percent or 0.0
    return Target(f"at most {SLOWDOWN_LIMIT:.0f} % less", change >= -SLOWDOWN_LIMIT)


def corunner(run: Run, side: Side, prefix: str = "prezero", where: str = "", dirty: str = DIRTY) -> None:
    """Add the speed of another program on the only CPU, with the thread off and with the thread at work."""
    found = Values()
    with step(
        f"co-runner: {CORUNNER_TURNS} to {CORUNNER_MOST} pairs of {CORUNNER_MS} ms on ours, the thread off and on"
    ):
        known = found.both("rate")
        for name, _ in turns(("base", "ours"), CORUNNER_MOST, known, least=CORUNNER_TURNS, warm_ups=0):
            side.sh(f"{OFF}; {dirty}")
            # In one step: between two steps the guest is idle, and the thread would work then.
            switch = ON if name == "ours" else OFF
            answer = side.json("sh", "-c", f"{switch}; corunner --ms {CORUNNER_MS}; {OFF}")
            found[name, "rate"].append(answer["steps"] / answer["wall_ns"] * 1e9)
            if name == "ours" and number(side, "node0/free_zeroed_bytes") > 0.9 * free_bytes(side):
                why = "all free memory was zero before the end of a run"
                fix = "give the guest more memory with --memory"
                raise TestFailure("The thread was done before the co-runner was", why, fix)
    words = f"Steps of another program on our kernel{where}: kzeropaged off, and at work on the same CPU."
    run.add(f"{prefix}.corunner", "steps/s", found.both("rate"), words, _slowdown)
