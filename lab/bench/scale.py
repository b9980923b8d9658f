# SPDX-License-Identifier: GPL-2.0
"""The cost to report, flush and pre-zero guests of several sizes, for each GiB."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

from lab.bench import host as memory
from lab.bench.host import MORE, SIZES, fill, needed_gb, release, sizes, until_back
from lab.bench.kzeropaged import FOLDER, OFF, zero_all
from lab.bench.plan import available_gb
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import Values, turns
from lab.bench.runner import Run
from lab.bench.session import (
    AT_ONCE,
    BALLOON,
    DROP,
    FLUSH,
    LATE,
    MIB,
    Side,
    Wanted,
    cpu_ns,
    resident,
)
from lab.core.errors import TestFailure
from lab.core.progress import step

GIB = 1024 * MIB
CPUS = 2  # one for the work, one to look at it
FILL_PERCENT = 40
BACK_PERCENT = 90
# Less than a flush: freed memory in the lists of the CPU, huge pages among it, is not reported.
REPORTED_PERCENT = 80
LIMIT, BEYOND = 25.0, 50.0  # as in metrics.toml
SIDES = ["smallest guest", "larger guest"]
LOOK_S = 0.02
ACTIONS = ("report_base", "report", "flush", "prezero")
# Bytes, seconds and CPU seconds of a step.
Cost = tuple[float, float, float]


def fill_mb(side: Side) -> int:
    return memory.fill_mb(side.amount, FILL_PERCENT)


def report(side: Side, timeout: float = 120.0) -> Cost:
    """Fill, free, and wait until the worker has reported; CPU seconds of the VMM."""
    full = fill(side, fill_mb(side))
    cpu, began = cpu_ns(side.guest.pid), time.monotonic()
    release(side)
    until_back(side, full, fill_mb(side) * MIB * REPORTED_PERCENT // 100, timeout)
    found = (
        full - resident(side.guest.pid),
        time.monotonic() - began,
        (cpu_ns(side.guest.pid) - cpu) / 1e9,
    )
    side.sh("wait")
    return found


def flush(side: Side) -> Cost:
    """Fill and free, then report all of it by a flush; CPU seconds of the VMM."""
    fill(side, fill_mb(side))
    release(side)
    side.sh(f"wait; {DROP}")
    full = resident(side.guest.pid)
    cpu, began = cpu_ns(side.guest.pid), time.monotonic()
    side.sh(f"echo 0 > {FLUSH}")
    seconds, spent = time.monotonic() - began, (cpu_ns(side.guest.pid) - cpu) / 1e9
    back = full - resident(side.guest.pid)
    if back < fill_mb(side) * MIB * BACK_PERCENT // 100:
        why = f"of {fill_mb(side)} MB that were freed the host has {back // MIB} MB back"
        fix = "look at the status of the balloon"
        raise TestFailure(f"A flush did not report everything ({side.name})", why, fix)
    return back, seconds, spent


def prezero(side: Side) -> Cost:
    """Make free memory dirty and have it zeroed; CPU seconds of the thread."""
    side.sh(f"{OFF}; fillfree --size {fill_mb(side)} > /dev/null; {DROP}")
    cost = zero_all(side, look=LOOK_S)
    if cost["bytes"] < fill_mb(side) * MIB * BACK_PERCENT // 100:
        why = f"of {fill_mb(side)} MB that were dirty {cost['bytes'] / MIB:.0f} MB were zeroed"
        raise TestFailure(
            f"Free memory did not become zero ({side.name})", why, f"see {FOLDER} in the guest"
        )
    return cost["bytes"], cost["seconds"], cost["cpu"]


def rounds(sides: Sequence[Side], pairs: int, name: str, found: Values) -> None:
    what = {"report": report, "flush": flush, "prezero": prezero}[name]
    keys = {
        side.name: (f"{name}_base" if side.kernel == "base" else name, side.amount)
        for side in sides
    }
    with step(f"{name}: up to {pairs} runs in each of {len(sides)} guests"):
        known = [found[(*key, kind)] for key in keys.values() for kind in ("wall", "cpu")]
        for side, counts in turns(sides, pairs, known):
            size, wall, cpu = what(side)
            if counts:
                found.note(*keys[side.name], wall=wall / size * GIB, cpu=cpu / size * GIB)


def figures(run: Run, found: Values, gbs: Sequence[int]) -> None:
    """For each step, the cost of a GiB in each larger guest against the smallest."""
    for name, gb in itertools.product(ACTIONS, gbs[1:]):
        # Base is there for comparison.
        judged = "yes" if gb == gbs[-1] and name != "report_base" else "no"
        more = {"action": name, "gb": gb, "least_gb": gbs[0], "judged": judged}
        for kind in ("wall", "cpu"):
            values = found[name, gbs[0], kind], found[name, gb, kind]
            run.add(f"scale.{{action}}.{{gb}}gb.{kind}", values, more)


def measure(run: Run) -> None:
    gbs, found = sizes(available_gb()), Values()
    run.sides = SIDES
    run.job = {"sizes_gb": list(gbs), "cpus": CPUS, "pairs": run.pairs}

    def specs(kernels: Sequence[str], devices: list[str]) -> list[Wanted]:
        more: dict[str, Any] = {"cpus": CPUS, "devices": devices}
        return [
            Wanted(f"{kernel}-{gb}", run.spec(kernel, memory=f"{gb}G", **more), kernel, gb)
            for kernel in kernels
            for gb in gbs
        ]

    with run.guests(specs(("base", "ours"), [BALLOON])) as sides:
        for side in sides:
            side.sh(AT_ONCE)
        rounds(sides, run.pairs, "report", found)
        ours = [side for side in sides if side.kernel == "ours"]
        for side in ours:
            side.sh(LATE)
        rounds(ours, run.pairs, "flush", found)
    # Without a balloon: reported memory is not zeroed.
    with run.guests(specs(("ours",), [])) as sides:
        rounds(sides, run.pairs, "prezero", found)
    figures(run, found, gbs)
    run.note(
        f"Each guest fills {FILL_PERCENT} % of its memory and frees it. A report is measured from "
        f"there until the host has {REPORTED_PERCENT} % back, so it includes the time to free it; "
        "a flush from the write to the parameter to its return; zeroing from turning kzeropaged "
        "on, with its default pauses, until it has no more work. CPU time is that of QEMU, guest "
        "included, and for zeroing that of kzeropaged.",
        REPEATED,
        "A cost grows faster than the memory when the whole 95 % bootstrap interval of the "
        f"change is above {LIMIT:.0f} %, or when the change is more than {BEYOND:.0f} %, however "
        "wide that interval.",
    )
    run.note(
        f"A guest of {MORE} GB is added where {needed_gb((*SIZES, MORE)):.0f} GB of the machine's "
        "memory are available."
    )
