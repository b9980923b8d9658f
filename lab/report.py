# SPDX-License-Identifier: GPL-2.0
"""``kz report``: one self-contained page (and Markdown) from results."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jinja2
import typer
from markupsafe import Markup, escape

from lab import charts, paths
from lab.errors import LabError
from lab.results import Metric, Result, load
from lab.units import human, percent

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class SeedFigure:
    """A figure of the seed's own (KVM, its author's machine) and the metric of ours beside it."""

    what: str
    base: str
    ours: str
    change: str
    metric: str


SEED = (
    SeedFigure(
        "task-clock, 256 MB with THP", "232 ± 20 ms", "51 ± 26 ms", "-78 %", "thp.populate.task_clock"
    ),
    SeedFigure(
        "task-clock, 256 MB of hugetlb surplus pages",
        "219 ± 23 ms",
        "65 ± 34 ms",
        "-70 %",
        "hugetlb.populate.task_clock",
    ),
    SeedFigure(
        "order-0 pages from reported memory", "0 %", "about 21 %", "", "order0.populate.skipped_percent"
    ),
)


@dataclass(frozen=True)
class Chart:
    """A chart with its title and one plain sentence."""

    title: str
    sentence: str
    svg: Markup


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
        ),
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


def _charts(result: Result) -> list[Chart]:
    found = []
    shown: set[str] = set()
    for title, sentence, wanted in CHARTS:
        there = [(metric, label) for name, label in wanted if (metric := result.metric(name))]
        if not there:
            continue
        shown.update(metric.name for metric, _ in there)
        svg = charts.bars([metric for metric, _ in there], [label for _, label in there], title, result.sides)
        found.append(Chart(title, sentence, Markup(svg)))
    # A bench that the list above does not know is drawn all the same.
    for metric in result.metrics:
        if metric.name not in shown and not any(
            metric.name.startswith(p) for p in ("thp.", "order0.", "host.", "hotpath.")
        ):
            # Its title says what it is: no label beside.
            svg = charts.bars([metric], [""], metric.name, result.sides)
            found.append(Chart(metric.name, metric.sentence, Markup(svg)))
    return found


def _seed_rows(result: Result) -> list[dict[str, str]]:
    rows = []
    for figure in SEED:
        metric = result.metric(figure.metric)
        rows.append(
            {
                "what": figure.what,
                "seed_base": figure.base,
                "seed_ours": figure.ours,
                "seed_change": figure.change,
                "base": human(metric.base.median, metric.unit) if metric else "not in this run",
                "ours": human(metric.ours.median, metric.unit) if metric else "",
                "change": percent(metric.change_percent) if metric and metric.unit != "percent" else "",
            }
        )
    return rows


def _interval(metric: Metric) -> str:
    if metric.change_interval is None:
        return ""
    low, high = metric.change_interval
    return f"{_together(percent(low))} … {_together(percent(high))}"


def _together(text: str) -> str:
    """A figure and its unit, not to be broken in between."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _breakable(name: str) -> Markup:
    """A metric's name, which may be broken after dots and underscores."""
    return Markup(str(escape(name)).replace(".", ".<wbr>").replace("_", "_<wbr>"))


def _context(results: list[Result]) -> dict[str, Any]:
    return {
        "results": results,
        "headlines": _headlines,
        "charts": _charts,
        "seed_rows": _seed_rows,
        "human": human,
        "percent": percent,
        "interval": _interval,
        "breakable": _breakable,
        "together": _together,
    }


def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"], default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def html(results: list[Result]) -> str:
    """The page."""
    return _environment().get_template("report.html.j2").render(_context(results))


def markdown(results: list[Result]) -> str:
    """The same as Markdown, without the charts."""
    return _environment().get_template("report.md.j2").render(_context(results))


def write_reports(results: list[Result], folder: Path) -> list[Path]:
    """Write report.html and report.md into a folder (made when missing); their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in (("report.html", html(results)), ("report.md", markdown(results))):
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
