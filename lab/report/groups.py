# SPDX-License-Identifier: GPL-2.0
"""The charts of a result: the figures that share one."""

from dataclasses import dataclass

from lab.report.results import Metric, Result


@dataclass(frozen=True)
class Group:
    """The metrics of one chart and their labels."""

    title: str
    metrics: list[Metric]
    labels: list[str]


def groups(result: Result) -> list[Group]:
    """The charts of a result, in the order of their first metrics.

    One for each bench, title and unit. A metric without words has its own.
    """
    found: dict[tuple[str, str, str], list[Metric]] = {}
    for metric in result.metrics:
        bench = metric.name.partition(".")[0]
        key = bench, metric.title or metric.name, metric.unit
        found.setdefault(key, []).append(metric)
    return [
        Group(title, metrics, [metric.label for metric in metrics])
        for (_, title, _), metrics in found.items()
    ]
