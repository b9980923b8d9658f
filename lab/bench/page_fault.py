# SPDX-License-Identifier: GPL-2.0
"""Page faults as fast as they come, with free memory reported meanwhile and without."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace

from lab.bench import BenchOptions
from lab.bench.hostmemory import fill, release
from lab.bench.jobs import HUGE, WARM_UPS, elapsed, within
from lab.bench.repeat import NARROW, until_known
from lab.bench.session import (
    DELAY,
    MIB,
    Built,
    Side,
    built,
    by_turns,
    cpu_ns,
    guests,
    host_facts,
    reproduce,
    spec_for,
    warm_host,
)
from lab.boot import balloon
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

CPUS = 2
MAP_MB = 128  # what each task maps; as in the tests of that name in will-it-scale
RUN_MS = 600
FILL_MB = 512
# The delay is two seconds where nobody changes it. With this, a run sees as many reports as one that is
# ten times as long.
DELAY_MS = 200
PAGES = ("thp", "nothp")
PAGE_WORDS = {"thp": "huge pages", "nothp": "4 KiB pages"}
TASKS = (1, CPUS)
# What the series lost that brought reporting: at least this, in percent.
SEED_LOSS = 5.0
# The rows that must not differ, and how many times --pairs they are repeated until that can be told.
COMPARED = ("off", "bit6")
MOST = 3
BACK_AT_LEAST = 90.0
SHUFFLE = "/sys/module/page_alloc/parameters/shuffle"
SHUFFLED = "page_alloc.shuffle=1"
ON = {"free_page_reporting": "on"}


@dataclass(frozen=True)
class Row:
    """A row of the table: ``reports`` says whether free memory is reported."""

    name: str
    words: str
    kernel: str
    device: str
    reports: bool = True
    append: str = ""


ROWS = (
    Row("base", "the base kernel, reporting off", "base", balloon.device(), reports=False),
    Row("off", "our kernel, reporting off", "ours", balloon.device(), reports=False),
    Row("on", "our kernel, reporting on", "ours", balloon.device(**ON, x_device_init_reported="off")),
    Row(
        "bit6",
        "our kernel, reporting on, with bit 6",
        "ours",
        balloon.device(**ON, x_device_init_reported="on"),
    ),
    Row(
        "shuffle",
        "our kernel, reporting on, with bit 6, and page shuffling",
        "ours",
        balloon.device(**ON, x_device_init_reported="on"),
        append=SHUFFLED,
    ),
)


@dataclass
class Found:
    """What came of the guests: rates and costs by (pages, tasks, row); resident bytes by row, full and freed."""

    rates: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    cpu_us: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)  # of QEMU, per page
    full: dict[str, list[float]] = field(default_factory=dict)
    freed: dict[str, list[float]] = field(default_factory=dict)


def specs(options: BenchOptions, images: Built) -> list[tuple[str, BootSpec]]:
    """The boots of all rows."""
    return [
        (
            row.name,
            spec_for(
                options,
                images.base if row.kernel == "base" else images.ours,
                images.qemu,
                cpus=CPUS,
                devices=[row.device],
                append=row.append,
            ),
        )
        for row in ROWS
    ]


def shuffles(side: Side) -> bool:
    """Whether the guest's kernel puts its free pages in random order."""
    return side.sh(f"cat {SHUFFLE} 2> /dev/null || echo N")[-1] == "Y"


def memory(sides: list[Side], pairs: int, found: Found) -> None:
    """Memory filled and freed in each guest, and what the host has of it then."""
    reports = {row.name: row.reports for row in ROWS}
    done = {
        side.name: (found.full.setdefault(side.name, []), found.freed.setdefault(side.name, []))
        for side in sides
    }
    with step(f"host memory: {FILL_MB} MB filled and freed, up to {pairs} times in each guest"):
        for turn in until_known(pairs, [one for both in done.values() for one in both]):
            for side in by_turns(sides, turn):
                # Nobody is there to be told.
                side.has_flush = side.has_flush and reports[side.name]
                full, freed = done[side.name]
                full.append(float(fill(side, FILL_MB)))
                release(side)
                side.sh("wait")
                freed.append(float(side.settle()))


def faults(sides: list[Side], options: BenchOptions, found: Found) -> None:
    """The loop in each guest by turns."""
    for pages in PAGES:
        for tasks in TASKS:
            argv = ["page_fault", "--pages", pages, "--tasks", str(tasks)]
            argv += ["--ms", str(RUN_MS), "--size", str(MAP_MB)]
            keys = [(pages, tasks, side.name) for side in sides]
            told_apart = [found.rates.setdefault(key, []) for key in keys if key[2] in COMPARED]
            most = MOST * options.pairs
            with step(
                f"page faults, {PAGE_WORDS[pages]}, {tasks} at a time: {options.pairs} to {most} turns"
            ):
                turns = until_known(most, told_apart, least=options.pairs)
                for turn in itertools.chain(range(-WARM_UPS, 0), turns):
                    for side in by_turns(sides, turn):
                        warm_host(tasks * MAP_MB * MIB)
                        before = cpu_ns(side.guest.pid)
                        told = side.json(*argv)
                        spent = cpu_ns(side.guest.pid) - before
                        huge = (told["vmstat"]["thp_fault_alloc"] or 0) * HUGE // 4096
                        if pages == "thp" and huge < 0.95 * told["iterations"]:
                            raise TestFailure(
                                "The loop did not get huge pages",
                                f"{huge} of {told['iterations']} pages in the {side.name} guest",
                                "give the guest more memory (--memory)",
                            )
                        if turn >= 0:
                            key = pages, tasks, side.name
                            found.rates.setdefault(key, []).append(told["per_second"])
                            found.cpu_us.setdefault(key, []).append(spent / 1e3 / told["iterations"])


def metrics_of(found: Found) -> list[Metric]:
    """All rows against the base kernel, and what the target is about."""
    metrics = []
    rows = [row for row in ROWS if row.name in found.freed and row.name != "base"]
    for pages in PAGES:
        for tasks in TASKS:
            rates = {row.name: found.rates[pages, tasks, row.name] for row in (ROWS[0], *rows)}
            loop = f"{PAGE_WORDS[pages]}, {tasks} task{'s' if tasks > 1 else ''}"
            name = f"page_fault.{pages}.{tasks}"
            metrics += [
                Metric.of(
                    f"{name}.{row.name}",
                    "pages/s",
                    rates["base"],
                    rates[row.name],
                    sentence=f"Pages faulted in a second ({loop}) by {row.words}, against {ROWS[0].words}.",
                )
                for row in rows
            ]
            made = Metric.of(
                f"{name}.loss",
                "pages/s",
                *(rates[name] for name in COMPARED),
                sentence=f"The same ({loop}), our kernel on both sides: reporting off, and on with bit 6.",
            )
            metrics.append(
                replace(
                    made,
                    target=within(made, 0, SEED_LOSS, "nothing lost beyond noise", more_is_better=True),
                )
            )
            metrics.append(
                Metric.of(
                    f"{name}.loss_cpu",
                    "µs/page",
                    found.cpu_us[pages, tasks, "off"],
                    found.cpu_us[pages, tasks, "bit6"],
                    sentence=f"CPU time of QEMU for each of these pages ({loop}), reports and the host's faults "
                    "included. What else the machine does changes it less than the rate.",
                )
            )
    for row in rows:
        if not row.reports:
            continue
        back = [
            (full - freed) / (FILL_MB * MIB) * 100
            for full, freed in zip(found.full[row.name], found.freed[row.name], strict=True)
        ]
        metrics.append(
            Metric.of(
                f"page_fault.resident.{row.name}",
                "bytes",
                found.freed["off"],
                found.freed[row.name],
                sentence=f"Resident memory of the VMM after the guest freed {FILL_MB} MB: our kernel with "
                f"reporting off, and {row.words}.",
                target=Target(
                    f"at least {BACK_AT_LEAST:.0f} % of it comes back ({min(back):.1f} %)",
                    min(back) >= BACK_AT_LEAST,
                ),
            )
        )
    return metrics


def run(options: BenchOptions) -> Result:
    """Measure all rows; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    found = Found()
    notes = [
        f"A run takes {RUN_MS} ms; each task maps {MAP_MB} MB, writes a byte to each page of 4 KiB and unmaps "
        "it, over and over. Pages are counted also where a huge page brings 512 of them. The delay before "
        f"reports is {DELAY_MS} ms instead of 2000.",
        f"Repeated --pairs times, and up to {MOST} times as often until the 95 % interval of the median of both "
        f"rows that are held against each other is within {NARROW:.0f} % of it.",
        "Whether something is lost: not if the 95 % bootstrap interval of the change of the median reaches 0, "
        f"and if the change itself is no loss of {SEED_LOSS:.0f} % or more, which is what the series lost that "
        "brought reporting (5 to 8 % with huge pages).",
    ]
    with guests(specs(options, images)) as sides:
        for side in sides:
            side.sh(f"echo {DELAY_MS} > {DELAY}")
        accel = sides[0].guest.accel
        if not shuffles(sides[-1]):
            sides[-1].guest.close()
            sides = sides[:-1]
            notes.append(
                "There is no row with page shuffling: this kernel has no CONFIG_SHUFFLE_PAGE_ALLOCATOR, or does "
                f"not obey {SHUFFLED}."
            )
        faults(sides, options, found)
        memory(sides, options.pairs, found)
    return Result(
        name="page-fault",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("page-fault", options, accel),
        metrics=metrics_of(found),
        job={
            "size_mb": MAP_MB,
            "memory": options.memory,
            "cpus": CPUS,
            "pairs": options.pairs,
            "run_ms": RUN_MS,
            "delay_ms": DELAY_MS,
        },
        host=host_facts(),
        notes=notes,
        seconds=elapsed(began),
    )
