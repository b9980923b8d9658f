# SPDX-License-Identifier: GPL-2.0
"""Driving kzeropaged in the guests of a bench, and the figures of what it did."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from lab.bench import BenchOptions
from lab.bench.jobs import Phase
from lab.bench.repeat import until_known
from lab.bench.session import DROP, MIB, Pair, Side, warm_host
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Target

WORDS = {"nothp": "4k", "thp": "thp"}
WARM_UPS = 1
SLOWDOWN_LIMIT = 1.0
FOLDER = "/sys/kernel/mm/zero_page"
# As fast as it can: what it costs does not depend on the pauses, and how long it takes does.
PACE = f"echo 0 > {FOLDER}/delay_millisecs"
DIRTY = f"fillfree --share 90 > /dev/null; {DROP}"
CORUNNER_MS = 1500
CORUNNER_TURNS = 10
# How many turns there are at most until the speed is known well enough.
CORUNNER_MOST = 30


@dataclass
class Cost:
    """What the thread did between two looks: bytes, seconds of CPU time, seconds until it was done."""

    bytes_zeroed: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    known_percent: list[float] = field(default_factory=list)


def number(side: Side, name: str) -> int:
    """A file of /sys/kernel/mm/zero_page."""
    return int(side.sh(f"cat {FOLDER}/{name}")[-1])


def free_bytes(side: Side) -> int:
    """MemFree."""
    return int(side.sh("awk '/^MemFree/ { print $2 }' /proc/meminfo")[-1]) * 1024


def zero_all(side: Side, cost: Cost, timeout: float = 300.0, look: float = 0.1) -> None:
    """Wait until the thread has nothing more to do, looking every ``look`` seconds."""
    bytes_before, cpu_before = number(side, "bytes_zeroed"), number(side, "cpu_millisecs")
    began = last = time.monotonic()
    side.sh(f"echo 1 > {FOLDER}/enabled")
    seen = bytes_before
    # Looking takes CPU time from it, so do not look all the time.
    while time.monotonic() - last < 1.0:
        time.sleep(look)
        now = number(side, "bytes_zeroed")
        if now != seen:
            seen, last = now, time.monotonic()
        if last - began > timeout:
            raise TestFailure(
                "Free memory does not become zero",
                f"after {timeout:.0f} s {seen - bytes_before} bytes were zeroed, and there is still more to do",
                f"see {FOLDER} in the guest: something may free memory all the time",
            )
    cost.bytes_zeroed.append(float(seen - bytes_before))
    cost.cpu_s.append((number(side, "cpu_millisecs") - cpu_before) / 1e3)
    cost.seconds.append(last - began)
    cost.known_percent.append(number(side, "node0/free_zeroed_bytes") / free_bytes(side) * 100)


def allocate(
    both: Pair, options: BenchOptions, mode: str, pages: str, cost: Cost, dirty: str = DIRTY
) -> Phase:
    """The job in both guests by turns, each time with free memory dirty before; ours zeroes it first."""
    phase = Phase()
    argv = ["alloc_once", "--size", str(options.size_mb), "--mode", mode, "--pages", pages]
    with step(f"{pages} {mode}: {options.pairs} pairs of {options.size_mb} MB"):
        for turn in range(-WARM_UPS, options.pairs):
            for side in both.sides(turn):
                if side.name == "ours":
                    side.sh(f"echo 0 > {FOLDER}/enabled")
                side.sh(dirty)
                if side.name == "ours":
                    zero_all(side, cost if turn >= 0 else Cost())
                warm_host(64 * MIB)
                with side.host_cost() as host:
                    told = side.json(*argv)
                if turn >= 0:
                    phase.of(side).add(side, told, host[0])
    return phase


def background_metrics(cost: Cost) -> list[Metric]:
    """What was spent beforehand; base spends nothing."""
    nothing = [0.0] * len(cost.cpu_s)
    return [
        Metric.of(
            "prezero.background_cpu",
            "s",
            nothing,
            cost.cpu_s,
            sentence="CPU time of the thread to zero what was dirty, once. It is in no other figure.",
        ),
        Metric.of(
            "prezero.background_bytes",
            "bytes",
            nothing,
            cost.bytes_zeroed,
            sentence="What the thread zeroed in that time.",
        ),
        Metric.of(
            "prezero.time_until_zero",
            "s",
            nothing,
            cost.seconds,
            sentence="Seconds from turning it on, with all free memory dirty and no pauses, until it was done.",
        ),
        Metric.of(
            "prezero.known_zero",
            "percent",
            nothing,
            cost.known_percent,
            sentence="Free memory that was known to be zero then.",
        ),
    ]


def corunner_metric(both: Pair, dirty: str = DIRTY) -> Metric:
    """How far another program comes while the thread has work to do, on the only CPU there is."""
    found: dict[str, list[float]] = {"base": [], "ours": []}
    with step(
        f"co-runner: {CORUNNER_TURNS} to {CORUNNER_MOST} pairs of {CORUNNER_MS} ms on ours, the thread off and on"
    ):
        side = both.ours
        for turn in until_known(CORUNNER_MOST, found.values(), least=CORUNNER_TURNS):
            for on in (turn % 2 == 0, turn % 2 != 0):
                side.sh(f"echo 0 > {FOLDER}/enabled; {dirty}")
                # In one step: the guest is idle between two, and the thread would be at work.
                switch = f"echo %d > {FOLDER}/enabled"
                told = side.json("sh", "-c", f"{switch % on}; corunner --ms {CORUNNER_MS}; {switch % False}")
                found["ours" if on else "base"].append(told["steps"] / told["wall_ns"] * 1e9)
                if on and number(side, "node0/free_zeroed_bytes") > 0.9 * free_bytes(side):
                    raise TestFailure(
                        "The thread was done before the co-runner was",
                        "it had nothing to do for a part of the time",
                        "give the guest more memory with --memory",
                    )
    made = Metric.of(
        "prezero.corunner",
        "steps/s",
        found["base"],
        found["ours"],
        sentence="Steps of another program on the same CPU; base is our kernel with the thread off, ours with "
        "the thread at work.",
    )
    change = made.change_percent or 0.0
    return replace(made, target=Target(f"at most {SLOWDOWN_LIMIT:.0f} % less", change >= -SLOWDOWN_LIMIT))
