# SPDX-License-Identifier: GPL-2.0
"""What it costs to report, flush and pre-zero a whole guest, for each GiB, in small and large guests.

And how long zone->lock is held at most meanwhile (lockhold.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lab.bench import BenchOptions, lockhold
from lab.bench.hostmemory import fill, release, until_back
from lab.bench.jobs import WARM_UPS, elapsed, within
from lab.bench.kzeropaged import FOLDER, PACE, Cost, zero_all
from lab.bench.repeat import NOTE as REPEATED
from lab.bench.repeat import until_known
from lab.bench.session import (
    BALLOON,
    DELAY,
    DROP,
    FLUSH,
    LATE,
    MIB,
    Built,
    Side,
    built,
    by_turns,
    cpu_ns,
    guests,
    host_facts,
    reproduce,
    resident,
    spec_for,
)
from lab.bench.sizes import MORE, SIZES, available_gb, needed_gb, sizes
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Result

GIB = 1024 * MIB
CPUS = 2  # one for the work, one to look at it
FILL_PERCENT = 40
BACK_PERCENT = 90
# Less than a flush: what the CPU keeps of freed memory in lists of its own, huge pages among it, is not reported.
REPORTED_PERCENT = 80
AT_ONCE = f"echo 1 > {DELAY}"
LIMIT, BEYOND = 25.0, 50.0
SIDES = ["smallest guest", "larger guest"]
LOOK_S = 0.02

WORDS = {
    "report_base": "the base kernel's worker reports, without delay, what a program freed",
    "report": "our worker reports, without delay, what a program freed",
    "flush": "everything free is reported with the flush parameter",
    "prezero": "kzeropaged zeroes what is free",
}


@dataclass
class Series:
    """What one step took in guests of one size, per GiB, an entry for each run."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, size: float, wall_s: float, cpu_s: float) -> None:
        """Note a run that did ``size`` bytes."""
        self.wall_s.append(wall_s / size * GIB)
        self.cpu_s.append(cpu_s / size * GIB)


# by step and GB
Found = dict[tuple[str, int], Series]


def gb_of(side: Side) -> int:
    """Memory of a guest, from its name."""
    return int(side.name.split("-")[1])


def fill_mb(side: Side) -> int:
    """How much of a guest's memory is used; a multiple of what fillfree takes at once."""
    return gb_of(side) * 1024 * FILL_PERCENT // 100 // 16 * 16


def report(side: Side, timeout: float = 120.0) -> tuple[int, float, float]:
    """Fill, free, and wait until the worker has reported: bytes, seconds and CPU seconds of the VMM."""
    size = fill_mb(side) * MIB
    full = fill(side, fill_mb(side))
    cpu, began = cpu_ns(side.guest.pid), time.monotonic()
    release(side)
    until_back(side, full, size * REPORTED_PERCENT // 100, timeout)
    found = full - resident(side.guest.pid), time.monotonic() - began, (cpu_ns(side.guest.pid) - cpu) / 1e9
    side.sh("wait")
    return found


def flush(side: Side) -> tuple[int, float, float]:
    """Fill and free, then report all of it with the flush parameter: bytes, seconds, CPU seconds of the VMM."""
    fill(side, fill_mb(side))
    release(side)
    side.sh(f"wait; {DROP}")
    full = resident(side.guest.pid)
    cpu, began = cpu_ns(side.guest.pid), time.monotonic()
    side.sh(f"echo 0 > {FLUSH}")
    seconds, spent = time.monotonic() - began, (cpu_ns(side.guest.pid) - cpu) / 1e9
    back = full - resident(side.guest.pid)
    if back < fill_mb(side) * MIB * BACK_PERCENT // 100:
        raise TestFailure(
            f"A flush did not report everything ({side.name})",
            f"of {fill_mb(side)} MB that were freed the host has {back // MIB} MB back",
            "look at the status of the balloon",
        )
    return back, seconds, spent


def prezero(side: Side) -> tuple[int, float, float]:
    """Make free memory dirty and have it zeroed: bytes, seconds, and CPU seconds of the thread."""
    side.sh(f"echo 0 > {FOLDER}/enabled; fillfree --size {fill_mb(side)} > /dev/null; {DROP}")
    cost = Cost()
    zero_all(side, cost, look=LOOK_S)
    if cost.bytes_zeroed[0] < fill_mb(side) * MIB * BACK_PERCENT // 100:
        raise TestFailure(
            f"Free memory did not become zero ({side.name})",
            f"of {fill_mb(side)} MB that were dirty {cost.bytes_zeroed[0] / MIB:.0f} MB were zeroed",
            f"see {FOLDER} in the guest",
        )
    return int(cost.bytes_zeroed[0]), cost.seconds[0], cost.cpu_s[0]


def specs(
    options: BenchOptions, images: Built, kernels: Sequence[str], gbs: Sequence[int], device: str | None
) -> list[tuple[str, BootSpec]]:
    """A guest of each size for each kernel."""
    return [
        (
            f"{kernel}-{gb}",
            spec_for(
                options,
                images.base if kernel == "base" else images.ours,
                images.qemu,
                cpus=CPUS,
                memory=f"{gb}G",
                devices=[device] if device else [],
            ),
        )
        for kernel in kernels
        for gb in gbs
    ]


def rounds(sides: Sequence[Side], pairs: int, name: str, found: Found) -> None:
    """One step in all guests by turns."""
    what = {"report": report, "flush": flush, "prezero": prezero}[name]
    done = {
        side.name: found.setdefault(
            ("report_base" if side.name.startswith("base") else name, gb_of(side)), Series()
        )
        for side in sides
    }
    with step(f"{name}: up to {pairs} runs in each of {len(sides)} guests"):
        for turn in range(WARM_UPS):
            for side in by_turns(sides, turn):
                what(side)
        for turn in until_known(
            pairs, [one for series in done.values() for one in (series.wall_s, series.cpu_s)]
        ):
            for side in by_turns(sides, turn):
                done[side.name].add(*what(side))


def metrics_of(found: Found) -> list[Metric]:
    """For each step, what a GiB costs in each larger guest against the smallest."""
    gbs = sorted({gb for _, gb in found})
    metrics = []
    for name, words in WORDS.items():
        small = found[name, gbs[0]]
        for gb in gbs[1:]:
            large = found[name, gb]
            for kind, word, one, two in (
                ("wall", "Time", small.wall_s, large.wall_s),
                ("cpu", "CPU time", small.cpu_s, large.cpu_s),
            ):
                made = Metric.of(
                    f"scale.{name}.{gb}gb.{kind}",
                    "s/GiB",
                    one,
                    two,
                    sentence=f"{word} for each GiB when {words}: guests of {gbs[0]} GB and of {gb} GB.",
                )
                # What upstream does is there to compare with.
                if gb == gbs[-1] and name != "report_base":
                    target = within(made, LIMIT, BEYOND, f"grows with the memory, {LIMIT:.0f} % more at most")
                    made = replace(made, target=target)
                metrics.append(made)
    return metrics


def run(options: BenchOptions) -> Result:
    """Measure all steps; raises LabError when that is not possible."""
    began = time.monotonic()
    images = built(options)
    gbs = sizes(available_gb())
    found: Found = {}
    with guests(specs(options, images, ("base", "ours"), gbs, BALLOON)) as sides:
        accel = sides[0].guest.accel
        for side in sides:
            side.sh(AT_ONCE)
        rounds(sides, options.pairs, "report", found)
        ours = [side for side in sides if side.name.startswith("ours")]
        for side in ours:
            side.sh(LATE)
        rounds(ours, options.pairs, "flush", found)
    # Without a balloon: what is reported is not zeroed.
    with guests(specs(options, images, ("ours",), gbs, None)) as sides:
        for side in sides:
            side.sh(PACE)
        rounds(sides, options.pairs, "prezero", found)
    locks = lockhold.measure(options, images, gbs)
    return Result(
        name="scale",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("scale", options, accel),
        metrics=[*metrics_of(found), *lockhold.growth(locks, gbs, "scale.lock_hold")],
        job={"sizes_gb": list(gbs), "cpus": CPUS, "pairs": options.pairs},
        host=host_facts(),
        notes=[
            f"Each guest fills {FILL_PERCENT} % of its memory and frees it. A report is measured from there until "
            f"the host has {REPORTED_PERCENT} % back, so the time to free it is part of it; a flush from the write "
            "to the parameter to its return; zeroing from turning kzeropaged on, without pauses, until it has "
            "nothing more to do. CPU time is that of QEMU, guest included, and for zeroing that of kzeropaged.",
            REPEATED,
            f"Growing faster than the memory is what the whole 95 % bootstrap interval of the change says when it "
            f"is above {LIMIT:.0f} %, or a change of more than {BEYOND:.0f} %, however wide that interval.",
            lockhold.NOTE,
            *lockhold.notes(locks),
            f"A guest of {MORE} GB is added where {needed_gb((*SIZES, MORE)):.0f} GB of the machine's memory are "
            "available.",
        ],
        sides=SIDES,
        seconds=elapsed(began),
    )
