# SPDX-License-Identifier: GPL-2.0
"""The table of all published figures that are worse with the series than without it."""

from collections.abc import Iterator, Sequence

from lab.core.units import human
from lab.report.page import change, ran_on
from lab.report.questions import badness
from lab.report.results import Metric, Result
from lab.report.table import Table

LEAST = 3.0  # percent
# Parameters of figures that compare the base kernel with itself under another option.
BASE_TWICE = {("side", "reports"), ("peer", "init_on_alloc"), ("peer", "init_on_free")}
HEADS = ("figure", "without", "with", "change", "accelerator", "run")


def is_loss(metric: Metric) -> bool:
    """Whether ours is worse by LEAST percent, and that is no noise.

    The interval of the change shows that, or the test; counts of instructions have none and need
    none.
    """
    if not metric.better or metric.change_percent is None or badness(metric) < LEAST:
        return False
    if BASE_TWICE.intersection(metric.parameters.items()):
        return False
    if metric.change_interval is None:
        return metric.unit == "instructions"
    low, high = metric.change_interval
    beyond = high < 0 if metric.better == "more" else low > 0
    return beyond or bool(metric.significance and metric.significance.differs)


def found(results: Sequence[Result]) -> Iterator[tuple[Result, Metric]]:
    """Of each run and each kind of figure, the losses, the largest first."""
    for result in results:
        losses = sorted(filter(is_loss, result.metrics), key=badness, reverse=True)
        yield from ((result, metric) for metric in losses)


def table(results: Sequence[Result]) -> str:
    """A row for each loss."""
    rows = []
    for result, metric in found(results):
        words = ", ".join(filter(None, (metric.title, metric.label))) or f"`{metric.name}`"
        sides = (human(side.median, metric.unit) for side in (metric.base, metric.ours))
        run = f"[{result.name}]({result.name}/README.md)"
        rows.append((words, *sides, change(metric), ran_on(result, metric), run))
    return Table(HEADS, rows, right=(1, 2)).markdown()
