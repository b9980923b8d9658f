# SPDX-License-Identifier: GPL-2.0
"""Host memory: how large the VMM is before the guest fills its memory, full, and after it freed it."""

from __future__ import annotations

import json
import time

from lab.bench import BenchOptions
from lab.bench.jobs import elapsed
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import until_known
from lab.bench.session import DELAY, MIB, Pair, Side, built, host_facts, pair, reproduce, resident, warm_host
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

FILL_MB = 768


def fill(side: Side, size_mb: int = FILL_MB, processes: int = 1, *, more: str = "", warm: bool = True) -> int:
    """Have ``processes`` fill ``size_mb`` each and hold them; resident bytes of the VMM then.

    ``more``: options of fillfree. ``warm``: see ``warm_host``; needed for times.
    """
    if warm:
        warm_host(processes * size_mb * MIB)
    # Held in the background: the shell goes on while the memory stays filled.
    side.sh("rm -f /tmp/hold /tmp/filled*; mkfifo /tmp/hold")
    numbers = " ".join(map(str, range(processes)))
    side.sh(
        f"for n in {numbers}; do (fillfree --size {size_mb} {more} --hold < /tmp/hold > /tmp/filled$n) & done; "
        "exec 9> /tmp/hold"
    )
    filled = side.sh(
        f"for i in $(seq 600); do test $(cat /tmp/filled* | grep -c filled_bytes) = {processes} && break; "
        "sleep 0.1; done; cat /tmp/filled*"
    )
    told = [json.loads(line).get("filled_bytes") for line in filled if line.startswith("{")]
    if told != [size_mb * MIB] * processes:
        raise TestFailure(
            f"The {side.name} guest did not fill {processes} times {size_mb} MB",
            f"fillfree said {filled}",
            "give the guest more memory with --memory",
        )
    return resident(side.guest.pid)


def release(side: Side) -> None:
    """Have what ``fill`` left running free its memory; does not wait until it has."""
    side.sh("echo >&9; exec 9>&-")


def until_back(side: Side, full: int, wanted: int, timeout: float = 120.0) -> None:
    """Wait until the VMM, which had ``full`` resident bytes, has ``wanted`` less; TestFailure after ``timeout`` s.

    A worker that was to run late, as the first one of a boot, is not called any sooner by a new delay.
    """
    began = time.monotonic()
    while (back := full - resident(side.guest.pid)) < wanted:
        if time.monotonic() - began > timeout:
            raise TestFailure(
                f"The host does not get its memory back ({side.name})",
                f"after {timeout:.0f} s it has {back // MIB} MB of the {wanted // MIB} MB that are waited for",
                f"look at {DELAY} in the guest, and at the status of the balloon",
            )
        time.sleep(0.005)


def fill_and_free(side: Side) -> tuple[float, float]:
    """Resident bytes of the VMM when the guest's memory is full, and after it was freed."""
    full = fill(side)
    release(side)
    side.sh("wait")
    return float(full), float(side.settle())


def measure(both: Pair, options: BenchOptions, rounds: int, least: int = 0) -> list[Metric]:
    """Fill and free much of it a few times on a running pair.

    ``rounds`` times, or until that is known well enough, but no fewer than ``least`` times.
    """
    # Before it was filled, full, and after it was freed.
    found: dict[str, tuple[list[float], ...]] = {name: ([], [], []) for name in ("base", "ours")}
    with step(f"host memory: {FILL_MB} MB filled and freed, up to {rounds} times in each guest"):
        before = {side.name: float(side.settle()) for side in both.sides(0)}
        for turn in until_known(rounds, [one for three in found.values() for one in three], least):
            for side in both.sides(turn):
                full, after = fill_and_free(side)
                for values, value in zip(found[side.name], (before[side.name], full, after), strict=True):
                    values.append(value)
                before[side.name] = after
    names = ("before_fill", "full", "after_free")
    words = (
        "Resident memory of the VMM before the guest fills its memory.",
        f"Resident memory of the VMM while the guest holds {FILL_MB} MB.",
        "Resident memory of the VMM after the guest freed and reported it: the host has it back. "
        "(Base reports when it gets to it and leaves a rest; ours is told to report everything.)",
    )
    metrics = []
    for index, (name, sentence) in enumerate(zip(names, words, strict=True)):
        base, ours = found["base"][index], found["ours"][index]
        target = None
        if name == "after_free":
            back = [
                1 - (row[2] - row[0]) / max(1.0, row[1] - row[0]) for row in zip(*found["ours"], strict=True)
            ]
            worst = min(back) * 100
            target = Target(f"at least 95 % of what was filled comes back ({worst:.1f} %)", worst >= 95)
        metrics.append(
            Metric.of(f"host.resident_{name}_bytes", "bytes", base, ours, sentence=sentence, target=target)
        )
    return metrics


def run(options: BenchOptions) -> Result:
    """Measure host memory alone; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images) as both:
        metrics = measure(both, options, options.pairs)
        return Result(
            name="host",
            accelerator=both.accel,
            versions=images.versions(),
            reproduce=reproduce("host", options, both.accel),
            metrics=metrics,
            job={"size_mb": FILL_MB, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
            host=host_facts(),
            notes=[REPEATED],
            seconds=elapsed(began),
        )
