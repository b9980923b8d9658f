# SPDX-License-Identifier: GPL-2.0
"""``kz publish RUN``: results, reduced, their pages and main charts into docs/results/."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from lab.core import lock
from lab.core.errors import LabError, TestFailure
from lab.core.paths import REPO
from lab.core.units import scale
from lab.report import charts, losses, origin, phases, questions, registry
from lab.report.groups import Group, groups
from lab.report.page import change, verdict
from lab.report.results import FILE_NAME, Metric, Result, from_data, load
from lab.report.significance import TOO_FEW
from lab.report.table import Table

FOLDER = REPO / "docs" / "results"
MARKS = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `kz publish`. -->
"""
HEAD = f"""{MARKS}# Published results

Medians; spread: the 10th to 90th percentile of both, and the 95 % interval of the change. A
question about several figures, such as those with init_on_alloc 0 and 1, has the worst. Figures of
different accelerators cannot be compared. [Methods](../how-to/measure.md).

"""
LOSSES = """
## Losses

All figures that are worse by 3 % or more: those whose interval excludes zero or whose p is below
0.05, and counts of instructions. kzeropaged is off by default.

"""
RUNS = """
## Runs

Each run has a page with every figure: medians, in brackets the 10th to 90th percentile; the change
with its 95 % interval, which says little with fewer than six repetitions; the distance from the
floor kernel, which leaves the memory as it is.
result.json beside it has the number of repetitions, the p of each row and the text of each target.
A run measured this series, or the one before the commit to linux/parts that is named; if few parts
differ, these are named.

"""


def page(results: list[Result]) -> str:
    """The first page: what users ask, all losses, and all published runs."""
    tables = (HEAD, questions.table(results), LOSSES, losses.table(results), RUNS, _runs(results))
    return "".join(tables)


def _runs(results: list[Result]) -> str:
    """A table in Markdown with the command and the origin of each result."""
    heads = ("run", "command", "accelerator", "commit", "date", "series", "targets met", "machine")
    rows = []
    for one in results:
        known = [one.host[key] for key in ("cpus", "cpu") if key in one.host]
        machine = "×".join(known) or "unknown"
        commit, day = one.versions.get("knownzero", "unknown"), one.when[:10]
        first = (f"[{one.name}]({one.name}/README.md)", f"`{one.reproduce}`", one.ran_on)
        rows.append((*first, commit, day, origin.words(one), verdict(one), machine))
    return Table(heads, rows).markdown()


def ordered(results: list[Result]) -> list[Result]:
    """Results by name."""
    return sorted(results, key=lambda result: result.name)


def figures(result: Result, pictures: Sequence[str] = ()) -> str:
    """The page of a run: its pictures, and every figure, both sides in one unit."""
    about = f"{result.ran_on}; {origin.words(result)}. [How to read it](../README.md#runs)."
    drawn = "".join(f"![The main figures of the table]({name})\n\n" for name in pictures)
    return f"{MARKS}# {result.name}\n\n{about}\n\n{drawn}{table(result).markdown()}"


def table(result: Result) -> Table:
    """A row for each figure of a run."""
    heads = ("figure", *result.sides, "change", "target")
    return Table(heads, list(map(_row, result.metrics)), right=(1, 2, 3))


def _row(metric: Metric) -> list[str]:
    divisor, unit = scale(metric.unit, max(metric.base.median, metric.ours.median))
    target = metric.target.verdict if metric.target else ""
    if metric.near_floor and metric.floor:
        above = (metric.ours.median - metric.floor) / metric.floor * 100
        target += f"{'; ' if target else ''}floor {above:+.1f}%: {metric.near_floor.distance}"
    name = f"`{metric.name}`" + (
        "" if metric.name.endswith(unit) else f" {unit.replace('percent', '%')}"
    )
    sides = (metric.base.text(divisor), metric.ours.text(divisor))
    return [name, *sides, change(metric, "…").replace(" %", "%"), target]


def refusals(run: Path, result: Result) -> list[str]:
    """The reasons against publishing a result. A missed target is none: its row says so."""
    reasons = [] if result.metrics else [f"{run}: it has no figures"]
    if "--ours" in result.reproduce:
        reasons.append(f"{run}: it is not of the kernel that ships ({result.reproduce})")
    published = FOLDER / result.name / FILE_NAME
    partial = "--only" in result.reproduce and published.is_file()
    if partial and "--only" not in load(published).reproduce:
        reasons.append(f"{run}: {published} has all that {result.reproduce} left out")
    return reasons


def collect(run: Path, benches: list[str]) -> tuple[list[Result], list[str]]:
    """The readable results of a run, or of all ``benches`` in it, and the reasons against
    publishing.
    """
    if run.is_file() or (run / FILE_NAME).is_file() or not any(run.glob(f"*/{FILE_NAME}")):
        result = load(run)
        return [result], refusals(run, result)
    results, reasons = [], []
    for name in dict.fromkeys(
        [*benches, *sorted(file.parent.name for file in run.glob(f"*/{FILE_NAME}"))]
    ):
        try:
            results.append(load(run / name))
            reasons += refusals(run / name, results[-1])
        except LabError as error:
            reasons.append(f"{name}: {error.what}: {error.why}")
    return results, reasons


def publish(run: Path, benches: list[str]) -> list[Path]:
    """Publish a run; the folders written. TestFailure for one that is not whole."""
    results, reasons = collect(run, benches)
    if reasons:
        why = "\n".join(reasons)
        fix = "measure again, or name the folder of one bench that is whole"
        raise TestFailure(f"Cannot publish {run}", why, fix)
    texts = {result.name: _files(result) for result in results}
    earlier = FOLDER.glob(f"*/{FILE_NAME}")
    kept = [load(file) for file in earlier if file.parent.name not in texts]
    for name, files in texts.items():
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        for file, content in files.items():
            lock.write_atomically(FOLDER / name / file, content)
    lock.write_atomically(FOLDER / "README.md", page(ordered(kept + results)))
    return [FOLDER / name for name in texts]


def _files(result: Result) -> dict[str, str]:
    """The files of a run.

    The charts need only what result.json has, so that it can be published again.
    """
    found = {FILE_NAME: _reduced(result)}
    whole = from_data(json.loads(found[FILE_NAME]), result.folder)
    main = main_charts(whole)
    about = (
        f"Measured on {result.ran_on}. Bars: medians; lines: 10th to 90th percentile. "
        f"{_better(main)}"
    )
    if main:
        stem = main[0].metrics[0].name.partition(".")[0].replace("_", "-")
        if phases.is_whole(whole.metrics):
            drawn = phases.picture(whole)
        else:
            drawn = charts.picture(main, result.sides, about, [*result.series])
        found[f"{stem}.svg"] = drawn
    found["README.md"] = figures(whole, [name for name in found if name.endswith(".svg")])
    return found


def _better(charted: list[Group]) -> str:
    """The direction that is better in charts."""
    known = {metric.better for chart in charted for metric in chart.metrics if metric.better}
    if len(known) > 1:
        return "Less is better, except rates."
    return "".join(f"{one.capitalize()} is better." for one in known)


def main_charts(result: Result) -> list[Group]:
    """The charts of a published run: its main metrics, or else its first chart."""
    every = groups(result)
    chosen = [metric for metric in result.metrics if _is_main(metric)]
    return groups(replace(result, metrics=chosen)) if chosen else every[:1]


def _is_main(metric: Metric) -> bool:
    about = registry.definitions().get(metric.kind)
    return bool(about and about.main and about.main.applies(metric.parameters))


def _six_digits(text: str) -> float:
    number = float(f"{float(text):.6g}")
    return int(number) if number.is_integer() else number


def _reduced(result: Result) -> str:
    """The text of result.json without the single values, a line for each metric.

    Numbers have six digits. The text leaves out null and default values, names that the kind and
    the parameters make, the words of metrics.toml, and that there were too few values to test;
    load() supplies them.
    """
    data = json.loads(result.to_json(), parse_float=_six_digits)
    usual = {one.name: one.default for one in fields(Metric)}
    metrics = []
    for one in data.pop("metrics"):
        del one["values"]
        test = one["significance"]
        if test and test["test"] == TOO_FEW:
            del one["significance"]
        elif test and test["p"] is None:
            del test["p"]
        if one["accelerator"] == result.accelerator:
            one["accelerator"] = ""
        of = one["kind"], one["parameters"]
        known = usual | {"name": registry.name(*of)} | registry.words(*of)
        metrics.append(
            {key: value for key, value in one.items() if value is not None and value != known[key]}
        )
    head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
    tight = (",", ":")
    lines = ",\n".join(json.dumps(one, ensure_ascii=False, separators=tight) for one in metrics)
    return f'{head},\n "metrics": [\n{lines}\n ]\n}}\n'
