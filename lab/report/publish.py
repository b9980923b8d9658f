# SPDX-License-Identifier: GPL-2.0
"""``kz publish RUN``: results, reduced, and their main charts into docs/results/."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lab.core import lock
from lab.core.errors import LabError, TestFailure
from lab.core.paths import REPO
from lab.core.units import human, percent
from lab.report import charts
from lab.report.groups import groups
from lab.report.page import verdict
from lab.report.results import FILE_NAME, Metric, Result, load, load_error, results_of

FOLDER = REPO / "docs" / "results"
LIMIT = 1 << 20  # bytes, of all published results
MAIN = 2  # charts of a published run
HEAD = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `kz publish`. -->
# Published results

Medians; in brackets the 10th to 90th percentile and the number of repetitions. The change has its 95 % interval,
where there are three repetitions or more. p is of a test of each row by itself. Figures of different accelerators
cannot be compared. `kz publish RUN` adds a run and writes this page; [measure.md](../how-to/measure.md) has the methods.

"""


def refusals(run: Path, result: Result) -> list[str]:
    """The reasons against publishing a result as it is."""
    found = [] if result.metrics else [f"{run}: it has no figures"]
    return found + [
        f"{result.name}: {metric.name} misses its target: {metric.target.text}"
        for metric in result.metrics
        if metric.target and not metric.target.met
    ]


def collect(run: Path, benches: list[str]) -> tuple[list[Result], list[str]]:
    """The readable results of a run, and the reasons against publishing it.

    A folder with folders in it is a run of ``kz bench all``, which has one for each of ``benches``.
    """
    whole = run.is_dir() and not (run / FILE_NAME).is_file() and any(run.glob(f"*/{FILE_NAME}"))
    if not whole:
        if run.is_dir() and (failed := load_error(run)):
            raise failed
        results = list(results_of(run).values())
        return results, refusals(run, results[0])
    results, reasons = [], []
    for name in dict.fromkeys([*benches, *sorted(file.parent.name for file in run.glob(f"*/{FILE_NAME}"))]):
        try:
            if failed := load_error(run / name):
                raise failed
            results.append(load(run / name))
            reasons += refusals(run / name, results[-1])
        except LabError as error:
            reasons.append(f"{name}: {error.what}: {error.why}")
    return results, reasons


def publish(run: Path, benches: list[str], anyway: bool = False, to: Path = FOLDER) -> list[Path]:
    """Publish a run; the folders written. TestFailure, and nothing is written, for a run with defects.

    ``anyway`` publishes the readable results of such a run.
    """
    results, reasons = collect(run, benches)
    if reasons and not (anyway and results):
        why = "\n".join(reasons)
        fix = "measure again, or add --anyway to publish the readable results as they are"
        raise TestFailure(f"Cannot publish {run}", why, fix)
    texts = {result.name: _files(result) for result in results}
    kept = {file: file.stat().st_size for file in to.glob("*/*") if file.parent.name not in texts}
    size = sum(kept.values()) + sum(len(text.encode()) for files in texts.values() for text in files.values())
    published = [load(file) for file in kept if file.name == FILE_NAME] + results
    page = _page(published)
    if size + len(page.encode()) > LIMIT:
        why = f"{to} would have {size + len(page.encode()):,} bytes of at most {LIMIT:,}"
        raise LabError(f"Cannot publish {run}", why, "remove results that are no longer needed")
    for name, files in texts.items():
        shutil.rmtree(to / name, ignore_errors=True)
        for file, text in files.items():
            lock.write_atomically(to / name / file, text)
    lock.write_atomically(to / "README.md", page)
    return [to / name for name in texts]


def _files(result: Result) -> dict[str, str]:
    """The files of a published result by name."""
    found = {FILE_NAME: _reduced(result)}
    main = groups(result)[:MAIN]
    about = f"{result.accelerator}: medians, 10th to 90th percentile"
    for scheme in charts.SCHEMES if main else ():
        stem = main[0].metrics[0].name.partition(".")[0].replace("_", "-")
        found[f"{stem}-{scheme}.svg"] = charts.picture(main, result.sides, scheme, about)
    return found


def _reduced(result: Result) -> str:
    """The text of result.json without the single values, a line for each metric."""
    data = json.loads(result.to_json())
    metrics = [{key: value for key, value in one.items() if key != "values"} for one in data.pop("metrics")]
    head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
    lines = ",\n".join(json.dumps(metric, ensure_ascii=False) for metric in metrics)
    return f'{head},\n "metrics": [\n{lines}\n ]\n}}\n'


def _page(results: list[Result]) -> str:
    ordered = sorted(results, key=lambda result: (result.name != "demo", result.name))
    parts = [
        HEAD,
        "| run | command | accelerator | commit | date | targets met |\n|---|---|---|---|---|---|\n",
    ]
    for result in ordered:
        cells = f"`{result.reproduce}` | {result.accelerator} | {result.versions.get('knownzero', 'unknown')}"
        parts.append(
            f"| [{result.name}](#{result.name}) | {cells} | {result.when[:10]} | {verdict(result)} |\n"
        )
    for result in ordered:
        heads = " | ".join(("figure", *result.sides, "change", "p", "target"))
        host = ", ".join(f"{key} {value}" for key, value in sorted(result.host.items()))
        parts.append(
            f"\n## {result.name}\n\nMachine: {host or 'unknown'}. Command, accelerator, commit and date are above.\n\n"
            f"| {heads} |\n|---|---:|---:|---:|---|---|\n"
        )
        parts += [_row(metric) for metric in result.metrics]
    return "".join(parts)


def _row(metric: Metric) -> str:
    sides = [
        f"{human(side.median, metric.unit)} ({human(side.low, metric.unit)} … {human(side.high, metric.unit)}; {side.n})"
        for side in (metric.base, metric.ours)
    ]
    change = percent(metric.change_percent)
    if metric.change_interval:
        change += f" ({' … '.join(percent(end) for end in metric.change_interval)})"
    test = metric.significance.text() if metric.significance else ""
    target = f"{'met' if metric.target.met else 'MISSED'}: {metric.target.text}" if metric.target else ""
    cells = (f"`{metric.name}`", *sides, change, test, target.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"
