# SPDX-License-Identifier: GPL-2.0
"""The runner of all benches.

Builds, boots, times, and makes the Result from the figures of a bench.
"""

import contextlib
import hashlib
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.bench import Bench, BenchOptions
from lab.bench.session import SHARED, Side, available_gb, guests, spec_for
from lab.boot import resolve
from lab.boot.spec import BootSpec
from lab.build.images import metadata
from lab.build.linux import VARIANTS, build_linux
from lab.core.errors import LabError, UsageError
from lab.core.paths import REPO
from lab.core.run import ask
from lab.report.evidence import machine
from lab.report.observations import BASE, FLOOR, OURS, Observation, metrics, observe
from lab.report.results import SIDES, Floats, Metric, Result
from lab.series.parts import split

FLOOR_NOTE = (
    "The dashed line in a chart is the floor: the base kernel with a patch (linux/measure) that "
    "leaves the memory of mappings of 64 MiB or more as it is."
)


# The accelerators of figures that are not of a run's guests.
MACHINE = "the machine itself, no guest"
COUNTING = "tcg, counting instructions"
USER_MODE = "User-Mode Linux"

Both = tuple[Floats, Floats]  # the values of base and ours


class Pair(NamedTuple):
    """Both guests of a bench."""

    base: Side
    ours: Side


@dataclass(frozen=True)
class Built:
    """The images of a run. They stay the same when the sources change meanwhile."""

    qemu: Path
    base: str | Path
    ours: str | Path

    def versions(self) -> dict[str, str]:
        """QEMU's version, this repository's commit, and the names of the images in the cache."""
        found = {"qemu": _first_line([str(self.qemu), "--version"]), "knownzero": commit()}
        for side, image in (("base", self.base), ("ours", self.ours)):
            found[f"image_{side}"] = image.parent.name if isinstance(image, Path) else image
            if about := kernel_facts(image):
                found[f"linux_{side}"] = about
        return found


def built(options: BenchOptions, config: str = "") -> Built:
    """Build or find QEMU and both kernels, with a fragment; LabError when that fails."""
    named = options.base, options.ours
    base, ours = (build_linux(one, config=config) if one in VARIANTS else one for one in named)
    return Built(resolve.qemu(options.qemu), base, ours)


@dataclass
class Run:
    """A bench that is being measured: its images, and the figures so far."""

    bench: Bench
    options: BenchOptions
    images: Built
    accel: str = ""  # of the first guests, unless the bench has a fixed one
    accel_reason: str = ""
    observations: list[Observation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    sides: Sequence[str] = SIDES
    series: dict[str, list[float]] = field(default_factory=dict)  # see Result

    @property
    def pairs(self) -> int:
        return self.options.pairs

    def add(
        self,
        metric: str,
        values: Both,
        parameters: Mapping[str, object] = MappingProxyType({}),
        *,
        floor: Floats = (),
        accelerator: str = "",
    ) -> Metric:
        """Add what was observed of a metric of metrics.toml on base and ours; the metric."""
        sides = {BASE: values[0], OURS: values[1], FLOOR: floor}
        found = observe(metric, sides, accelerator or self.accel, parameters)
        self.observations += found
        return metrics(found)[0]

    @property
    def metrics(self) -> list[Metric]:
        """The metrics so far."""
        return metrics(self.observations)

    def note(self, *texts: str) -> None:
        """Add sentences about the method, each once."""
        self.notes = list(dict.fromkeys([*self.notes, *texts]))

    def spec(self, kernel: str, **more: Any) -> BootSpec:
        """The boot of a guest with the kernel base or floor, or with ours for any other name."""
        image = self.images.base if kernel == "base" else self.images.ours
        image = self.floor() if kernel == "floor" else image
        spec = spec_for(self.options, image, self.images.qemu, **more)
        if self.options.qemu == "stock" and spec.daemon_options() is not None:
            backing = "a tmpfs with huge=always" if spec.shared_memory else "a memfd of 4 KiB pages"
            self.note(SHARED.format(backing))
        return spec

    def floor(self) -> Path:
        """The kernel that does not zero the job's memory."""
        image = build_linux("floor")
        self.versions |= {"image_floor": image.parent.name}
        self.note(FLOOR_NOTE)
        return image

    @contextmanager
    def guests(self, specs: Sequence[tuple[str, BootSpec]]) -> Iterator[list[Side]]:
        """Running guests, prepared; the accelerator of the run is that of the first ones."""
        with guests(specs) as sides:
            self.accel = self.accel or sides[0].guest.accel
            self.accel_reason = self.accel_reason or sides[0].guest.accel_reason
            yield sides

    @contextmanager
    def kernels(
        self, *names: str, extra: dict[str, list[str]] | None = None, **more: Any
    ) -> Iterator[Any]:
        """Guests with base and ours, or these kernels, and the same device; ``extra``.

        Arguments of QEMU by side.
        """
        names, extra = names or ("base", "ours"), extra or {}
        specs = [(name, self.spec(name, extra_qemu=extra.get(name, []), **more)) for name in names]
        with self.guests(specs) as sides:
            yield Pair(*sides) if len(sides) == 2 else sides


def measure(bench: Bench, options: BenchOptions) -> Result:
    began = time.monotonic()
    if (available := available_gb()) < bench.needs_gb:
        why = f"{available:.1f} GB of memory are available, {bench.needs_gb:.1f} GB are needed"
        raise LabError(
            f"Cannot run the bench {bench.name}", why, "end other programs on the machine"
        )
    if unknown := set(split(options.only)).difference(bench.parts):
        why = f"{bench.name} has no part {min(unknown)}"
        raise UsageError(
            f"Bad --only: {options.only}", why, f"use {', '.join(bench.parts) or 'all of it'}"
        )
    if bench.parts:
        bench.call("disk")  # with all that its parts need
    if bench.accel:
        options = replace(options, accel=bench.accel)
    images = built(options if bench.both else replace(options, base=options.ours), bench.config)
    run = Run(bench, options, images, accel=bench.accel)
    bench.measure(run)
    options = run.options
    usual = {
        "size_mb": options.size_mb,
        "memory": options.memory,
        "cpus": 1,
        "pairs": options.pairs,
    }
    return Result(
        name=bench.name,
        accelerator=run.accel,
        versions=images.versions() | run.versions,
        reproduce=reproduce(bench.name, options, run.accel),
        metrics=run.metrics,
        job=run.job or usual,
        host=host_facts() | {"accelerator": run.accel_reason},
        notes=run.notes,
        sides=list(run.sides),
        series=run.series,
        seconds=round(time.monotonic() - began, 1),
    )


def kernel_facts(image: str | Path) -> str:
    """Release, configuration and compiler of a kernel, as far as the files beside its image have
    them.
    """
    path = Path(image)
    if path.parent == Path():
        return ""  # the name of an image, and no path
    about = metadata(path)
    facts = [f"Linux {about['release']}"] if "release" in about else []
    with contextlib.suppress(OSError):
        config = hashlib.sha256((path.parent / ".config").read_bytes()).hexdigest()
        facts.append(f".config sha256 {config[:16]}")
    return ", ".join([*facts, *filter(None, [str(about.get("compiler", ""))])])


def _first_line(argv: list[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return ask(argv, timeout=30).stdout.partition("\n")[0].strip() or "unknown"
    return "unknown"


def commit() -> str:
    return _first_line(["git", "-C", str(REPO), "describe", "--always", "--dirty", "--tags"])


def host_facts() -> dict[str, str]:
    found = machine()
    return {
        "cpu": found.get("model name", "unknown"),
        "cpus": found["cpus"],
        "kernel": platform.release(),
    }


def reproduce(name: str, options: BenchOptions, accel: str) -> str:
    chosen = {"pairs": options.pairs, "size": options.size_mb, "accel": accel}
    usual = BenchOptions()
    for flag in ("memory", "base", "ours", "qemu", "only"):
        if (value := getattr(options, flag)) != getattr(usual, flag):
            chosen[flag] = value
    words = (word for flag, value in chosen.items() for word in (f"--{flag}", str(value)))
    return shlex.join(["./kz", "bench", name, *words])
