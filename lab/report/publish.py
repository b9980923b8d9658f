# SPDX-License-Identifier: GPL-2.0
"""``kz publish RUN``: results, reduced, their pages and main charts into docs/results/."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path

from lab.core import lock
from lab.core.errors import LabError, TestFailure
from lab.core.paths import REPO
from lab.core.units import digits, scale
from lab.report import charts, phases, questions, registry
from lab.report.groups import Group, groups
from lab.report.page import change, runs
from lab.report.results import FILE_NAME, Metric, Result, Sample, from_data, load
from lab.report.significance import TOO_FEW

FOLDER = REPO / "docs" / "results"
MANY = 100  # figures; a bench with more has a wide table, and one chart
MARKS = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `kz publish`. -->
"""
HEAD = f"""{MARKS}# Published results

Medians; spread: the 10th to 90th percentile of both, and the 95 % interval of the change. A
question about several figures, such as those with init_on_alloc 0 and 1, has the worst. Figures of
different accelerators cannot be compared. [Methods](../how-to/measure.md).

"""
RUNS = """## Runs

Each run has a page with every figure: medians, in brackets the 10th to 90th percentile; the change
with its 95 % interval; the distance from the floor kernel, which leaves the memory as it is. After
±: half the distance between both percentiles. result.json beside it has the number of repetitions,
the p of each row and the text of each target.

"""


def page(results: list[Result]) -> str:
    """The first page: what users ask, and all published runs."""
    links = "[{0}]({0}/README.md)"
    return "".join([HEAD, questions.table(results), RUNS, runs(results, links)])


def ordered(results: list[Result]) -> list[Result]:
    """Results by name."""
    return sorted(results, key=lambda result: result.name)


def figures(result: Result) -> str:
    """The page of a run: every figure, both sides in one unit."""
    head = f"{MARKS}# {result.name}\n\n{result.ran_on}. [How to read it](../README.md#runs).\n\n"
    rows = "".join("|".join(cells).rstrip("|") + "\n" for cells in table(result))
    return head + not_met(result) + rows


def is_wide(result: Result) -> bool:
    """Whether figures share rows: if there are very many, and each last name has one unit."""
    units: dict[str, set[str]] = {}
    for metric in result.metrics:
        units.setdefault(metric.name.rpartition(".")[2], set()).add(metric.unit)
    return len(result.metrics) > MANY and all(len(of) == 1 for of in units.values())


def not_met(result: Result) -> str:
    """The targets that a wide table has no column for: those that are missed or not decided."""
    if not is_wide(result):
        return ""
    lines = [
        f"- `{one.name}`: {one.target.verdict}: {one.target.text}\n"
        for one in result.metrics
        if one.target and not one.target.met
    ]
    return "".join(["Targets that are not met:\n\n", *lines, "\n"]) if lines else ""


def table(result: Result) -> list[list[str]]:
    """A row for each figure.

    Of a wide result, one for each job, with a column for each last name.
    """
    if not is_wide(result):
        heads = [
            ["figure", *result.sides, "change", "target"],
            ["---", "---:", "---:", "---:", "---"],
        ]
        return heads + list(map(_row, result.metrics))
    columns: dict[str, dict[str, Metric]] = {}
    for metric in result.metrics:
        job, _, last = metric.name.rpartition(".")
        columns.setdefault(last, {})[job] = metric
    jobs = list(dict.fromkeys(metric.name.rpartition(".")[0] for metric in result.metrics))
    rows = [["→".join(result.sides)], ["---"], *([f"`{job}`"] for job in jobs)]
    for name, metrics in columns.items():
        unit = next(iter(metrics.values())).unit.replace("instructions", "")  # in millions
        largest = max(max(one.base.median, one.ours.median) for one in metrics.values())
        divisor, unit = scale(unit, largest)
        column = [name if name == unit else f"{name} {unit}".strip(), "---:"]
        for job in jobs:
            one = metrics.get(job)
            column.append(f"{_half(one.base, divisor)}→{_half(one.ours, divisor)}" if one else "")
        for row, cell in zip(rows, column, strict=True):
            row.append(cell)
    return rows


def _half(side: Sample, divisor: float) -> str:
    """The median, with half the distance between both percentiles where it shows."""
    middle, half = digits(side.median / divisor), digits((side.high - side.low) / 2 / divisor)
    return middle if half in ("0", "0.00") else f"{middle}±{half}"


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
    """The reasons against publishing a result as it is."""
    found = [] if result.metrics else [f"{run}: it has no figures"]
    return found + result.missed()


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


def publish(run: Path, benches: list[str], anyway: bool = False, to: Path = FOLDER) -> list[Path]:
    """Publish a run; the folders written. TestFailure for one with defects, without ``anyway``."""
    results, reasons = collect(run, benches)
    if reasons and not (anyway and results):
        why = "\n".join(reasons)
        fix = "measure again, or add --anyway to publish the readable results as they are"
        raise TestFailure(f"Cannot publish {run}", why, fix)
    texts = {result.name: _files(result) for result in results}
    kept = [load(file) for file in to.glob(f"*/{FILE_NAME}") if file.parent.name not in texts]
    for name, files in texts.items():
        shutil.rmtree(to / name, ignore_errors=True)
        for file, content in files.items():
            lock.write_atomically(to / name / file, content)
    lock.write_atomically(to / "README.md", page(ordered(kept + results)))
    return [to / name for name in texts]


def _files(result: Result) -> dict[str, str]:
    """The files of a run.

    The charts need only what result.json has, so that it can be published again.
    """
    found = {FILE_NAME: _reduced(result)}
    whole = from_data(json.loads(found[FILE_NAME]), result.folder)
    found["README.md"] = figures(whole)
    main = main_charts(whole)
    about = (
        f"Measured on {result.ran_on}. Bars: medians; lines: 10th to 90th percentile. "
        f"{_better(main)}"
    )
    if main:
        stem = main[0].metrics[0].name.partition(".")[0].replace("_", "-")
        if of_life := phases.of_phases(whole.metrics):
            drawn = phases.picture(whole, f"Measured on {result.ran_on}. Less is better.")
            if phases.is_whole(of_life):
                found[f"{stem}-short.svg"] = phases.short(whole)
        else:
            drawn = charts.picture(main, result.sides, about, [*result.series])
        found[f"{stem}.svg"] = drawn
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
