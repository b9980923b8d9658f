# SPDX-License-Identifier: GPL-2.0
"""What a bench observes in its guests, and the metrics made from that."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lab.report import goals, registry
from lab.report.registry import Definition
from lab.report.results import Metric

BASE, OURS, FLOOR = "base", "ours", "floor"


@dataclass(frozen=True)
class Observation:
    """The values of a metric on one side: base, ours or floor.

    ``metric`` is a name in metrics.toml.
    """

    metric: str
    side: str
    parameters: tuple[tuple[str, str], ...]
    accelerator: str
    values: tuple[float, ...]


def observe(
    metric: str,
    sides: Mapping[str, Sequence[float]],
    accelerator: str,
    parameters: Mapping[str, object],
) -> list[Observation]:
    """The observations of a metric, one for each side that has values."""
    fixed = tuple((name, str(value)) for name, value in parameters.items())
    return [
        Observation(metric, side, fixed, accelerator, tuple(map(float, values)))
        for side, values in sides.items()
        if values
    ]


def metrics(observations: Iterable[Observation]) -> list[Metric]:
    """The metrics, in the order of their first observations."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, Observation]] = {}
    for one in observations:
        found.setdefault((one.metric, one.parameters), {})[one.side] = one
    return [_metric(registry.definitions()[name], sides) for (name, _), sides in found.items()]


def _metric(about: Definition, sides: Mapping[str, Observation]) -> Metric:
    parameters = dict(sides[BASE].parameters)
    floor = sides[FLOOR].values if FLOOR in sides else ()
    made = Metric.of(
        about.name.format_map(parameters),
        about.unit,
        sides[BASE].values,
        sides[OURS].values,
        floor=floor,
    )
    made = replace(
        made,
        **about.described(parameters),
        kind=about.name,
        parameters=parameters,
        accelerator=sides[OURS].accelerator,
    )
    if rule := registry.first(about.targets, parameters):
        arguments = {key: value for key, value in rule.more.items() if key != "kind"}
        made = replace(made, target=goals.judge(rule.more["kind"], arguments, made))
    if floor and about.floor is not None:
        made = replace(made, near_floor=goals.near_floor(made, floor, about.floor))
    return made
