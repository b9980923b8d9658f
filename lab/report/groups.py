# SPDX-License-Identifier: GPL-2.0
"""The charts of a result: which figures share one, its title, and the labels in it."""

from dataclasses import dataclass

from lab.report.results import Metric, Result

LONG = 52  # characters that fit beside each other


@dataclass(frozen=True)
class Group:
    """The metrics of one chart and their labels."""

    title: str
    caption: str
    metrics: list[Metric]
    labels: list[str]


def words(metric: Metric) -> tuple[str, str]:
    """The title of a metric's chart, and its label there.

    A sentence "TITLE: LABEL; MORE." has both. Without a colon, they are the bench with the last
    name, and the rest.
    """
    bench, *middle, last = metric.name.split(".")
    title, colon, rest = metric.sentence.rstrip(".").partition(": ")
    if not colon:
        title, rest = f"{bench}: {last}".replace("_", " "), " ".join(middle)
    label = rest.partition(";")[0]
    return title, label if len(label) <= LONG else " ".join(middle)


def groups(result: Result) -> list[Group]:
    """The charts of a result, in the order of their first metrics.

    One for each bench, title and unit.
    """
    found: dict[tuple[str, str, str], list[Metric]] = {}
    for metric in result.metrics:
        found.setdefault((metric.name.partition(".")[0], words(metric)[0], metric.unit), []).append(
            metric
        )
    return [
        Group(title, "", metrics, [words(metric)[1] for metric in metrics])
        if len(metrics) > 1 or ": " in metrics[0].sentence
        else Group(metrics[0].name, metrics[0].sentence, metrics, [""])
        for (_, title, _), metrics in found.items()
    ]
