# SPDX-License-Identifier: GPL-2.0
"""The chart of a guest's life: phases from left to right, base beside kzeropaged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from lab.core.units import human
from lab.report import charts
from lab.report.results import Metric, Result, Sample

TITLE = "The life of a guest, from left to right"
BASE = "base"
# Short names, for the axis. A phase without one is not in the chart.
NAMES = {
    "boot": "boot",
    "first": "run",
    "again": "again",
    "later": "+2 s",
    "idle": "idle",
    "park": "park",
    "save": "save",
    "restore": "restore",
    "restored": "run",
    "burst": "burst",
}
HIGH, BELOW, ABOVE = 64.0, 22.0, 40.0  # of a panel, its axis, and its title
BARS, STEP = 24.0, charts.WIDTH / len(NAMES)  # all bars of a phase, and its room


@dataclass(frozen=True)
class Panel:
    """A row of bars. ``kind``: the last name of its metrics."""

    title: str
    kind: str
    relative: bool = False  # to base's, phase by phase


PANELS = (
    Panel("Bytes that the guest zeroes", "zeroed"),
    Panel("Time, against base", "time", relative=True),
)
SHOWN = "kzeropaged"  # the kind of guest that is compared with base
SIDES = {BASE: BASE, SHOWN: f"Knownzero, {SHOWN} on"}  # with their words
Samples = dict[tuple[str, str], tuple[Sample, str]]  # by phase and side: the sample, its unit


def shown(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics of the guest that the chart shows."""
    return [one for one in metrics if one.parameters.get("side") == SHOWN]


def _samples(metrics: Sequence[Metric], panel: Panel, init: str) -> Samples:
    found: Samples = {}
    for one in metrics:
        about = one.parameters
        phase = about["phase"]
        if one.kind.endswith(f".{panel.kind}") and about["init"] == init and phase in NAMES:
            found[phase, BASE] = one.base, one.unit
            found[phase, about["side"]] = one.ours, one.unit
    return found


def _bar(x: float, y: float, width: float, share: float, colour: str, about: str) -> str:
    high = max(1.0, min(share, 1.0) * HIGH)
    mark = ""
    if share > 1.0:
        mark = f'<path class="beyond" d="M{x:.1f} {y - 2:.1f}l{width / 2} -5l{width / 2} 5z"/>'
    return (
        f'<g><title>{escape(about)}</title><rect class="{colour}" x="{x:.1f}" '
        f'y="{y + HIGH - high:.1f}" width="{width}" height="{high:.1f}"/>{mark}</g>'
    )


def _panel(panel: Panel, found: Samples, y: float) -> str:
    """A panel whose title begins at ``y``."""
    unit, width = next(unit for _, unit in found.values()), BARS / len(SIDES)
    top = max(sample.median for sample, _ in found.values())
    scale = f"up to {charts.BEYOND:g} times base" if panel.relative else f"up to {human(top, unit)}"
    parts = [
        f'<text x="0" y="{y + 14:.0f}">{escape(panel.title)}</text>',
        f'<text class="label" x="{charts.WIDTH}" y="{y + 30:.0f}" text-anchor="end">{scale}</text>',
        f'<path class="axis" d="M0 {y + ABOVE + HIGH:.0f}H{charts.WIDTH}"/>',
    ]
    for number, (phase, name) in enumerate(NAMES.items()):
        middle = (number + 0.5) * STEP
        at = f'x="{middle:.1f}" y="{y + ABOVE + HIGH + 14:.0f}"'
        parts.append(f'<text class="label" {at} text-anchor="middle" font-size="11">{name}</text>')
        for place, (side, words) in enumerate(SIDES.items()):
            if (phase, side) not in found:
                continue
            sample, _ = found[phase, side]
            full = found[phase, BASE][0].median * charts.BEYOND if panel.relative else top
            share = sample.median / full if full else 0.0
            x = middle + (place - len(SIDES) / 2) * width
            about = f"{words}, {name}: {human(sample.median, unit)}"
            parts.append(_bar(x, y + ABOVE, width, share, charts.SIDE_CLASSES[place], about))
    return "".join(parts)


def is_whole(metrics: Sequence[Metric]) -> bool:
    """Whether these are of a life with every phase of the chart."""
    return {one.parameters["phase"] for one in shown(metrics)} >= {*NAMES}


def _worse(metrics: Sequence[Metric], panel: Panel) -> str:
    """The init_on_alloc with which ours has more of base's sum over all phases."""

    def share(init: str) -> float:
        found = _samples(metrics, panel, init)
        base, ours = (
            sum(sample.median for (_, of), (sample, _) in found.items() if of == side)
            for side in SIDES
        )
        return ours / base

    return max(dict.fromkeys(one.parameters["init"] for one in metrics), key=share)


def _caption(result: Result, init: str) -> str:
    """What the guest does in its phases, and what kzeropaged does while it is idle."""
    program, park, burst = (
        human(result.job[name] << 20, "bytes") for name in ("program_mb", "park_mb", "burst_mb")
    )
    idle = result.metric(f"life.init{init}.{SHOWN}.whole.prezeroed")
    zeroes = f"{SHOWN} zeroes {human(idle.ours.median, idle.unit)} in idle time. " if idle else ""
    return (
        f"run: a program writes {program}, again at once, and 2 s later; park: {park} to the host; "
        f"burst: {burst}. {zeroes}Measured on {result.ran_on}. Less is better."
    )


def drawn(result: Result) -> tuple[str, float]:
    """The legend and all panels, each with the worse init_on_alloc, and their height."""
    metrics = shown(result.metrics)
    key, y = charts.legend(charts.MARGIN, [*SIDES.values()], charts.SIDE_CLASSES)
    parts = [key]
    for panel in PANELS:
        init = _worse(metrics, panel)
        named = replace(panel, title=f"{panel.title}, init_on_alloc={init}")
        parts.append(_panel(named, _samples(metrics, panel, init), y))
        y += ABOVE + HIGH + BELOW
    return "".join(parts), y


def chart(result: Result) -> str:
    """The chart for a page."""
    body, height = drawn(result)
    return charts.svg(charts.WIDTH, height, TITLE, body)


def picture(result: Result) -> str:
    """The chart as a file, with a caption."""
    body, height = drawn(result)
    init = _worse(shown(result.metrics), PANELS[0])
    return charts.alone(body, height, TITLE, _caption(result, init))
