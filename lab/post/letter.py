# SPDX-License-Identifier: GPL-2.0
"""The cover letter: the text in <name>/cover-letter.txt, its figures from runs and from nowhere else."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from lab.bench import BENCHES
from lab.core import paths
from lab.core.errors import LabError
from lab.core.units import digits, percent
from lab.machine import fetch
from lab.report.results import SIDES, Metric, Result, Sample, results_of
from lab.series import against, series

WIDTH = 75
INDENT = "  "
# Label, two sides, change: as wide as a line may be.
COLUMNS = (26, 19, 19, 9)
HEADS = ("base", "patched")
# From which median on the figures of a table are divided by what, and the unit's name then.
SCALES = {
    "bytes": (
        (1 << 30, 1 << 30, "GiB"),
        (1 << 20, 1 << 20, "MiB"),
        (1 << 10, 1 << 10, "KiB"),
        (0, 1, "bytes"),
    ),
    # Exact, and never that long.
    "instructions": ((0, 1, "instructions"),),
    "": ((1e6, 1e6, "M "), (1e5, 1e3, "1000 "), (0, 1, "")),
}


@dataclass(frozen=True)
class Letter:
    """A rendered letter. ``gaps``: figures that no run has; ``long_lines``: numbers of lines over 75 columns."""

    subject: str
    text: str
    runs: list[Path]
    gaps: list[str]
    stale: list[str]
    long_lines: list[int]


def same_series(result: Result) -> bool:
    """Whether a result is of the series as it is now: its commit has the same files under linux and qemu."""
    described = result.versions.get("knownzero", "")
    match = re.fullmatch(r"(?:.+-\d+-g)?([0-9a-f]{7,40})|([\w.-]+)", described)
    if not match or described.endswith("-dirty"):
        return False
    kept = [f"{name}/{part}" for name in fetch.NAMES for part in ("new", "patches", "configs", "base.toml")]
    done = subprocess.run(
        ["git", "diff", "--quiet", match[1] or match[2], "--", *kept],
        cwd=paths.REPO,
        env=series.git_environment(paths.REPO.parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    return done.returncode == 0


def newest_run() -> Path | None:
    """The newest run of this very series under out/: of ``kz bench all``, or else of ``kz demo``."""
    for kind in ("all", "demo"):
        folder = paths.REPO / "out" / kind
        for run in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else []:
            try:
                found = results_of(run)
            except LabError:
                continue
            if all(same_series(result) for result in found.values()):
                return run
    return None


def bench_of(metric: str) -> str:
    """The bench that measures a metric, by the name's first word."""
    name = metric.partition(".")[0].replace("_", "-")
    return name if name in BENCHES else "all"


def gap(what: str) -> str:
    """What stands where there is no figure."""
    return f"[no figures: run kz bench {what}]"


class Figures:
    """What a letter's text can ask for; it remembers what was missing."""

    def __init__(self, results: Sequence[Result], stale: Sequence[str] = ()) -> None:
        self.results = list(results)
        self.stale = list(stale)
        self.gaps: list[str] = []
        self.used: list[Result] = []

    def find(self, name: str) -> tuple[Result, Metric] | None:
        """The metric of that name; that of its own bench rather than of one that measures it besides."""
        latest = sorted(self.results, key=lambda one: one.when, reverse=True)
        own = [one for one in latest if one.name == bench_of(name)]
        for result in own + [one for one in latest if one not in own]:
            if metric := result.metric(name):
                return result, metric
        return None

    def table(self, heading: str, *rows: tuple[str, str], sides: tuple[str, str] | None = None) -> str:
        """An aligned table: a row for each (label, metric), medians with the 10th to 90th percentile.

        ``sides``: what the columns are called, by default as in the result. Figures in one table share a unit and
        an accelerator; LabError otherwise. What no run has is a marked gap.
        """
        found = {name: self.find(name) for _, name in rows}
        have = [one for one in found.values() if one]
        missing = [name for _, name in rows if not found[name]]
        self.gaps += [name for name in missing if name not in self.gaps]
        if not have:
            benches = {bench_of(name) for _, name in rows}
            return f"{INDENT}{heading}: {gap(benches.pop() if len(benches) == 1 else 'all')}"
        for what, values in (
            ("unit", {metric.unit for _, metric in have}),
            ("accelerator", {result.accelerator for result, _ in have}),
            ("names for its sides", {tuple(result.sides) for result, _ in have}),
        ):
            if len(values) > 1:
                raise LabError(
                    f"The table {heading!r} of the cover letter would mix figures",
                    f"its rows have more than one {what}: " + ", ".join(sorted(map(str, values))),
                    "name runs of one machine with --figures, or put the rows into tables of their own",
                )
        unit = have[0][1].unit
        divisor, word = _scale(unit, max(max(m.base.median, m.ours.median) for _, m in have))
        own = tuple(have[0][0].sides)
        heads = sides or (HEADS if own == SIDES else own)
        lines = [_row(heading if word in ("", heading) else f"{heading} ({word})", heads[0], heads[1], "")]
        for label, name in rows:
            one = found[name]
            if one is None:
                lines.append(f"{INDENT}{label:{COLUMNS[0]}}{gap(bench_of(name)):>{sum(COLUMNS[1:])}}")
                continue
            result, metric = one
            if result not in self.used:
                self.used.append(result)
            change = percent(metric.change_percent).replace("–", "-")
            if metric.change_interval and metric.change_interval[0] <= 0 <= metric.change_interval[1]:
                change = f"~{change}"
            lines.append(_row(label, _cell(metric.base, divisor), _cell(metric.ours, divisor), change))
        for result in {id(result): result for result, _ in have}.values():
            counts = sorted({metric.ours.n for one, metric in have if one is result})
            lines += _wrapped(_source(result, counts))
        return "\n".join(lines)

    def provenance(self) -> str:
        """What was measured, on what; to be asked for after the tables."""
        if not self.used:
            return ""
        parts = [
            "Medians, with the 10th and 90th percentile in brackets where they differ; "
            "~ where the 95 % interval of the change includes no change at all."
        ]
        keys = ("knownzero", "qemu")
        for values in dict.fromkeys(
            tuple(one.versions.get(key, "?") for key in keys)
            + tuple(one.host.get(key, "?") for key in ("cpu", "cpus", "kernel"))
            for one in self.used
        ):
            ours, qemu, cpu, cpus, kernel = values
            parts.append(f"Series {ours}, {qemu}, on {cpu} ({cpus} CPUs, Linux {kernel}).")
        for job in dict.fromkeys(filter(None, map(_job, self.used))):
            parts.append(f"{job}.")
        if any(one.accelerator == "tcg" for one in self.used):
            parts.append(
                "TCG is QEMU's emulation: counters and instructions are exact, times are those of an emulator "
                "and good for nothing but the comparison."
            )
        if self.stale:
            parts.append(f"[the series has changed since {', '.join(self.stale)}: run kz bench all]")
        return textwrap.fill(" ".join(parts), 72)


def _scale(unit: str, largest: float) -> tuple[float, str]:
    """What to divide by so that the figures of a table are short, and the unit then."""
    steps = SCALES.get(unit, SCALES[""])
    divisor, word = next((by, name) for least, by, name in steps if largest >= least)
    return divisor, (word if unit in SCALES else f"{word}{unit}").replace("µ", "u")


def _cell(sample: Sample, divisor: float) -> str:
    middle, low, high = (
        digits(value / divisor).replace(",", "") for value in (sample.median, sample.low, sample.high)
    )
    return middle if low == middle == high else f"{middle} ({low}..{high})"


def _row(label: str, one: str, two: str, change: str) -> str:
    first, second, third, fourth = COLUMNS
    return f"{INDENT}{label:{first}}{one:>{second}}{two:>{third}}{change:>{fourth}}".rstrip()


def _source(result: Result, counts: Sequence[int]) -> str:
    """Where the figures of a table are from."""
    repetitions = ", ".join(map(str, counts))
    return f"[{result.accelerator.upper()}, n = {repetitions}: {result.reproduce.removeprefix('./')}]"


def _job(result: Result) -> str:
    """What guests a run has, and what they do, as far as it says."""
    job = result.job
    if "memory" not in job:
        return ""
    cpus = job.get("cpus", 1)
    text = f"kz {result.name}" if result.name == "demo" else f"kz bench {result.name}"
    text += f": guests of {job['memory']} and {cpus} {'CPU' if cpus == 1 else 'CPUs'}"
    return text + (f", {job['size_mb']} MB allocated" if "size_mb" in job else "")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT + " ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def base_paragraph(what: series.Series, source: fetch.Source, reports: Sequence[against.Report]) -> str:
    """Which source the series is for, and what was found on others."""
    wanted = fetch.base(what.name)
    name = {"linux": "Linux", "qemu": "QEMU"}[what.name]
    text = f"The series is for {name} {source.version}"
    if source.from_debian and source.version == wanted.version:
        text += f", as it is in Debian's {wanted.package} {wanted.debian_version}"
    text += "."
    for report in reports:
        if report.age == "same" and not report.changed:
            continue  # the same source once more
        text += f" On {report.version} ({report.origin}) {report.summary()}."
    return textwrap.fill(text, 72, break_long_words=False, break_on_hyphens=False)


def write(
    what: series.Series, source: fetch.Source, runs: Sequence[Path], reports: Sequence[against.Report]
) -> Letter:
    """Render <name>/cover-letter.txt (placeholders where there is none) with the figures of ``runs``.

    Without runs the newest run of this series under out/ is taken, if there is one.
    """
    file = what.root / "cover-letter.txt"
    if not file.is_file():
        return Letter("*** SUBJECT HERE ***", "*** BLURB HERE ***", [], [], [], [])
    if runs:
        chosen = list(runs)
    else:
        run = newest_run()
        chosen = [run] if run else []
    results = {path: result for run in chosen for path, result in results_of(run).items()}
    stale = sorted({r.versions.get("knownzero", "?") for r in results.values() if not same_series(r)})
    figures = Figures(list(results.values()), stale)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True)
    try:
        rendered = environment.from_string(file.read_text(encoding="utf-8")).render(
            table=figures.table,
            provenance=figures.provenance,
            base=base_paragraph(what, source, reports),
        )
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise LabError(
            f"cannot fill in {file}",
            f"{f'line {line}: ' if line else ''}{error}",
            "mend the placeholder there",
        ) from None
    subject, _, text = rendered.partition("\n")
    # Where there is nothing to say, no hole stays.
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    long = [number for number, line in enumerate(text.splitlines(), 1) if len(line) > WIDTH]
    return Letter(subject.strip(), text, chosen, figures.gaps, stale if figures.used else [], long)
