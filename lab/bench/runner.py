# SPDX-License-Identifier: GPL-2.0
"""The runner of all benches: boots, times, and makes the Result from what a bench observes."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lab.bench import native
from lab.bench.plan import DEBIAN, Bench, BenchOptions, Image, Images, Plan
from lab.bench.session import Side, Wanted, guests, spec_for
from lab.boot.guest import Guest, Keep, forget
from lab.boot.spec import BootSpec
from lab.build.images import metadata
from lab.core.paths import REPO
from lab.core.run import ask
from lab.report.observations import BASE, FLOOR, OURS, Observation, metrics, observe
from lab.report.results import SIDES, Floats, Metric, Result

FLOOR_NOTE = (
    "The dashed line in a chart is the floor: the base kernel with a patch (linux/measure) that "
    "leaves the memory of mappings of 64 MiB or more as it is."
)

# Of Debian's defaults, the one that decides what is zeroed; docs/how-to/measure.md has the others.
DEBIANS = "init_on_alloc=1"
DEBIAN_NOTE = (
    f"Guests boot with {DEBIANS}, Debian's default: each page is zeroed when it is allocated, "
    "whatever for. The floor kernel boots without it, since it leaves memory as it is."
)

# The accelerator of figures that are not of a run's guests.
COUNTING = "tcg, counting instructions"

Both = tuple[Floats, Floats]  # the values of base and ours


class Pair(NamedTuple):
    """Both guests of a bench."""

    base: Side
    ours: Side


@dataclass
class Run:
    """A bench that is being measured: its images, and the figures so far."""

    bench: Bench
    options: BenchOptions
    images: Images
    keep: Keep = forget  # gets each guest that has ended
    accel: str = ""  # of the first guests, unless the bench has a fixed one
    accel_reason: str = ""
    observations: list[Observation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    job: dict[str, Any] = field(default_factory=dict)
    sides: Sequence[str] = SIDES
    series: dict[str, list[float]] = field(default_factory=dict)  # see Result
    facts: dict[str, str] = field(default_factory=dict)  # about the machine
    marks: str = ""  # words after the accelerator of figures

    @property
    def native(self) -> bool:
        """Whether guests run natively under PVM, with one CPU each."""
        return self.options.accel == "pvm"

    @property
    def debian(self) -> bool:
        """Whether guests have the defaults of Debian's kernels."""
        return self.options.defaults == DEBIAN

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
    ) -> list[Observation]:
        """Add what was observed of a metric of metrics.toml on base and ours; the new ones."""
        sides = {BASE: values[0], OURS: values[1], FLOOR: floor}
        accelerator = accelerator or f"{self.accel}{self.marks}"
        found = observe(metric, sides, accelerator, parameters)
        self.observations += found
        return found

    @property
    def metrics(self) -> list[Metric]:
        """The metrics so far."""
        return metrics(self.observations)

    def ran_on(self, guest: Guest) -> None:
        """Take the accelerator of a guest; that of the first one stays."""
        self.accel = self.accel or guest.accel
        self.accel_reason = self.accel_reason or guest.accel_reason

    def note(self, *texts: str) -> None:
        """Add sentences about the method, each once."""
        self.notes = list(dict.fromkeys([*self.notes, *texts]))

    def spec(self, kernel: str, **more: Any) -> BootSpec:
        """The boot of a guest with this kernel of the images."""
        if kernel == "floor":
            self.note(FLOOR_NOTE)
        if self.debian:
            self.note(DEBIAN_NOTE)
            if kernel != "floor":
                more["append"] = f"{DEBIANS} {more.get('append', '')}".strip()
        more = {"daemon_program": self.images.daemon, **more}
        return spec_for(self.options, self.images.kernels[kernel], self.images.qemu, **more)

    @contextmanager
    def guests(self, specs: Sequence[Wanted]) -> Iterator[list[Side]]:
        """Running guests, prepared."""
        with guests(specs, self.keep) as sides:
            self.ran_on(sides[0].guest)
            if sides[0].guest.accel == "pvm":
                (native.mark if self.facts else native.check)(self, sides)
            yield sides

    @contextmanager
    def kernels(self, *names: str, **more: Any) -> Iterator[Any]:
        """Guests with base and ours, or these kernels, and the same device.

        Without the floor if the plan has none.
        """
        wanted = names or (BASE, OURS)
        names = tuple(one for one in wanted if one != FLOOR or FLOOR in self.images.kernels)
        specs = [Wanted(name, self.spec(name, **more)) for name in names]
        with self.guests(specs) as sides:
            yield Pair(*sides) if len(sides) == 2 else sides


def measure(plan: Plan, images: Images, keep: Keep = forget) -> Result:
    """Run a plan on its images; ``keep`` gets each guest that has ended."""
    began = time.monotonic()
    fixed = "" if plan.options.accel == "pvm" else plan.bench.accel
    run = Run(plan.bench, plan.options, images, keep, fixed)
    plan.bench.measure(run)
    return result(plan, run, time.monotonic() - began)


def result(plan: Plan, run: Run, seconds: float) -> Result:
    """The result of a run that has ended."""
    options = run.options
    usual = {
        "size_mb": options.size_mb,
        "memory": options.memory,
        "cpus": 1,
        "pairs": options.pairs,
    }
    return Result(
        name=plan.name(run.accel),
        accelerator=run.accel,
        versions=versions(run.images),
        reproduce=plan.reproduce(options, run.accel),
        metrics=run.metrics,
        job=(run.job or usual) | ({"defaults": DEBIAN} if run.debian else {}),
        host=host_facts() | {"accelerator": run.accel_reason} | run.facts,
        notes=run.notes,
        sides=list(run.sides),
        series=run.series,
        parts=dict(run.images.parts),
        seconds=round(seconds, 1),
    )


def versions(images: Images) -> dict[str, str]:
    """QEMU's version, this repository's commit, and the names of the images in the cache."""
    found = {"qemu": _first_line([str(images.qemu), "--version"]), "knownzero": commit()}
    for name, image in images.kernels.items():
        found[f"image_{name}"] = image.parent.name if isinstance(image, Path) else image
        if name in ("base", "ours") and (about := kernel_facts(image)):
            found[f"linux_{name}"] = about
    return found


def kernel_facts(image: Image) -> str:
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


# Settings of the machine that change times; a machine may have none of these files.
SETTINGS = {
    "governor": "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "transparent huge pages": "/sys/kernel/mm/transparent_hugepage/enabled",
}


def host_facts() -> dict[str, str]:
    model = re.search(r"(?m)^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text())
    found = {
        "cpu": model[1] if model else "unknown",
        "cpus": str(os.cpu_count() or 0),
        "kernel": platform.release(),
    }
    for name, file in SETTINGS.items():
        with contextlib.suppress(OSError):
            found[name] = Path(file).read_text(encoding="utf-8").strip()
    return found
