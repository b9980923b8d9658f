# SPDX-License-Identifier: GPL-2.0
"""The table of what users ask, answered by published results."""

import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from lab.core.paths import REPO
from lab.core.units import human, percent
from lab.report.page import ran_on
from lab.report.results import Metric, Result, Sample
from lab.report.table import Table

QUESTIONS = REPO / "docs" / "results" / "questions.toml"
HEADS = ("question", "without", "with", "change", "spread", "accelerator", "command")


def questions() -> list[dict[str, Any]]:
    """The questions: what one asks, its runs, and a pattern for the names of its metrics."""
    found: list[dict[str, Any]] = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))["question"]
    return found


def table(results: Sequence[Result]) -> str:
    """A row for each question that these results answer; nothing without any."""
    rows = []
    for question in questions():
        if found := _worst(results, question):
            result, metric = found
            asks = f"[{question['asks']}]({result.name}/README.md)"
            where, command = ran_on(result, metric), f"`{result.reproduce}`"
            rows.append((asks, *_sides(metric), _spread(metric), where, command))
    if not rows:
        return ""
    return Table(HEADS, rows).markdown()


def _worst(results: Sequence[Result], question: dict[str, Any]) -> tuple[Result, Metric] | None:
    """Of all figures of the question's runs with such a name, the one that is worst for ours."""
    matching = [
        (result, metric)
        for result in results
        if result.name in question["runs"]
        for metric in result.metrics
        if fnmatchcase(metric.name, question["metrics"])
    ]
    return max(matching, key=lambda one: badness(one[1]), default=None)


def badness(metric: Metric) -> float:
    """How much worse ours is, in percent."""
    if metric.change_percent is None:
        return float("inf")
    return -metric.change_percent if metric.better == "more" else metric.change_percent


def _sides(metric: Metric) -> list[str]:
    """Both medians and the change."""
    medians = [human(side.median, metric.unit) for side in (metric.base, metric.ours)]
    return [*medians, percent(metric.change_percent)]


def _spread(metric: Metric) -> str:
    """The percentiles of both sides, the interval of the change, and the number of values."""
    sides = [_range(side, metric.unit) for side in (metric.base, metric.ours)]
    count = metric.ours.n
    if count == 1:
        return "one value"
    parts = [" → ".join(sides)]
    if metric.change_interval:
        low, high = metric.change_interval
        parts.append(f"change {percent(low)} … {percent(high)}")
    return "; ".join([*parts, f"n = {count}"])


def _range(side: Sample, unit: str) -> str:
    return " … ".join(dict.fromkeys(human(end, unit) for end in (side.low, side.high)))
