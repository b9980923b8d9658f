# SPDX-License-Identifier: GPL-2.0
"""Charts of bars as SVG.

Inline, with colours from the page's CSS, or as a file with its own, for light and dark screens.
"""

import re
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lab.core.units import human
from lab.report.groups import Group
from lab.report.results import SIDES, Metric

WIDTH = 340.0  # CSS pixels, the width of a phone
BAR = 16.0
GAP = 4.0
GROUP = 30.0
TITLE = 20.0
VALUE = 104.0  # the least room for a value at the right of the longest bar
CHARACTER = 8.3  # the width of a digit in the widest usual font
BESIDE = 15.0  # between the end of a bar and its value, whiskers included
MAX_DOTS = 400
# The longest axis, in multiples of the longest bar; values beyond it get a mark at the edge.
BEYOND = 2.0
MARGIN = 12.0
LINE = 16.0  # of wrapped text
# Characters of a line that fit, in the widest usual fonts.
TITLE_FITS, TEXT_FITS = 40, 48
# Longer names of the usual sides, for pictures that stand alone.
ALONE = {"base": "base kernel", "knownzero": "with Knownzero"}
FLOOR = "floor: a kernel that does not zero"
# The colours and the rules of the charts in report.html.
COLOURS, RULES = (
    Path(__file__).parent / "templates" / f"{name}.css.j2" for name in ("colours", "charts")
)
DARK = "@media (prefers-color-scheme: dark)"
CARD = "svg .card { fill: var(--card); }\n"
SIDE_CLASSES = ("base", "ours")


def _x(value: float, top: float, length: float) -> float:
    return max(0.0, value / top * length) if top > 0 else 0.0


def _dots(
    values: Sequence[float], unit: str, y: float, top: float, length: float
) -> tuple[list[str], float]:
    """A dot for each value, or for some of many; and how far they reach."""
    parts, reach = [], 0.0
    every = -(-len(values) // MAX_DOTS)
    for index, value in enumerate(values):
        if index % every:
            continue
        at, height, text = (
            _x(value, top, length),
            y + 3.5 + (index * 5) % 10,
            escape(human(value, unit)),
        )
        if at > length + 0.5:
            reach = max(reach, length + 7)
            mark = f"M{length + 2:.1f} {height - 2.6:.1f}l5 2.6l-5 2.6z"
            parts.append(
                f'<path class="beyond" d="{mark}"><title>beyond the edge: {text}</title></path>'
            )
            continue
        reach = max(reach, at)
        parts.append(f'<circle class="dot" cx="{at:.1f}" cy="{height:.1f}" r="1.3"/>')
    return parts, reach


def _bar(
    metric: Metric, side: str, who: str, y: float, top: float, length: float, colour: str = ""
) -> str:
    sample = metric.base if side == "base" else metric.ours
    end, low, high = (_x(value, top, length) for value in (sample.median, sample.low, sample.high))
    middle = y + BAR / 2
    text = human(sample.median, metric.unit)
    parts = [
        f"<title>{escape(who)}: {escape(text)} (10th to 90th percentile "
        f"{escape(human(sample.low, metric.unit))} to {escape(human(sample.high, metric.unit))}, "
        f"n={sample.n})</title>",
        f'<rect class="{colour or side}" x="0" y="{y:.1f}" width="{max(end, 1.5):.1f}" '
        f'height="{BAR:.0f}" rx="2"/>',
    ]
    dots, reach = _dots(metric.values.get(side, []), metric.unit, y, top, length)
    parts += dots
    if high - low > 1:
        # A whisker beyond the edge has no end mark there.
        right = min(high, length)
        ends = "".join(f"M{at:.1f} {middle - 4:.1f}v8" for at in (low, high) if at <= length + 0.5)
        parts.append(f'<path class="whisker" d="M{low:.1f} {middle:.1f}H{right:.1f}{ends}"/>')
    at_floor = _x(metric.floor, top, length) if metric.floor is not None else 0.0
    label = max(end, min(high, length), reach) + 7
    # The dashed line does not cross the text.
    label = at_floor + 7 if label - 4 < at_floor < label + CHARACTER * len(text) else label
    parts.append(
        f'<text class="value" x="{label:.1f}" y="{middle + 4.5:.1f}">{escape(text)}</text>'
    )
    return f"<g>{''.join(parts)}</g>"


def _axis(metrics: Sequence[Metric]) -> tuple[float, float]:
    """The value at the right end of the axis, and the length of the axis."""
    both = [(metric.unit, side) for metric in metrics for side in (metric.base, metric.ours)]
    bar = max(side.median for _, side in both)
    bar = max(bar, *(metric.floor or 0.0 for metric in metrics))
    single = (value for metric in metrics for values in metric.values.values() for value in values)
    whole = max([side.high for _, side in both] + [*single])
    top = min(whole, BEYOND * bar) if bar > 0 else whole
    widest = max(len(human(side.median, unit)) for unit, side in both)
    return top, WIDTH - max(VALUE, BESIDE + CHARACTER * widest)


def _policies(
    metrics: Sequence[Metric],
    labels: Sequence[str],
    base: str,
    names: Sequence[str],
    *,
    named: bool = False,
) -> tuple[str, float]:
    """A bar in its own colour for each policy, in the order of their names.

    ``base``: the first side's name. ``named``: the name is above each bar, for pages without a
    legend of the policies.
    """
    top, length = _axis(metrics)
    of = dict(zip(labels, metrics, strict=True))
    parts, y = [], 0.0
    for number, name in enumerate(names):
        if name == base or name in of:
            metric, side = (metrics[0], "base") if name == base else (of[name], "ours")
            if named:
                parts.append(f'<text class="label" x="0" y="{y + 13:.1f}">{escape(name)}</text>')
                y += TITLE
            parts.append(_bar(metric, side, name, y, top, length, f"policy{number}"))
            y += BAR + GAP
    return "".join(parts), y


def _rows(
    metrics: Sequence[Metric], labels: Sequence[str], sides: Sequence[str]
) -> tuple[str, float]:
    if len({metric.unit for metric in metrics}) != 1:
        raise ValueError("metrics of one chart share a unit")
    top, length = _axis(metrics)
    above = TITLE if any(labels) else 0.0
    step = above + 2 * BAR + GAP
    parts, y = [], 0.0
    for metric, label in zip(metrics, labels, strict=True):
        if label:
            parts.append(f'<text class="label" x="0" y="{y + 13:.1f}">{escape(label)}</text>')
        parts.append(_bar(metric, "base", sides[0], y + above, top, length))
        parts.append(_bar(metric, "ours", sides[1], y + above + BAR + GAP, top, length))
        if metric.floor is not None:
            line = (
                f"M{_x(metric.floor, top, length):.1f} {y + above - 3:.1f}v{2 * BAR + GAP + 6:.0f}"
            )
            about = escape(f"floor: {human(metric.floor, metric.unit)}")
            parts.append(f'<path class="floor" d="{line}"><title>{about}</title></path>')
        y += step + GROUP - TITLE
    return "".join(parts), y - (GROUP - TITLE) + 2


def svg(width: float, height: float, title: str, body: str) -> str:
    about = (
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title, quote=True)}"'
    )
    return f'<svg {about} xmlns="http://www.w3.org/2000/svg">{body}</svg>'


def bars(
    metrics: list[Metric],
    labels: list[str],
    title: str,
    sides: Sequence[str] = SIDES,
    policies: Sequence[str] = (),
) -> str:
    """One chart: for each metric a bar of both sides, on one scale from zero.

    ``policies`` as in ``picture``.
    """
    if policies:
        body, height = _policies(metrics, labels, sides[0], policies, named=True)
    else:
        body, height = _rows(metrics, labels, sides)
    return svg(WIDTH, height, title, body)


def _wrapped(text: str, kind: str, fits: int, y: float) -> tuple[str, float]:
    """Text in lines that fit, and the height of all."""
    lines = textwrap.wrap(text, fits)
    parts = [
        f'<text class="{kind}" x="0" y="{y + number * LINE:.0f}">{escape(line)}</text>'
        for number, line in enumerate(lines)
    ]
    return "".join(parts), len(lines) * LINE


def legend(
    y: float, names: Sequence[str], classes: Sequence[str], floor: bool = False
) -> tuple[str, float]:
    """A line for each name, and for the floor; and where the next thing begins."""
    parts = []
    for name, kind in zip(names, classes, strict=True):
        parts.append(f'<rect class="{kind}" x="0" y="{y}" width="12" height="12" rx="2"/>')
        parts.append(f'<text x="18" y="{y + 11}">{escape(ALONE.get(name, name))}</text>')
        y += LINE + 2
    if floor:
        parts.append(
            f'<path class="floor" d="M6 {y - 1}v15"/><text x="18" y="{y + 11}">{FLOOR}</text>'
        )
        y += LINE + 2
    return "".join(parts), y


def picture(
    charts: Sequence[Group],
    sides: Sequence[str],
    about: str = "",
    policies: Sequence[str] = (),
) -> str:
    """An SVG file with charts under each other, and a caption.

    ``policies``: the names of more than two sides, of which the first of ``sides`` is one; each has
    its own colour.
    """
    names, classes = (
        (policies, [f"policy{n}" for n in range(len(policies))])
        if policies
        else (sides, SIDE_CLASSES)
    )
    key, y = legend(
        MARGIN, names, classes, any(m.floor is not None for chart in charts for m in chart.metrics)
    )
    parts = [key]
    for chart in charts:
        if policies:
            body, height = _policies(chart.metrics, chart.labels, sides[0], policies)
        else:
            body, height = _rows(chart.metrics, chart.labels, sides)
        y += 1.5 * MARGIN
        title, lines_high = _wrapped(chart.title, "title", TITLE_FITS, y + LINE / 2)
        y += lines_high
        parts.append(f'{title}<g transform="translate(0 {y + MARGIN / 2:.0f})">{body}</g>')
        y += MARGIN / 2 + height
    return alone("".join(parts), y, "; ".join(chart.title for chart in charts), about)


def _style() -> str:
    """The rules for light screens, and those for dark ones; not every viewer knows var()."""
    rules = RULES.read_text(encoding="utf-8").partition("\n")[2] + CARD

    def coloured(colours: str) -> str:
        of = dict(re.findall(r"(--\w+): (#\w+)", colours))
        return re.sub(r"var\((--\w+)\)", lambda name: of[name[1]], rules)

    light, dark = COLOURS.read_text(encoding="utf-8").split(DARK)
    return f"{coloured(light)}{DARK} {{\n{coloured(dark)}}}\n"


def alone(body: str, y: float, title: str, about: str) -> str:
    """A file with a chart of the height ``y``, and a caption."""
    y += 1.5 * MARGIN
    text, lines_high = _wrapped(about, "label", TEXT_FITS, y)
    height = y + lines_high
    page = '<rect class="card" width="100%" height="100%" rx="6"/>'
    body = f'<style>{_style()}</style>{page}<g transform="translate({MARGIN})">{body}{text}</g>'
    width, whole = WIDTH + 2 * MARGIN, height + MARGIN / 2
    drawn = svg(width, whole, title, body)
    # Pages show a picture without a size as wide as they are.
    drawn = drawn.replace("<svg ", f'<svg width="{width:.0f}" height="{whole:.0f}" ', 1)
    return f"<!-- SPDX-License-Identifier: GPL-2.0 -->\n{drawn}\n"
