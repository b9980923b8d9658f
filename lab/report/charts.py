# SPDX-License-Identifier: GPL-2.0
"""Bar charts as inline SVG. Colours come from the page's CSS, so that light and dark both work."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lab.core.units import human
from lab.report.results import SIDES, Metric
from lab.report.significance import outside

# As wide as a phone, in CSS pixels: there the text is shown at its own size, elsewhere larger.
WIDTH = 340.0
BAR = 16.0
GAP = 4.0
GROUP = 30.0
TITLE = 20.0
# Room kept free at the right of the longest bar for its value: at least this, and what the text takes.
VALUE = 104.0
CHARACTER = 8.3  # the widest of the usual fonts has digits of that width
BESIDE = 15.0  # between the end of a bar and its value, whiskers included
MAX_DOTS = 400
# How far the axis goes to show spread, in multiples of the longest bar; what is beyond gets a mark at the edge.
BEYOND = 2.0


def _x(value: float, top: float, length: float) -> float:
    return max(0.0, value / top * length) if top > 0 else 0.0


def _top(metrics: list[Metric]) -> float:
    """What the right end of the axis stands for."""
    bar = max(max(metric.base.median, metric.ours.median) for metric in metrics)
    spread = max(max(metric.base.high, metric.ours.high) for metric in metrics)
    whole = max([spread, *(value for metric in metrics for side in metric.values.values() for value in side)])
    return min(whole, BEYOND * bar) if bar > 0 else whole


def _length(metrics: list[Metric]) -> float:
    """How long the longest bar may be, so that the values beside them are not cut off."""
    texts = [human(side.median, metric.unit) for metric in metrics for side in (metric.base, metric.ours)]
    return WIDTH - max(VALUE, BESIDE + CHARACTER * max(map(len, texts)))


def _shown(values: Sequence[float]) -> list[tuple[int, float, bool]]:
    """Index, value, and whether it is outside the fences; of very many, all that are and a part of the others."""
    found = [(index, *both) for index, both in enumerate(zip(values, outside(values), strict=True))]
    step = -(-len(found) // MAX_DOTS)
    return [dot for dot in found if dot[2] or dot[0] % step == 0]


def _dots(values: Sequence[float], unit: str, y: float, top: float, length: float) -> tuple[list[str], float]:
    """The single values, and how far to the right they reach."""
    parts, reach = [], 0.0
    beyond = []
    for index, value, out in _shown(values):
        at, height = _x(value, top, length), y + 3.5 + (index * 5) % 10
        if at > length + 0.5:
            beyond.append(value)
            parts.append(
                f'<path class="beyond" d="M{length + 2:.1f} {height - 2.6:.1f}l5 2.6l-5 2.6z">'
                f"<title>beyond the edge: {escape(human(value, unit))}</title></path>"
            )
            continue
        reach = max(reach, at)
        kind, radius = ("dot out", 2.2) if out else ("dot", 1.3)
        title = f"<title>outside the fences: {escape(human(value, unit))}</title></circle>" if out else ""
        circle = f'<circle class="{kind}" cx="{at:.1f}" cy="{height:.1f}" r="{radius}"'
        parts.append(f"{circle}>{title}" if title else f"{circle}/>")
    return parts, length + 7 if beyond else reach


def _bar(metric: Metric, side: str, who: str, y: float, top: float, length: float) -> str:
    sample = metric.base if side == "base" else metric.ours
    end, low, high = (_x(value, top, length) for value in (sample.median, sample.low, sample.high))
    middle = y + BAR / 2
    text = human(sample.median, metric.unit)
    parts = [
        f"<title>{escape(who)}: {escape(text)} (10th to 90th percentile {escape(human(sample.low, metric.unit))} to "
        f"{escape(human(sample.high, metric.unit))}, n={sample.n})</title>",
        f'<rect class="{side}" x="0" y="{y:.1f}" width="{max(end, 1.5):.1f}" height="{BAR:.0f}" rx="2"/>',
    ]
    dots, reach = _dots(metric.values.get(side, []), metric.unit, y, top, length)
    parts += dots
    if high - low > 1:
        # A whisker that goes on beyond the edge has no end there.
        right = min(high, length)
        ends = "".join(f"M{at:.1f} {middle - 4:.1f}v8" for at in (low, high) if at <= length + 0.5)
        parts.append(f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{right:.1f}{ends}"/>')
    label = max(end, min(high, length), reach) + 7
    parts.append(f'<text class="value" x="{label:.1f}" y="{middle + 4.5:.1f}">{escape(text)}</text>')
    return f"<g>{''.join(parts)}</g>"


def bars(metrics: list[Metric], labels: list[str], title: str, sides: Sequence[str] = SIDES) -> str:
    """One chart: for each metric a bar for base and one for ours, on one scale from zero.

    ``sides`` is what both are called.

    The metrics must share a unit; ValueError otherwise. An empty label takes no room.
    """
    if len({metric.unit for metric in metrics}) != 1:
        raise ValueError("metrics of one chart share a unit")
    top = _top(metrics)
    length = _length(metrics)
    above = TITLE if any(labels) else 0.0
    step = above + 2 * BAR + GAP
    height = len(metrics) * step + (len(metrics) - 1) * (GROUP - TITLE) + 2
    parts = []
    y = 0.0
    for metric, label in zip(metrics, labels, strict=True):
        if label:
            parts.append(f'<text class="label" x="0" y="{y + 13:.1f}">{escape(label)}</text>')
        parts.append(_bar(metric, "base", sides[0], y + above, top, length))
        parts.append(_bar(metric, "ours", sides[1], y + above + BAR + GAP, top, length))
        y += step + GROUP - TITLE
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
