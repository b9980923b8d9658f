# SPDX-License-Identifier: GPL-2.0
"""A part's cover letter.

Its text is <project>/parts/NAME/cover-letter, its figures come from docs/results.
"""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from lab.bench.table import BENCHES
from lab.core import paths
from lab.core.errors import LabError
from lab.core.units import percent, scale
from lab.machine import fetch
from lab.patches.parts import Part
from lab.report.results import SIDES, Metric, Result, Sample, results_of

WIDTH = 75
INDENT = "  "
WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
# Label, two sides, change: as wide as a line may be.
COLUMNS = (26, 19, 19, 9)
HEADS = ("base", "patched")
Row = tuple[str, str, tuple[Result, Metric] | None]


@dataclass(frozen=True)
class Letter:
    """A rendered letter.

    ``gaps``: metrics that no published run has. ``wide``: lines over 75 columns.
    """

    subject: str
    text: str
    gaps: list[str]
    wide: list[int]


def bench_of(metric: str) -> str:
    """The bench that measures a metric, by the first word of its name."""
    name = metric.partition(".")[0].replace("_", "-")
    return name if name in BENCHES else "thp"


def published() -> list[Result]:
    """The published results, the newest first; none when nothing is published."""
    root = paths.REPO / "docs" / "results"
    found = [
        result for file in root.glob("*/result.json") for result in results_of(file.parent).values()
    ]
    return sorted(found, key=lambda one: one.when, reverse=True)


class Figures:
    """The functions that a letter's text calls; it collects the gaps."""

    def __init__(self, results: Sequence[Result], part: str = "", key: str = "") -> None:
        """``part``: as PROJECT/PART; results that did not measure it at this key are left out."""
        self.results = [one for one in results if not part or one.parts.get(part) == key]
        self.gaps: list[str] = []
        self.used: list[Result] = []

    def find(self, name: str, native: bool = False) -> tuple[Result, Metric] | None:
        """The newest published figure, of the metric's own bench if possible.

        ``native``: not an emulator's.
        """
        own = bench_of(name)
        suffix = "-native" if native else ""
        for result in sorted(self.results, key=lambda one: one.name != f"{own}{suffix}"):
            metric = result.metric(name)
            if metric and native == (result.accelerator != "tcg"):
                return result, metric
        return None

    def rows(self, rows: Sequence[tuple[str, str]]) -> list[Row]:
        """Label, metric, figure: native ones if every row has one."""
        native = [(label, name, self.find(name, native=True)) for label, name in rows]
        if all(one for _, _, one in native):
            return native
        return [(label, name, self.find(name)) for label, name in rows]

    def table(
        self, heading: str, *rows: tuple[str, str], sides: tuple[str, str] | None = None
    ) -> str:
        """A table with a row for each (label, metric).

        Medians with the 10th to 90th percentile, and the change.

        ``sides``: the headings of the columns, by default those of the result. Native figures come
        first. LabError: the rows have several units, accelerators or sides.
        """
        found = self.rows(rows)
        have = [one for _, _, one in found if one]
        self.gaps += [name for _, name, one in found if not one and name not in self.gaps]
        if not have:
            return f"{INDENT}{heading}: [no figures]"
        for what, values in (
            ("unit", {metric.unit for _, metric in have}),
            ("accelerator", {result.accelerator for result, _ in have}),
            ("pair of sides", {tuple(result.sides) for result, _ in have}),
        ):
            if len(values) > 1:
                why = f"its rows have more than one {what}: " + ", ".join(sorted(map(str, values)))
                fix = "split the table, or publish runs of one machine"
                raise LabError(f"table {heading!r} of the cover letter mixes figures", why, fix)
        unit = have[0][1].unit
        divisor, word = scale(unit, max(max(m.base.median, m.ours.median) for _, m in have))
        word = word.replace("µ", "u")
        own = tuple(have[0][0].sides)
        heads = sides or (HEADS if own == SIDES else own)
        lines = [
            _row(
                heading if word in ("", heading) else f"{heading} ({word})", heads[0], heads[1], ""
            )
        ]
        for label, _, one in found:
            if not one:
                lines.append(f"{INDENT}{label:{COLUMNS[0]}}{'[no figures]':>{sum(COLUMNS[1:])}}")
                continue
            result, metric = one
            self.used += [result] if result not in self.used else []
            change = percent(metric.change_percent).replace("–", "-")
            if (
                metric.change_interval
                and metric.change_interval[0] <= 0 <= metric.change_interval[1]
            ):
                change = f"~{change}"
            lines.append(
                _row(label, _cell(metric.base, divisor), _cell(metric.ours, divisor), change)
            )
        for result in {id(result): result for result, _ in have}.values():
            counts = ", ".join(
                map(str, sorted({metric.ours.n for one, metric in have if one is result}))
            )
            source = (
                f"[{result.ran_on.upper()}, n = {counts}: {result.reproduce.removeprefix('./')}]"
            )
            indents: Any = {"initial_indent": INDENT, "subsequent_indent": INDENT + " "}
            lines += textwrap.wrap(source, WIDTH, **WHOLE, **indents)
        return "\n".join(lines)

    def provenance(self) -> str:
        """The versions and machines of the figures; call it after the tables."""
        if not self.used:
            return ""
        words = ["Medians, with the 10th and 90th percentile in brackets where they differ;"]
        words.append("~ where the 95 % interval of the change includes 0.")
        for one in self.used:
            words.append(
                f"Series {one.versions.get('knownzero', '?')}, {one.versions.get('qemu', '?')}, "
                f"on {one.host.get('cpu', '?')} ({one.host.get('cpus', '?')} CPUs, Linux "
                f"{one.host.get('kernel', '?')})."
            )
        if any(one.accelerator == "tcg" for one in self.used):
            words.append("TCG is QEMU's emulator: counters and instructions are exact;")
            words.append("times only compare base with patched.")
        if any(one.accelerator == "pvm" for one in self.used):
            words.append("PVM runs guests natively, in ring 3: traps cost more than on hardware.")
        return textwrap.fill(" ".join(dict.fromkeys(words)), 72)


def _cell(sample: Sample, divisor: float) -> str:
    return sample.text(divisor).replace(",", "").replace("…", "..")


def _row(label: str, one: str, two: str, change: str) -> str:
    first, second, third, fourth = COLUMNS
    return f"{INDENT}{label:{first}}{one:>{second}}{two:>{third}}{change:>{fourth}}".rstrip()


def base_paragraph(name: str, source: fetch.Source) -> str:
    wanted = fetch.base(name)
    text = f"The patches are for {'Linux' if name == 'linux' else 'QEMU'} {source.version}"
    if source.from_debian and source.version == wanted.version:
        text += f", as in Debian's {wanted.package} {wanted.debian_version}"
    return textwrap.fill(f"{text}.", 72, **WHOLE)


def write(name: str, part: Part, source: fetch.Source) -> Letter:
    """Render a part's cover letter. LabError: there is none, or a placeholder is wrong."""
    file = part.root / "cover-letter"
    if not file.is_file():
        why, fix = f"{file} does not exist", "write it: subject, blank line, text"
        raise LabError(f"part {part.name} has no cover letter", why, fix)
    figures = Figures(published(), f"{name}/{part.name}", part.key())
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True
    )
    try:
        text = environment.from_string(file.read_text(encoding="utf-8"))
        base = base_paragraph(name, source)
        rendered = text.render(table=figures.table, provenance=figures.provenance, base=base)
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        why, fix = f"{f'line {line}: ' if line else ''}{error}", "correct the placeholder"
        raise LabError(f"cannot render {file}", why, fix) from None
    subject, _, body = rendered.partition("\n")
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    wide = [number for number, line in enumerate(body.splitlines(), 1) if len(line) > WIDTH]
    return Letter(subject.strip(), body, figures.gaps, wide)
