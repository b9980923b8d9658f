# SPDX-License-Identifier: GPL-2.0
"""Charts of a guest's life: phases from left to right, a bar for each kind of guest."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from lab.core.units import human
from lab.report import charts, registry
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
    """A row of bars. ``kinds``: the last names of its metrics; of a phase, the last that it has."""

    title: str
    kinds: tuple[str, ...]
    relative: bool = False  # to base's, phase by phase


PANELS = (
    Panel("Bytes that the guest zeroes", ("zeroed",)),
    Panel("Time, against base", ("time",), relative=True),
    Panel("Host memory at the end; save: the file", ("host", "file")),
)
# The kind of guest that the short chart compares with base, and its panels.
SHOWN, SHORT = "kzeropaged", PANELS[:2]
Samples = dict[tuple[str, str], tuple[Sample, str]]  # by phase and side: the sample, its unit


def of_phases(metrics: Sequence[Metric]) -> list[Metric]:
    """The metrics that belong to a phase of a life."""
    return [one for one in metrics if "phase" in one.parameters]


def sides(metrics: Sequence[Metric]) -> dict[str, str]:
    """The kinds of guests and their words, base first."""
    words = registry.definitions()[metrics[0].kind].words["side"]
    return {BASE: BASE} | {one.parameters["side"]: words[one.parameters["side"]] for one in metrics}


def _samples(metrics: Sequence[Metric], panel: Panel, init: str) -> Samples:
    found: Samples = {}
    for kind in panel.kinds:
        for one in metrics:
            about = one.parameters
            phase = about["phase"]
            if one.kind.endswith(f".{kind}") and about["init"] == init and phase in NAMES:
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


def _panel(
    panel: Panel, found: Samples, of: dict[str, str], y: float, colours: Sequence[str]
) -> str:
    """A panel whose title begins at ``y``; ``colours``: the classes of the sides."""
    unit, width = next(unit for _, unit in found.values()), BARS / len(of)
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
        for place, (side, words) in enumerate(of.items()):
            if (phase, side) not in found:
                continue
            sample, _ = found[phase, side]
            full = found[phase, BASE][0].median * charts.BEYOND if panel.relative else top
            share = sample.median / full if full else 0.0
            x = middle + (place - len(of) / 2) * width
            about = f"{words}, {name}: {human(sample.median, unit)}"
            parts.append(_bar(x, y + ABOVE, width, share, colours[place], about))
    return "".join(parts)


def drawn(result: Result) -> tuple[str, float]:
    """The legend and all panels, for each init_on_alloc, and their height."""
    metrics = of_phases(result.metrics)
    of = sides(metrics)
    classes = [f"policy{number}" for number in range(len(of))]
    key, y = charts.legend(charts.MARGIN, [*of.values()], classes)
    parts = [key]
    for init in dict.fromkeys(one.parameters["init"] for one in metrics):
        y += charts.MARGIN
        parts.append(f'<text class="title" x="0" y="{y + 12:.0f}">init_on_alloc={init}</text>')
        y += charts.TITLE
        for panel in PANELS:
            if found := _samples(metrics, panel, init):
                parts.append(_panel(panel, found, of, y, classes))
                y += ABOVE + HIGH + BELOW
    return "".join(parts), y


def chart(result: Result) -> str:
    """The chart for a page."""
    body, height = drawn(result)
    return charts.svg(charts.WIDTH, height, TITLE, body)


def picture(result: Result, about: str) -> str:
    """The chart as a file, with a caption."""
    body, height = drawn(result)
    return charts.alone(body, height, TITLE, about)


def is_whole(metrics: Sequence[Metric]) -> bool:
    """Whether these are of a life with every phase, and of the guest that the short chart shows."""
    of = {one.parameters["phase"] for one in metrics if one.parameters["side"] == SHOWN}
    return of >= {*NAMES}


def _worse(metrics: Sequence[Metric], panel: Panel) -> str:
    """The init_on_alloc with which ours has more of base's sum over all phases."""

    def share(init: str) -> float:
        found = _samples(metrics, panel, init)
        base, ours = (
            sum(sample.median for (_, of), (sample, _) in found.items() if of == side)
            for side in (BASE, SHOWN)
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


def short(result: Result) -> str:
    """A file with base and SHOWN only, each panel with the worse init_on_alloc."""
    metrics = [one for one in of_phases(result.metrics) if one.parameters["side"] == SHOWN]
    of = {BASE: BASE, SHOWN: f"Knownzero, {SHOWN} on"}
    key, y = charts.legend(charts.MARGIN, [*of.values()], charts.SIDE_CLASSES)
    parts = [key]
    for panel in SHORT:
        init = _worse(metrics, panel)
        named = replace(panel, title=f"{panel.title}, init_on_alloc={init}")
        found = _samples(metrics, panel, init)
        parts.append(_panel(named, found, of, y, charts.SIDE_CLASSES))
        y += ABOVE + HIGH + BELOW
    return charts.alone("".join(parts), y, TITLE, _caption(result, _worse(metrics, SHORT[0])))
