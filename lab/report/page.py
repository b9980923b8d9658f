# SPDX-License-Identifier: GPL-2.0
"""``kz report``: one self-contained page (and Markdown) from results."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from lab.core.units import human, percent
from lab.report import charts, seeds
from lab.report.charted import CHARTS, HEADLINES
from lab.report.evidence import GUESTS, HOST, KERNELS, QEMU
from lab.report.results import Metric, Result
from lab.report.significance import CONSTANT, LEVEL, TOO_FEW, outside

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Chart:
    """A chart with its title, one plain sentence, and what its figures were measured on."""

    title: str
    sentence: str
    svg: Markup
    ran_on: str


@dataclass(frozen=True)
class Headline:
    """A large figure at the top of the page."""

    figure: str
    words: str
    met: bool | None


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
        if metric.name not in shown:
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
    """What a run left beside its figures (lab/report/evidence.py): whose, and names of files with links.

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
