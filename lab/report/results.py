# SPDX-License-Identifier: GPL-2.0
"""Results of a measurement: samples, metrics, and the result.json they are kept in."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.core import lock
from lab.core.errors import LabError, UsageError
from lab.core.units import digits, human
from lab.report import registry
from lab.report.significance import TOO_FEW, Significance, change_interval, judge

FILE_NAME = "result.json"
FORMAT = 2
SIDES = ("base", "knownzero")  # the usual names of both sides of a result
Floats = Sequence[float]


@dataclass(frozen=True)
class Sample:
    """One side of a metric: the median of ``n`` values, and their 10th and 90th percentile."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Summarise values; ValueError when there are none or one is not a finite number."""
        if not values or not all(math.isfinite(value) for value in values):
            raise ValueError(f"cannot summarise {list(values)!r}")
        deciles = statistics.quantiles(
            [*values, *values[: len(values) == 1]], n=10, method="inclusive"
        )
        median = statistics.median(values)
        # Interpolation may round to a value outside.
        low, high = (
            min(median, max(min(values), deciles[0])),
            max(median, min(max(values), deciles[-1])),
        )
        return cls(median, low, high, len(values))

    def text(self, divisor: float = 1.0) -> str:
        """The median, with both percentiles where they differ."""
        middle, low, high = (
            digits(value / divisor) for value in (self.median, self.low, self.high)
        )
        return middle if low == middle == high else f"{middle} ({low}…{high})"


def change_percent(base: float, ours: float) -> float | None:
    """How far ours is from base, in percent of base; None when base is zero and ours is not."""
    if base == 0:
        return 0.0 if ours == 0 else None
    return (ours - base) / base * 100


@dataclass(frozen=True)
class Target:
    """A goal of a metric, and whether this run met it; not ``decided``: noise hides it."""

    text: str
    met: bool
    decided: bool = True

    @property
    def verdict(self) -> str:
        if not self.decided:
            return "not decided"
        return "met" if self.met else "MISSED"

    @property
    def distance(self) -> str:
        """The verdict on a floor."""
        if not self.decided:
            return "not decided"
        return "reached" if self.met else "above"


@dataclass(frozen=True)
class Metric:
    """One figure for base and ours; ``unit`` is that of the medians.

    ``kind`` is its name in metrics.toml, which the other words come from.
    """

    name: str
    unit: str
    base: Sample
    ours: Sample
    change_percent: float | None
    change_interval: tuple[float, float] | None = None
    target: Target | None = None
    values: dict[str, list[float]] = field(default_factory=dict)
    significance: Significance | None = None
    floor: float | None = None  # the median of a kernel that does not zero the job's memory
    near_floor: Target | None = None  # whether ours is as good as that kernel
    title: str = ""  # of its chart
    label: str = ""  # in the chart
    more: str = ""
    better: str = "less"  # less, more, or "" where neither is better
    kind: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    accelerator: str = ""  # "" for that of the run

    @property
    def paired(self) -> bool:
        """Whether the values of both sides are pairs, measured by turns."""
        return bool(self.values) and len(self.values["base"]) == len(self.values["ours"])

    @property
    def sentence(self) -> str:
        """All its words."""
        about = ": ".join(filter(None, (self.title, self.label)))
        words = "; ".join(filter(None, (about, self.more)))
        return f"{words}." if words else ""

    @classmethod
    def of(
        cls,
        name: str,
        unit: str,
        base: Floats,
        ours: Floats,
        target: Target | None = None,
        floor: Floats = (),
    ) -> Metric:
        """Make a metric from both sides' values; equally many are pairs."""
        one, two = Sample.of(base), Sample.of(ours)
        return cls(
            name,
            unit,
            one,
            two,
            change_percent(one.median, two.median),
            change_interval(base, ours),
            target,
            {"base": list(base), "ours": list(ours)},
            judge(base, ours, paired=len(base) == len(ours)),
            statistics.median(floor) if floor else None,
        )


Goal = Callable[[Metric], Target]


def in_words(accelerator: str) -> str:
    """The accelerator of figures, for readers."""
    return re.sub(r"^pvm\b", "native (PVM)", accelerator)


@dataclass
class Result:
    """The figures of a run, and the facts needed to repeat it."""

    name: str
    accelerator: str
    versions: dict[str, str]
    reproduce: str
    metrics: list[Metric]
    job: dict[str, Any] = field(default_factory=dict)
    host: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    sides: list[str] = field(default_factory=lambda: list(SIDES))
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    seconds: float = 0.0
    series: dict[str, list[float]] = field(default_factory=dict)  # GiB in each second
    parts: dict[str, str] = field(default_factory=dict)  # the key of each part that was measured
    format: int = FORMAT
    # The folder of its file, once it has one; not in the file.
    folder: Path | None = field(default=None, compare=False)

    @property
    def ran_on(self) -> str:
        """The accelerator in words."""
        return in_words(self.accelerator)

    def metric(self, name: str) -> Metric | None:
        return next((metric for metric in self.metrics if metric.name == name), None)

    def missed(self) -> list[str]:
        """A line for each target that was missed or could not be decided.

        Also for each floor that was not reached.
        """
        lines = []
        for metric in self.metrics:
            both = (
                f"{self.sides[0]} {human(metric.base.median, metric.unit)}, "
                f"{self.sides[1]} {human(metric.ours.median, metric.unit)}"
            )
            target, floor = metric.target, metric.near_floor
            if target and not target.met:
                what = "misses its target" if target.decided else "has a target that noise hides"
                lines.append(f"{self.name}: {metric.name} {what}: {target.text}; {both}")
            if floor and floor.decided and not floor.met:
                lines.append(f"{self.name}: {metric.name} is above the floor: {floor.text}; {both}")
        return lines

    def to_json(self) -> str:
        data = asdict(self)
        del data["folder"]
        return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, folder: Path) -> Path:
        """Write result.json into a folder (made when missing), all of it or nothing."""
        path = folder / FILE_NAME
        lock.write_atomically(path, self.to_json())
        self.folder = folder
        return path


def _metric(data: dict[str, Any]) -> Metric:
    interval, test = data.get("change_interval"), data.get("significance", {"test": TOO_FEW})
    target, floor = (data.get(name) for name in ("target", "near_floor"))
    values = {side: list(map(float, found)) for side, found in data.get("values", {}).items()}
    # A published metric has no name where its kind and parameters make it, only the words that
    # differ from those in metrics.toml, and no test where it had too few values.
    kind, parameters = data.get("kind", ""), data.get("parameters", {})
    words = {"name": registry.name(kind, parameters)} | registry.words(kind, parameters)
    given = data | {
        "base": Sample(**data["base"]),
        "ours": Sample(**data["ours"]),
        "change_percent": data.get("change_percent"),
        "change_interval": (float(interval[0]), float(interval[1])) if interval else None,
        "target": Target(**target) if target else None,
        "near_floor": Target(**floor) if floor else None,
        "values": values,
        "significance": Significance(**test) if test else None,
    }
    made = Metric(**(words | given))
    if not made.name:
        raise ValueError("a metric has no name")
    return made


def from_data(data: dict[str, Any], folder: Path | None) -> Result:
    """The result that was written as ``data`` into a folder; ValueError for another format."""
    if data.get("format", FORMAT) != FORMAT:
        raise ValueError(f"its format is {data['format']}, this program reads {FORMAT}")
    metrics = [_metric(metric) for metric in data["metrics"]]
    found = Result(**(data | {"metrics": metrics, "folder": folder}))
    if len(found.sides) != len(SIDES):
        raise ValueError(f"it has {len(found.sides)} sides")
    return found


def load(path: Path) -> Result:
    """Read a result from its file or folder.

    UsageError when there is none, LabError for another file.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return from_data(data, file.parent)
    except FileNotFoundError:
        why = f"there is no {file}"
        fix = "name a folder under out/ that a `kz demo` or `kz bench` has written"
        raise UsageError(f"Cannot read the run {path}", why, fix) from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        fix = "name a folder under out/ that a `kz demo` or `kz bench` has written"
        raise UsageError(f"Cannot read the run {path}", f"{file} is no JSON file", fix) from None
    except OSError as error:
        why, fix = str(error.strerror or error), "check the permissions of the file"
        raise LabError(f"Cannot read the run {path}", why, fix) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{file} is not a result: {type(error).__name__}: {error}"
        fix = (
            "run the bench again: the lab writes results whole, so another program changed this "
            "file"
        )
        raise LabError(f"Cannot read the run {path}", why, fix) from error


def results_of(run: Path) -> dict[Path, Result]:
    """The results of a run.

    Of its own folder, or of those in it, as a night's benches leave them.
    """
    if run.is_file() or (run / FILE_NAME).is_file() or not run.is_dir():
        return {run: load(run)}
    found = {file.parent: load(file.parent) for file in sorted(run.glob(f"*/{FILE_NAME}"))}
    if not found:
        why = f"neither it nor a folder in it has a {FILE_NAME}"
        fix = "name a folder under out/ that `kz demo` or `kz bench` has written"
        raise UsageError(f"Cannot read the run {run}", why, fix)
    return found
