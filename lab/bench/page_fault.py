# SPDX-License-Identifier: GPL-2.0
"""Page faults at full speed, with free memory reported meanwhile and without."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from lab.bench.jobs import HUGE
from lab.bench.repeat import NARROW, Values, turns
from lab.bench.runner import Run
from lab.bench.session import DELAY, MIB, PAGE, Side, Wanted, warm_host
from lab.boot import balloon
from lab.core.errors import TestFailure
from lab.core.progress import step

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


def faults(sides: list[Side], pairs: int, found: Values, numbers: Iterable[int] = TASKS) -> None:
    """The loop in each guest by turns: pages per second."""
    for pages, words in PAGES.items():
        for tasks in numbers:
            number = TASKS[tasks]
            options = f"--pages {pages} --tasks {tasks} --ms {RUN_MS} --size {MAP_MB}"
            known = [
                found["rate", pages, tasks, side.name] for side in sides if side.name in COMPARED
            ]
            with step(f"page faults, {words}, {number}: {pairs} to {MOST * pairs} turns"):
                for side, counts in turns(sides, MOST * pairs, known, least=pairs):
                    warm_host(tasks * MAP_MB * MIB)
                    answer = side.json("page_fault", *options.split())
                    huge = (answer["vmstat"]["thp_fault_alloc"] or 0) * HUGE // PAGE
                    if pages == "thp" and huge < 0.95 * answer["iterations"]:
                        why = f"{huge} of {answer['iterations']} pages in the {side.name} guest"
                        fix = "give the guest more memory (--memory)"
                        raise TestFailure("The loop did not get huge pages", why, fix)
                    if counts:
                        found["rate", pages, tasks, side.name].append(answer["per_second"])


def figures(run: Run, found: Values) -> None:
    rows = [name for name in ROWS if name != "base"]
    measured = [tasks for tasks in TASKS if found["rate", "thp", tasks, "base"]]
    for pages, tasks in itertools.product(PAGES, measured):
        of = {"pages": pages, "tasks": tasks}
        rate = {row: found["rate", pages, tasks, row] for row in ("base", *rows)}
        for row in rows:
            run.add(
                "page_fault.{pages}.{tasks}.{row}", (rate["base"], rate[row]), {**of, "row": row}
            )
        run.add("page_fault.{pages}.{tasks}.loss", (rate["off"], rate["bit6"]), of)


def measure(run: Run) -> None:
    found, options, cpus = Values(), run.options, 1 if run.native else CPUS
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
        faults(sides, run.pairs, found, [tasks for tasks in TASKS if tasks <= cpus])
    figures(run, found)
