# SPDX-License-Identifier: GPL-2.0
"""``kz report``: one self-contained page from results."""

import functools
import os
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from lab.core import lock
from lab.core.units import human, percent
from lab.report import charts, phases, summary
from lab.report.evidence import GUESTS
from lab.report.groups import groups
from lab.report.results import Metric, Result, in_words
from lab.report.significance import CONSTANT, LEVEL, TOO_FEW
from lab.report.table import TOGETHER

TEMPLATES = Path(__file__).parent / "templates"
REPORT = "report.html"


def ran_on(result: Result, metric: Metric) -> str:
    return in_words(metric.accelerator or result.accelerator)


def _charts(result: Result) -> list[dict[str, str]]:
    """The charts of a result: its title, caption, picture and accelerator."""
    found = []
    if phases.is_whole(result.metrics):
        drawn = phases.chart(result)
        found.append(_chart(phases.TITLE, drawn, result.ran_on, "Less is better. "))
    for group in groups(result):
        drawn = charts.bars(
            group.metrics, group.labels, group.title, result.sides, [*result.series]
        )
        on = dict.fromkeys(ran_on(result, metric) for metric in group.metrics)
        better = "More is better. " if group.metrics[0].better == "more" else ""
        found.append(_chart(group.title, drawn, ", ".join(on), better))
    return found


def _chart(title: str, svg: str, on: str, caption: str = "") -> dict[str, str]:
    return {"title": title, "caption": caption, "svg": Markup(svg), "ran_on": on}


def _test(metric: Metric) -> str:
    """The result of the test of significance, or nothing without values."""
    return metric.significance.text() if metric.significance else ""


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
    """The files of a run's guests by heading: names, and links from the folder ``page``."""
    if result.folder is None or page is None:
        return []
    found = []
    for root in sorted((result.folder / GUESTS).glob("*/")):
        links = [
            (file.name, quote(os.path.relpath(file.resolve(), page.resolve())))
            for file in sorted(root.iterdir())
        ]
        found.append((f"guest: {root.name}", links))
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

    def _breakable(name: str) -> Markup:
        return Markup(str(escape(name)).replace(".", ".<wbr>").replace("_", "_<wbr>"))

    of_results = (_charts, _tests, _facts, verdict, ran_on)
    of_metrics = (_interval, _test, _breakable, _together, human, percent)
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


def change(metric: Metric, between: str = " … ") -> str:
    """The change in percent, with its interval where the ends differ."""
    ends = list(dict.fromkeys(percent(end) for end in metric.change_interval or ()))
    return percent(metric.change_percent) + (f" ({between.join(ends)})" if len(ends) > 1 else "")


def write_report(results: list[Result], folder: Path) -> Path:
    """Write report.html into a folder (made when missing); its path."""
    lock.write_atomically(folder / REPORT, html(results, folder))
    return folder / REPORT
