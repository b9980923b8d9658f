# SPDX-License-Identifier: GPL-2.0
"""Page faults at full speed, with free memory reported meanwhile and without."""

import functools
import itertools
from dataclasses import dataclass

from lab.bench.jobs import HUGE
from lab.bench.repeat import NARROW, measured
from lab.bench.runner import Run
from lab.bench.session import DELAY, MIB, PAGE, Side, Wanted, warm_host
from lab.boot import balloon
from lab.core.errors import TestFailure

CPUS = 2
MAP_MB = 128  # mapped by each task, as in the tests of that name in will-it-scale
RUN_MS = 600
# A tenth of the usual delay: a run has as many reports as one that is ten times as long
DELAY_MS = 200
PAGES = {"thp": "huge pages", "nothp": "4 KiB pages"}
TASKS = {1: "one task", CPUS: "two tasks"}
SEED_LOSS = 5.0  # percent, the least loss of the series that added reporting
COMPARED = ("off", "bit6")  # the rows that must not differ
MOST = 3  # times --pairs, until that is known


@dataclass(frozen=True)
class Row:
    """A guest of the table: its balloon and its kernel."""

    device: str = balloon.device()
    kernel: str = "ours"


PLAIN, BIT6 = (
    balloon.device(free_page_reporting="on", x_device_init_reported=bit) for bit in ("off", "on")
)
ROWS = {
    "base": Row(kernel="base"),
    "off": Row(),
    "on": Row(PLAIN),
    "bit6": Row(BIT6),
}


def rate(side: Side, pages: str, tasks: int) -> dict[str, float]:
    """Pages per second of the loop. TestFailure when it did not get huge pages."""
    warm_host(tasks * MAP_MB * MIB)
    options = f"--pages {pages} --tasks {tasks} --ms {RUN_MS} --size {MAP_MB}"
    answer = side.json("page_fault", *options.split())
    huge = (answer["vmstat"]["thp_fault_alloc"] or 0) * HUGE // PAGE
    if pages == "thp" and huge < 0.95 * answer["iterations"]:
        why = f"{huge} of {answer['iterations']} pages in the {side.name} guest"
        fix = "give the guest more memory (--memory)"
        raise TestFailure("The loop did not get huge pages", why, fix)
    return {"rate": answer["per_second"]}


def faults(run: Run, sides: list[Side], tasks: int, pages: str) -> None:
    """The loop in each guest by turns."""
    found = measured(
        f"page faults, {PAGES[pages]}, {TASKS[tasks]}",
        sides,
        functools.partial(rate, pages=pages, tasks=tasks),
        MOST * run.pairs,
        known=[(row, "rate") for row in COMPARED],
        least=run.pairs,
    )
    of = {"pages": pages, "tasks": tasks}
    for row in (name for name in ROWS if name != "base"):
        metric = "page_fault.{pages}.{tasks}.{row}"
        run.add(metric, found.both("rate", other=row), {**of, "row": row})
    loss = found["off", "rate"], found["bit6", "rate"]
    run.add("page_fault.{pages}.{tasks}.loss", loss, of)


def measure(run: Run) -> None:
    options, cpus = run.options, 1 if run.native else CPUS
    run.job = {"size_mb": MAP_MB, "memory": options.memory, "cpus": cpus, "pairs": run.pairs}
    run.job |= {"run_ms": RUN_MS, "delay_ms": DELAY_MS}
    run.note(
        f"A run takes {RUN_MS} ms; each task maps {MAP_MB} MB, writes a byte to each page of 4 "
        "KiB and unmaps it, repeatedly. A huge page counts as 512 pages. The delay before "
        f"reports is {DELAY_MS} ms instead of 2000.",
        f"Repeated --pairs times, and up to {MOST} times as often until the 95 % interval of the "
        f"median of both compared rows is within {NARROW:.0f} % of it.",
        "Nothing is lost when the 95 % bootstrap interval of the change of the median reaches 0 "
        f"and the change itself is no loss of {SEED_LOSS:.0f} % or more, the loss of the series "
        "that added reporting (5 to 8 % with huge pages).",
    )
    specs = [
        Wanted(name, run.spec(row.kernel, cpus=cpus, devices=[row.device]))
        for name, row in ROWS.items()
    ]
    with run.guests(specs) as sides:
        for side in sides:
            side.sh(f"echo {DELAY_MS} > {DELAY}")
        for pages, tasks in itertools.product(PAGES, TASKS):
            if tasks <= cpus:
                faults(run, sides, tasks, pages)
