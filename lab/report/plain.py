# SPDX-License-Identifier: GPL-2.0
"""A result as plain lines for a terminal of 80 columns."""

import re
import textwrap
from collections.abc import Iterator

from lab.core.units import human
from lab.report.page import change, verdict
from lab.report.results import Metric, Result, Sample
from lab.report.table import TOGETHER

WIDTH = 80
CONTINUED = " \\"  # a shell goes on with the next line
INDENT = "    "
LEGEND = (
    "Medians, with the 10th to 90th percentile where it differs, and the change with its 95 % "
    "interval. A target or floor that noise hides is not decided."
)


def text(result: Result) -> str:
    """The verdict, then every figure.

    A figure has its whole name on a line; below it its verdicts, both sides and the change.
    """
    reason = result.host.get("accelerator", "")
    ran_on = f"{result.ran_on} ({reason})" if reason else result.ran_on
    lines = _wrapped(f"Targets met: {verdict(result)}.", "")
    for metric in result.metrics:
        if metric.target and not metric.target.met:
            lines.append(f"{INDENT}{metric.target.verdict}: {metric.name}")
    head = f"{result.name} on {ran_on}: {' → '.join(result.sides)}. {LEGEND}"
    lines += ["", *_wrapped(head, ""), ""]
    for metric in result.metrics:
        lines.append(metric.name)
        for part in (*_verdicts(metric), _values(metric)):
            lines += _wrapped(part, INDENT)
    for note in result.notes:
        lines += ["", *_wrapped(note, "")]
    return "\n".join([*lines, "", *_command(f"Again: {result.reproduce}")])


def _command(line: str) -> list[str]:
    """A command on lines that fit, to be pasted into a shell."""
    *first, last = textwrap.wrap(
        line, WIDTH - len(CONTINUED), subsequent_indent=INDENT, break_on_hyphens=False
    )
    return [*(one + CONTINUED for one in first), last]


def _wrapped(words: str, indent: str) -> list[str]:
    """Lines that fit, without a break between a number and its unit."""
    kept = re.sub(r"(?<=\d) (?=[%A-Za-zµ])", TOGETHER, words)
    lines = textwrap.wrap(kept, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return [line.replace(TOGETHER, " ") for line in lines]


def _values(metric: Metric) -> str:
    significance = f", {metric.significance.text()}" if metric.significance else ""
    sides = f"{_side(metric.base, metric.unit)} → {_side(metric.ours, metric.unit)}"
    return f"{sides}: {change(metric)}{significance}"


def _side(sample: Sample, unit: str) -> str:
    middle, low, high = (human(value, unit) for value in (sample.median, sample.low, sample.high))
    return middle if low == middle == high else f"{middle} ({low} … {high})"


def _verdicts(metric: Metric) -> Iterator[str]:
    if metric.target:
        yield f"target {metric.target.verdict}: {metric.target.text}"
    if metric.near_floor and metric.floor is not None:
        about = f"floor {human(metric.floor, metric.unit)} {metric.near_floor.distance}"
        yield f"{about}: {metric.near_floor.text}"
