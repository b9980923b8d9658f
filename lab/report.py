# SPDX-License-Identifier: GPL-2.0
"""``kz report``: one self-contained page (and Markdown) from results."""

from __future__ import annotations

import functools
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import jinja2
import typer
from markupsafe import Markup, escape

from lab import charts, paths, seeds
from lab.bench.evidence import GUESTS, HOST, KERNELS, QEMU
from lab.errors import LabError
from lab.results import Metric, Result, load
from lab.significance import CONSTANT, LEVEL, TOO_FEW, outside
from lab.units import human, percent

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Chart:
    """A chart with its title, one plain sentence, and what its figures were measured on."""

    title: str
    sentence: str
    svg: Markup
    ran_on: str


# title, sentence, [(metric, label)]
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Bytes the guest sets to zero",
        "The host has already zeroed this memory; a guest that knows it leaves it alone.",
        (
            ("thp.populate.guest_zeroed_bytes", "populate"),
            ("thp.touch_line.guest_zeroed_bytes", "populate, touch a line per page"),
            ("thp.touch_all.guest_zeroed_bytes", "populate, touch everything"),
            ("order0.populate.guest_zeroed_bytes", "populate, 4 KiB pages"),
        ),
    ),
    (
        "CPU time of the job",
        "Populating alone hides the host's faults, which come when memory is touched: all three are shown.",
        (
            ("thp.populate.task_clock", "populate"),
            ("thp.touch_line.task_clock", "populate, touch a line per page"),
            ("thp.touch_all.task_clock", "populate, touch everything"),
            ("order0.populate.task_clock", "populate, 4 KiB pages"),
        ),
    ),
    (
        "Page faults the host handled for the VMM",
        "Memory that the guest leaves alone is not taken from the host; memory that it touches is.",
        (
            ("thp.populate.host_faults", "populate"),
            ("thp.touch_line.host_faults", "populate, touch a line per page"),
            ("thp.touch_all.host_faults", "populate, touch everything"),
        ),
    ),
    (
        "4 KiB pages whose zeroing was skipped",
        "Small pages come from split blocks; this many of them were still known to be zero.",
        (("order0.populate.skipped_percent", "of the job's pages"),),
    ),
    (
        "Host memory held by the VMM",
        "What the host gets back when the guest frees its memory and reports it.",
        (
            ("host.resident_before_fill_bytes", "before"),
            ("host.resident_full_bytes", "guest's memory filled"),
            ("host.resident_after_free_bytes", "freed and reported"),
        ),
    ),
    *(
        (
            f"Page faults: {pages}, {tasks}",
            "Each row of ours against the base kernel with reporting off: more is better.",
            tuple(
                (f"page_fault.{kind}.{row}", label)
                for row, label in (
                    ("off", "reporting off"),
                    ("on", "reporting on"),
                    ("bit6", "reporting on, bit 6"),
                    ("shuffle", "reporting on, bit 6, page shuffling"),
                )
            ),
        )
        for kind, pages, tasks in (
            ("thp.1", "huge pages", "one task"),
            ("thp.2", "huge pages", "two tasks"),
            ("nothp.1", "4 KiB pages", "one task"),
            ("nothp.2", "4 KiB pages", "two tasks"),
        )
    ),
    (
        "What reporting costs page faults, bit 6 on",
        "Our kernel on both sides: the first bar is without reporting, the second with it.",
        (
            ("page_fault.thp.1.loss", "huge pages, one task"),
            ("page_fault.thp.2.loss", "huge pages, two tasks"),
            ("page_fault.nothp.1.loss", "4 KiB pages, one task"),
            ("page_fault.nothp.2.loss", "4 KiB pages, two tasks"),
        ),
    ),
    (
        "CPU time of QEMU for a page, bit 6 on",
        "The same guests; this counts reports and the host's faults, and not what else the machine does.",
        (
            ("page_fault.thp.1.loss_cpu", "huge pages, one task"),
            ("page_fault.thp.2.loss_cpu", "huge pages, two tasks"),
            ("page_fault.nothp.1.loss_cpu", "4 KiB pages, one task"),
            ("page_fault.nothp.2.loss_cpu", "4 KiB pages, two tasks"),
        ),
    ),
    (
        "Host memory after the guest freed its own",
        "Our kernel on both sides: the first bar is without reporting, the second with it.",
        (
            ("page_fault.resident.on", "reporting on"),
            ("page_fault.resident.bit6", "reporting on, bit 6"),
            ("page_fault.resident.shuffle", "reporting on, bit 6, page shuffling"),
        ),
    ),
    *(
        (
            f"{what} of one allocation, {job}",
            "Memory freed and used again at once; what is reported early costs the next allocation a fault of the "
            "host, and, where nobody knows that it is zero, zeroing it a second time.",
            tuple(
                (f"churn.{name}.{row}.{metric}", label)
                for row, label in (
                    ("2000ms", "reports after 2000 ms"),
                    ("250ms", "after 250 ms"),
                    ("50ms", "after 50 ms"),
                    ("early", "base after 2000 ms, ours after 250 ms"),
                )
            ),
        )
        for name, job in (("loop", "one process"), ("six", "six processes"))
        for metric, what in (("alloc_wall", "Time"), ("alloc_task_clock", "CPU time"))
    ),
    *(
        (
            f"Mappings a second, {job}",
            "Allocated, used, freed, and a short pause: more is better.",
            tuple(
                (f"churn.{name}.{delay}ms.cycles", f"reports after {delay} ms") for delay in (2000, 250, 50)
            ),
        )
        for name, job in (("loop", "one process"), ("six", "six processes"))
    ),
    *(
        (
            f"{what} after pre-zeroing, {pages}",
            sentence,
            tuple(
                (f"prezero.{word}.{mode}.{metric}", label)
                for mode, label in (
                    ("populate", "populate"),
                    ("touch_line", "populate, touch a line per page"),
                    ("touch_all", "populate, touch everything"),
                )
            ),
        )
        for word, pages in (("4k", "4 KiB pages"), ("thp", "huge pages"))
        for metric, what, sentence in (
            (
                "task_clock",
                "CPU time of a job",
                "The zeroing was done before, by kzeropaged; what that took is not in here.",
            ),
            (
                "guest_zeroed_bytes",
                "Bytes set to zero in a job",
                "What was zeroed before is not zeroed again while the job waits.",
            ),
        )
    ),
    (
        "What kzeropaged takes beforehand",
        "To zero all memory that is free once, with no pauses. The base kernel has no such thread.",
        (
            ("prezero.background_cpu", "CPU time of the thread"),
            ("prezero.time_until_zero", "time until it is done"),
        ),
    ),
    *(
        (
            f"Ways to zero, {pages}: {what}",
            sentence,
            tuple(
                (f"prezero.peers.{word}.{name}.{metric}", label)
                for name, label in (
                    ("ours", "base, and ours with kzeropaged"),
                    ("init_on_alloc", "base, and base with init_on_alloc=1"),
                    ("init_on_free", "base, and base with init_on_free=1"),
                )
            ),
        )
        for word, pages in (("4k", "4 KiB pages"), ("thp", "huge pages"))
        for metric, what, sentence in (
            ("job", "the job", "CPU time of a job that fills half of the guest's memory."),
            (
                "whole",
                "everything",
                "CPU time of the VMM for the same, with the zeroing that is done before or after.",
            ),
        )
    ),
    (
        "A load that gains nothing from pre-zeroing",
        "Short processes one after the other, as in a build, with kzeropaged on as it is by default.",
        (
            ("prezero.build_load.wall", "time"),
            ("prezero.build_load.whole", "CPU time of the VMM, the thread's included"),
        ),
    ),
    (
        "CPU time of a job after pre-zeroing, not emulated",
        "In User-Mode Linux, 4 KiB pages.",
        (
            ("prezero.um.4k.populate.task_clock", "populate"),
            ("prezero.um.4k.touch_all.task_clock", "populate, touch everything"),
        ),
    ),
    (
        "Bytes set to zero in a job after pre-zeroing, not emulated",
        "In User-Mode Linux, 4 KiB pages.",
        (
            ("prezero.um.4k.populate.guest_zeroed_bytes", "populate"),
            ("prezero.um.4k.touch_all.guest_zeroed_bytes", "populate, touch everything"),
        ),
    ),
    (
        "What kzeropaged takes beforehand, not emulated",
        "In User-Mode Linux, for all memory that is free.",
        (
            ("prezero.um.background_cpu", "CPU time of the thread"),
            ("prezero.um.time_until_zero", "time until it is done"),
        ),
    ),
    (
        "A program whose cache the zeroing shares",
        "Steps through 1 MiB of its own memory: by itself, and with 2 MiB zeroed after each turn. More is better.",
        (
            ("prezero.native.corunner.movnti", "non-temporal stores, as kzeropaged has them"),
            ("prezero.native.corunner.stos", "rep stosb, as memory is zeroed on demand"),
        ),
    ),
    *(
        (
            f"Memory with a pattern, {touched} touched: {what}",
            sentence,
            tuple(
                (f"refpage.{name}.{metric}", label)
                for metric, label in (
                    (kind, "memset, and refpage_create"),
                    (f"against_memset_huge.{kind}", "memset with huge pages"),
                    (f"against_memfd.{kind}", "a private mapping of a memfd"),
                    (f"against_uffd.{kind}", "userfaultfd"),
                )
            ),
        )
        for name, touched in (("page", "one page"), ("half", "half"), ("all", "all"))
        for kind, what, sentence in (
            ("time", "time", "Of one mapping of 4 MB. The second bar is refpage_create each time."),
            ("max_rss", "peak resident size", "Of the process. The second bar is refpage_create each time."),
        )
    ),
    (
        "Memory with a pattern: instructions",
        "Of one mapping, kernel and program: exact, but blind to what memory costs.",
        (
            ("refpage.page.instructions", "one page touched"),
            ("refpage.half.instructions", "half touched"),
            ("refpage.all.instructions", "all touched"),
        ),
    ),
    *(
        (
            f"Memory from hugetlb: {what}",
            sentence,
            (
                (f"hugetlb.surplus.populate.{metric}", "surplus pages"),
                (f"hugetlb.persistent.populate.{metric}", "pages of a persistent pool"),
            ),
        )
        for metric, what, sentence in (
            ("task_clock", "CPU time", "Populated and not touched."),
            ("guest_zeroed_bytes", "bytes set to zero", "The pool keeps what is known of its pages."),
        )
    ),
    *(
        (
            f"Memory that was in the balloon: {what}",
            sentence,
            ((f"deflate.thp.{metric}", "huge pages"), (f"deflate.nothp.{metric}", "4 KiB pages")),
        )
        for metric, what, sentence in (
            ("guest_zeroed_bytes", "bytes set to zero", "The host has zeroed it, and says so with bit 7."),
            ("task_clock", "CPU time", "Populated and not touched."),
            ("host_faults", "page faults of the host", "What is left alone is not taken from the host."),
            ("host_share", "the host's part of the CPU time", "Mostly for those faults."),
        )
    ),
    *(
        (
            f"The balloon's device: {what}",
            sentence,
            tuple(
                (f"device.{step}.{metric}", label)
                for step, label in (
                    ("report", "all free memory reported"),
                    ("inflate", "the balloon filled"),
                    ("deflate", "the balloon emptied"),
                )
            ),
        )
        for metric, what, sentence in (
            ("rate", "memory per second", "More is better."),
            ("host_cpu", "CPU time for each GB", "Of QEMU, guest included, and of the daemon."),
            ("daemon_cpu", "the daemon's part of it", "The device in QEMU has no daemon."),
        )
    ),
    (
        "Bytes stored by rep stos",
        "Counted by the emulator, from outside the guest.",
        (
            ("zerobytes.populate.rep_stos_bytes", "populate"),
            ("zerobytes.touch_all.rep_stos_bytes", "populate, touch everything"),
        ),
    ),
    (
        "Until the host has its memory back",
        "From freeing memory until most of it is back.",
        (
            ("churn.2000ms.time_until_back", "reports after 2000 ms"),
            ("churn.250ms.time_until_back", "after 250 ms"),
            ("churn.50ms.time_until_back", "after 50 ms"),
            ("churn.early.time_until_back", "base after 2000 ms, ours after 250 ms"),
        ),
    ),
    *(
        (
            f"{what} for each GiB, {sizes}",
            "The cost of a whole guest ought to grow with its memory, and no faster: bars of one length.",
            tuple(
                (f"scale.{step}.{gb}gb.{kind}", label)
                for step, label in (
                    ("report_base", "reported by the base kernel"),
                    ("report", "reported"),
                    ("flush", "flushed"),
                    ("prezero", "pre-zeroed"),
                )
            ),
        )
        for gb, sizes in ((2, "1 GB and 2 GB"), (4, "1 GB and 4 GB"), (8, "1 GB and 8 GB"))
        for kind, what in (("wall", "Time"), ("cpu", "CPU time"))
    ),
    *(
        (
            f"{what} {program}",
            "In a guest with one CPU. What there is without reports is the machine's noise.",
            tuple(
                (f"device.stall.{mode}.{gap}.{state}", label)
                for state, label in (
                    ("reporting", "while all free memory is reported"),
                    ("idle", "while nothing is reported"),
                )
            ),
        )
        for mode, program in (
            ("spin", "a program that spins"),
            ("alloc", "a program that allocates and frees"),
        )
        for gap, what in (
            ("longest", "The longest stall of"),
            ("p99", "99th percentile of the steps of"),
            ("lost", "Time lost in stalls of 1 ms and more by"),
        )
    ),
    (
        "Instructions of the hot paths, reporting off",
        "What the feature costs where it is compiled in and nothing is reported.",
        (
            ("hotpath.fault.instructions", "4 KiB page fault"),
            ("hotpath.alloc_free.instructions", "order-0 page, allocated and freed"),
            ("hotpath.buddy_alloc_free.instructions", "the same through the buddy lists"),
            ("hotpath.alloc_free_order3.instructions", "order-3 page, allocated and freed"),
        ),
    ),
    *(
        (
            title,
            sentence,
            tuple(
                (f"hotpath.{which}{path}.instructions", label)
                for path, label in (
                    ("new_fault", "4 KiB page fault in unused memory"),
                    ("fault", "4 KiB page fault"),
                    ("alloc_free", "order-0 page, allocated and freed"),
                    ("alloc_free_order3", "order-3 page, allocated and freed"),
                )
            ),
        )
        for which, title, sentence in (
            ("off.", "Instructions of the hot paths, compiled out", "The series applied, every option off."),
            (
                "active.",
                "Instructions of the hot paths, memory known to be zero",
                "After all free memory was reported to a balloon, with bit 6 on ours.",
            ),
        )
    ),
)


@dataclass(frozen=True)
class Headline:
    """A large figure at the top of the page."""

    figure: str
    words: str
    met: bool | None


HEADLINES = (
    ("thp.populate.guest_zeroed_bytes", "bytes zeroed by the guest"),
    ("thp.populate.task_clock", "CPU time to populate"),
    ("thp.touch_all.task_clock", "CPU time to populate and touch all"),
    ("order0.populate.skipped_percent", "of small pages not zeroed again"),
    ("hotpath.alloc_free.instructions", "instructions to allocate and free a page, feature idle"),
    ("host.resident_after_free_bytes", "held by the VMM after the guest freed"),
)


def _headlines(result: Result) -> list[Headline]:
    found = []
    for name, words in HEADLINES:
        metric = result.metric(name)
        if metric is None:
            continue
        absolute = metric.unit == "percent" or name.startswith("host.")
        figure = human(metric.ours.median, metric.unit) if absolute else percent(metric.change_percent)
        found.append(Headline(figure, words, metric.target.met if metric.target else None))
    return found


# What is measured in another way than the rest of its run.
ELSEWHERE = (
    (re.compile(r"prezero\.um\."), "User-Mode Linux"),
    (re.compile(r"prezero\.native\.|device\.punch\."), "the machine itself, no guest"),
    (re.compile(r"hotpath\.|.*\.instructions$"), "tcg, counting instructions"),
)


def ran_on(result: Result, metric: Metric) -> str:
    """What a figure was measured on: the accelerator, or what was there instead."""
    return next((words for name, words in ELSEWHERE if name.match(metric.name)), result.accelerator)


def _charts(result: Result) -> list[Chart]:
    found = []
    shown: set[str] = set()

    def draw(title: str, sentence: str, metrics: list[Metric], labels: list[str]) -> None:
        svg = charts.bars(metrics, labels, title, result.sides)
        on = ", ".join(dict.fromkeys(ran_on(result, metric) for metric in metrics))
        found.append(Chart(title, sentence, Markup(svg), on))

    for title, sentence, wanted in CHARTS:
        there = [(metric, label) for name, label in wanted if (metric := result.metric(name))]
        if there:
            shown.update(metric.name for metric, _ in there)
            draw(title, sentence, [metric for metric, _ in there], [label for _, label in there])
    # A bench that the list above does not know is drawn all the same.
    for metric in result.metrics:
        if metric.name not in shown and not metric.name.startswith(("thp.", "order0.", "host.", "hotpath.")):
            # Its title says what it is: no label beside.
            draw(metric.name, metric.sentence, [metric], [""])
    return found


def _seed_rows(result: Result, table: seeds.Table) -> list[dict[str, str]]:
    rows = []
    for row in table.rows:
        metric = result.metric(row.metric)
        share = metric is not None and metric.unit == "percent"
        rows.append(
            {
                "what": row.what,
                "seed_base": row.base,
                "seed_ours": row.theirs,
                "seed_change": row.change,
                "base": human(metric.base.median, metric.unit) if metric else seeds.elsewhere(row),
                "ours": human(metric.ours.median, metric.unit) if metric else "",
                "change": percent(metric.change_percent) if metric and not share else "",
                "p": _told(metric) if metric and not share else "",
            }
        )
    return rows


def _told(metric: Metric) -> str:
    """What the test of significance says, or nothing where no value is known."""
    return metric.significance.told() if metric.significance else ""


def _outliers(metric: Metric, side: str) -> str:
    """How many values of a side, base or ours, are outside the fences, and the farthest; or what a chart cannot show."""
    values = metric.values.get(side, [])
    found = [value for value, out in zip(values, outside(values), strict=True) if out]
    if not found:
        edge = charts.BEYOND * max(metric.base.median, metric.ours.median)
        return (
            f"up to {_together(human(max(values), metric.unit))}" if values and max(values) > edge > 0 else ""
        )
    middle = (metric.base if side == "base" else metric.ours).median
    farthest = max(found, key=lambda value: abs(value - middle))
    return f"{len(found)} of {len(values)} outside, as far as {_together(human(farthest, metric.unit))}"


def _tests(result: Result) -> list[str]:
    """What the column of p means in this run."""
    told = [metric.significance for metric in result.metrics if metric.significance]
    tested = [one for one in told if one.p is not None]
    found = []
    if tested:
        names = " and ".join(sorted({one.test for one in tested}))
        differ = sum(1 for one in tested if one.differs)
        found.append(
            f"p is how often chance alone would make two like sides differ as much ({names}; two-sided, on the ratio of "
            f"the two values of a pair where all are above zero). {differ} of {len(tested)} figures that were tested have "
            f"p < {LEVEL}; of as many without any difference, about {len(tested) * LEVEL:.0f} would: p is of each figure by "
            "itself, and not corrected for their number. All repetitions are of the same guests, so what differs from "
            "one boot to the next is not in it."
        )
    if any(one.test == CONSTANT for one in told):
        found.append(
            "No spread: each side has the same value in all its repetitions, so a difference is no chance."
        )
    if any(one.test == TOO_FEW for one in told):
        found.append(f"Too few to tell: no outcome of so few repetitions could have p < {LEVEL}.")
    if any(_outliers(metric, side) for metric in result.metrics for side in ("base", "ours")):
        found.append(
            "Outside: more than 1.5 times the distance of the quartiles beyond them (Tukey's fences). Such values are "
            "shown and counted; none is left out of any figure."
        )
    return found


# What the keys of a result are called on the page, and in which order.
FACTS = {
    "qemu": "QEMU",
    "knownzero": "commit",
    "linux_base": "base kernel",
    "linux_ours": "our kernel",
    "image_base": "base kernel's image",
    "image_ours": "our kernel's image",
}


def _facts(result: Result) -> list[tuple[str, str]]:
    """What ran where: when, how long, versions, machine and sizes."""
    versions = {**{key: "" for key in FACTS if key in result.versions}, **result.versions}
    return [
        ("accelerator", result.accelerator),
        ("when", result.when.replace("T", " ")),
        ("took", f"{result.seconds:.0f} s"),
        *((FACTS.get(key, key), value) for key, value in versions.items()),
        *((f"machine: {key}", value) for key, value in sorted(result.host.items())),
        *((f"job: {key}", str(value)) for key, value in sorted(result.job.items())),
    ]


def _evidence(result: Result, page: Path | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """What a run left beside its figures (lab/bench/evidence.py): whose, and names of files with links.

    Links are from the folder ``page``; nothing where that or the run's folder is not known.
    """
    if result.folder is None or page is None:
        return []

    def links(root: Path, files: list[Path]) -> list[tuple[str, str]]:
        return [
            (str(file.relative_to(root)), quote(os.path.relpath(file.resolve(), page.resolve())))
            for file in sorted(files)
            if file.is_file()
        ]

    found = []
    for kind, words in ((GUESTS, "guest"), (KERNELS, "kernel")):
        for folder in sorted((result.folder / kind).glob("*/")):
            found.append((f"{words}: {folder.name}", links(folder, list(folder.rglob("*")))))
    found.append(("machine and QEMU", links(result.folder, [result.folder / name for name in (HOST, QEMU)])))
    return [(name, files) for name, files in found if files]


def _verdict(result: Result) -> str:
    """How many of a run's targets are met."""
    targets = [metric.target for metric in result.metrics if metric.target]
    return f"{sum(target.met for target in targets)} of {len(targets)}" if targets else "none set"


def _interval(metric: Metric) -> str:
    if metric.change_interval is None:
        return ""
    low, high = metric.change_interval
    return f"{_together(percent(low))} … {_together(percent(high))}"


def _together(text: str) -> str:
    """A figure and its unit, not to be broken in between."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _breakable(name: str) -> Markup:
    """A metric's name, which may be broken after dots and underscores."""
    return Markup(str(escape(name)).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _context(results: list[Result], folder: Path | None) -> dict[str, Any]:
    return {
        "results": results,
        "headlines": _headlines,
        "charts": _charts,
        "seed_tables": seeds.tables_for,
        "seed_rows": _seed_rows,
        "human": human,
        "percent": percent,
        "interval": _interval,
        "told": _told,
        "outliers": _outliers,
        "tests": _tests,
        "ran_on": ran_on,
        "facts": _facts,
        "evidence": lambda result: _evidence(result, folder),
        "verdict": _verdict,
        "breakable": _breakable,
        "together": _together,
        "cell": _cell,
    }


@functools.cache
def environment() -> jinja2.Environment:
    """Where the templates are, and how they are filled in."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # What a night began with, it ends with, whatever is edited meanwhile.
        auto_reload=False,
    )


def html(results: list[Result], folder: Path | None = None) -> str:
    """The page; with links to what is beside the results when told in which folder it will be."""
    return environment().get_template("report.html.j2").render(_context(results, folder))


def markdown(results: list[Result], folder: Path | None = None) -> str:
    """The same as Markdown, without the charts."""
    return environment().get_template("report.md.j2").render(_context(results, folder))


def write_reports(results: list[Result], folder: Path) -> list[Path]:
    """Write report.html and report.md into a folder (made when missing); their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (
        ("report.html", html(results, folder)),
        ("report.md", markdown(results, folder)),
    ):
        path = folder / name
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        written.append(path)
    return written


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""

    @app.command("report")
    def command(
        runs: Annotated[list[Path], typer.Argument(help="runs: folders under out/, or their result.json")],
        output: Annotated[
            Path | None, typer.Option("--output", help="folder to write to (default: the run's own)")
        ] = None,
    ) -> None:
        """Write report.html and report.md for one run, or one page for several."""
        results = [load(run) for run in runs]
        if output is None:
            first = runs[0] if runs[0].is_dir() else runs[0].parent
            output = first if len(runs) == 1 else paths.out() / "report" / time.strftime("%Y%m%d-%H%M%S")
        try:
            for path in write_reports(results, output):
                print(path)
        except OSError as error:
            raise LabError(
                "Cannot write the report", f"{output}: {error.strerror}", "name another folder with --output"
            ) from error
