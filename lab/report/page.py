# SPDX-License-Identifier: GPL-2.0
"""``kz report``: one self-contained page (and Markdown) from results."""

import functools
import os
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from lab.core import lock
from lab.core.paths import REPO
from lab.core.units import human, percent
from lab.report import charts, origin, phases, registry, summary
from lab.report.evidence import GUESTS, HOST, QEMU
from lab.report.groups import groups
from lab.report.results import Metric, Result, Sample, in_words
from lab.report.significance import CONSTANT, LEVEL, TOO_FEW, outside
from lab.report.table import TOGETHER, Table

TEMPLATES = Path(__file__).parent / "templates"
POSTED = REPO / "docs" / "results" / "posted.toml"


def _headlines(result: Result) -> list[tuple[str, str, bool | None]]:
    """The large figures at the top: figure, words, and whether its target is met."""
    found: list[tuple[str, str, bool | None]] = []
    for metric in result.metrics:
        about = registry.definitions().get(metric.kind)
        rule = registry.first(about.headlines, metric.parameters) if about else None
        if rule:
            change = percent(metric.change_percent)
            value = human(metric.ours.median, metric.unit)
            met = metric.target.met if metric.target and metric.target.decided else None
            found.append((value if rule.more.get("value") else change, rule.more["words"], met))
    return found


def ran_on(result: Result, metric: Metric) -> str:
    return in_words(metric.accelerator or result.accelerator)


def _charts(result: Result) -> list[dict[str, str]]:
    over_time = {"title": charts.OVER_TIME, "caption": "", "ran_on": result.ran_on}
    over_time |= {"svg": Markup(charts.lines(result.series))} if result.series else {}
    life = {"title": phases.TITLE, "caption": "Less is better. ", "ran_on": result.ran_on}
    if in_phases := phases.of_phases(result.metrics):
        life["svg"] = Markup(phases.chart(result))
    return (
        [over_time] * bool(result.series)
        + [life] * bool(in_phases)
        + [
            {
                "title": group.title,
                "caption": "More is better. " if group.metrics[0].better == "more" else "",
                "svg": Markup(
                    charts.bars(
                        group.metrics, group.labels, group.title, result.sides, [*result.series]
                    )
                ),
                "ran_on": ", ".join(
                    dict.fromkeys(ran_on(result, metric) for metric in group.metrics)
                ),
            }
            for group in groups(result)
        ]
    )


@functools.cache
def posted() -> list[dict[str, Any]]:
    tables: list[dict[str, Any]] = tomllib.loads(POSTED.read_text(encoding="utf-8"))["table"]
    return tables


def _posted_rows(result: Result, table: dict[str, Any]) -> list[dict[str, str]]:
    rows = []
    for *theirs, name in table["rows"]:
        metric = result.metric(name) if name else None
        bench = name.partition(".")[0].replace("_", "-")
        here = {
            "base": f"in kz bench {bench}" if name else "not measured",
            "ours": "",
            "change": "",
            "p": "",
        }
        if metric:
            sides = (human(side.median, metric.unit) for side in (metric.base, metric.ours))
            here |= zip(("base", "ours"), sides, strict=True)
            if metric.unit != "percent":
                here |= {"change": percent(metric.change_percent), "p": _test(metric)}
        rows.append(
            dict(zip(("what", "seed_base", "seed_ours", "seed_change"), theirs, strict=True)) | here
        )
    return rows


def _test(metric: Metric) -> str:
    """The result of the test of significance, or nothing without values."""
    return metric.significance.text() if metric.significance else ""


def _outliers(metric: Metric, side: str) -> str:
    """How many values of a side are outside the fences, and the farthest.

    Or the largest one that a chart cuts off.
    """
    values = metric.values.get(side, [])
    found = [value for value, out in zip(values, outside(values), strict=True) if out]
    if found:
        middle = (metric.base if side == "base" else metric.ours).median
        farthest = human(max(found, key=lambda value: abs(value - middle)), metric.unit)
        return f"{len(found)} of {len(values)} outside, as far as {_together(farthest)}"
    edge = charts.BEYOND * max(metric.base.median, metric.ours.median)
    return (
        f"up to {_together(human(max(values), metric.unit))}"
        if values and max(values) > edge > 0
        else ""
    )


def _tests(result: Result) -> list[str]:
    results = [metric.significance for metric in result.metrics if metric.significance]
    tested = [one for one in results if one.p is not None]
    found = []
    if tested:
        names = " and ".join(sorted({one.test for one in tested}))
        differ = sum(1 for one in tested if one.differs)
        found.append(
            f"p is the probability that two equal sides differ as much by chance ({names}; "
            "two-sided, on the ratio of the two values of a pair where all are above zero). "
            f"{differ} of {len(tested)} figures that were tested have p < {LEVEL}; of as many "
            f"without any difference, about {len(tested) * LEVEL:.0f} would. p is not corrected "
            "for the number of figures. All repetitions are of the same guests, so p does not "
            "cover differences between boots."
        )
    if any(one.test == CONSTANT for one in results):
        found.append(
            "No spread: each side has one value in all its repetitions, so chance is ruled out."
        )
    if any(one.test == TOO_FEW for one in results):
        found.append(f"Too few to tell: no outcome of so few repetitions can have p < {LEVEL}.")
    if any(_outliers(metric, side) for metric in result.metrics for side in ("base", "ours")):
        found.append(
            "Outside: more than 1.5 times the distance of the quartiles beyond them (Tukey's "
            "fences). Such values are shown and counted; every figure includes them."
        )
    return found


def _facts(result: Result) -> list[tuple[str, str]]:
    """Accelerator, time, duration, versions, machine and sizes."""
    groups = (("version", result.versions), ("machine", result.host), ("job", result.job))
    first = {"accelerator": result.ran_on, "when": result.when.replace("T", " ")}
    first["took"] = f"{result.seconds:.0f} s"
    rest = (
        (f"{kind}: {key}", str(value))
        for kind, facts in groups
        for key, value in sorted(facts.items())
    )
    return [*first.items(), *rest]


def _evidence(result: Result, page: Path | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """Files beside a run's figures by heading: names, and links from the folder ``page``."""
    if result.folder is None or page is None:
        return []
    roots = {
        f"guest: {root.name}": [*root.iterdir()]
        for root in sorted((result.folder / GUESTS).glob("*/"))
    }
    roots["machine and QEMU"] = [result.folder / name for name in (HOST, QEMU)]
    found = []
    for words, files in roots.items():
        there = sorted(file for file in files if file.is_file())
        links = [
            (file.name, quote(os.path.relpath(file.resolve(), page.resolve()))) for file in there
        ]
        if links:
            found.append((words, links))
    return found


def verdict(result: Result) -> str:
    """How many targets are met, and how many floors are reached."""
    targets = [metric.target for metric in result.metrics if metric.target]
    text = f"{sum(target.met for target in targets)} of {len(targets)}" if targets else "none set"
    if hidden := sum(not target.decided for target in targets):
        text += f", {hidden} not decided"
    floors = [metric.near_floor for metric in result.metrics if metric.near_floor]
    if not floors:
        return text
    counts = Counter(floor.distance for floor in floors)
    return f"{text}; floor: " + ", ".join(
        f"{number} {word}" for word, number in sorted(counts.items())
    )


def _interval(metric: Metric) -> str:
    if metric.change_interval is None:
        return ""
    low, high = metric.change_interval
    return f"{_together(percent(low))} … {_together(percent(high))}"


def _together(text: str) -> str:
    """A figure and its unit without a line break between them."""
    return text.replace(" ", TOGETHER)


def html(results: list[Result], folder: Path | None = None) -> str:
    """The page; with links to the files beside the results when ``folder`` is where it will be."""

    def _posted_tables(result: Result) -> list[dict[str, Any]]:
        return [
            table
            for table in posted()
            if any(row[4] and result.metric(row[4]) for row in table["rows"])
        ]

    def _breakable(name: str) -> Markup:
        return Markup(str(escape(name)).replace(".", ".<wbr>").replace("_", "_<wbr>"))

    of_results = (
        _headlines,
        _charts,
        _posted_tables,
        _posted_rows,
        _tests,
        _facts,
        verdict,
        ran_on,
    )
    of_metrics = (_interval, _test, _outliers, _breakable, _together, human, percent)
    of_summary = (summary.is_of, summary.notes)
    context = {
        helper.__name__.removeprefix("_"): helper
        for helper in (*of_results, *of_metrics, *of_summary)
    }
    more = {
        "evidence": lambda result: _evidence(result, folder),
        "short": lambda result: summary.table(result).html(),
    }
    return environment().get_template("report.html.j2").render(context | more, results=results)


@functools.cache
def environment() -> jinja2.Environment:
    """The templates, loaded once."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # A night ends with the templates that it began with.
        auto_reload=False,
    )


LEGEND = (
    "Medians; in brackets the 10th to 90th percentile where they differ, and the repetitions. The "
    "change has its 95 % interval, where there are three repetitions or more. p is of a test of "
    "each row by itself.\n"
)


def markdown(results: list[Result]) -> str:
    """Results as tables in Markdown, with the methods, versions and machine."""
    parts = ["# Knownzero: both sides\n\n", LEGEND, "\n", runs(results)]
    for result in results:
        parts += [f"\n## {result.name}\n\n{figures(result)}"]
        parts += [f"\n{text}\n" for text in (*_tests(result), *result.notes)]
        parts += ["\n", *(f"- {key}: {value}\n" for key, value in _facts(result))]
    return "".join(parts)


def runs(results: list[Result], link: str = "[{0}](#{0})") -> str:
    """A table in Markdown with the command and the origin of each result."""
    heads = ("run", "command", "accelerator", "commit", "date", "series", "targets met", "machine")
    rows = []
    for one in results:
        known = [one.host[key] for key in ("cpus", "cpu") if key in one.host]
        machine = "×".join(known) or "unknown"
        commit, day = one.versions.get("knownzero", "unknown"), one.when[:10]
        first = (link.format(one.name), f"`{one.reproduce}`", one.ran_on)
        rows.append((*first, commit, day, origin.words(one), verdict(one), machine))
    return Table(heads, rows).markdown()


def figures(result: Result) -> str:
    """The table of a result in Markdown."""
    heads = ("figure", *result.sides, "change", "p", "target", "floor")
    return Table(heads, list(map(_row, result.metrics)), right=(1, 2, 3)).markdown()


def change(metric: Metric, between: str = " … ") -> str:
    """The change in percent, with its interval where the ends differ."""
    ends = list(dict.fromkeys(percent(end) for end in metric.change_interval or ()))
    return percent(metric.change_percent) + (f" ({between.join(ends)})" if len(ends) > 1 else "")


def _row(metric: Metric) -> tuple[str, ...]:
    def cell(side: Sample) -> str:
        low, high = human(side.low, metric.unit), human(side.high, metric.unit)
        return (
            f"{human(side.median, metric.unit)} "
            f"({f'{low} … {high}; ' if low != high else ''}{side.n})"
        )

    target = f"{metric.target.verdict}: {metric.target.text}" if metric.target else ""
    floor = f"{metric.near_floor.distance}: {metric.near_floor.text}" if metric.near_floor else ""
    sides = cell(metric.base), cell(metric.ours)
    return (f"`{metric.name}`", *sides, change(metric), _test(metric), target, floor)


def write_reports(results: list[Result], folder: Path) -> list[Path]:
    """Write report.html and report.md into a folder (made when missing); their paths."""
    written = []
    for name, text in (("report.html", html(results, folder)), ("report.md", markdown(results))):
        lock.write_atomically(folder / name, text)
        written.append(folder / name)
    return written
