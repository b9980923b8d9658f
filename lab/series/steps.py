# SPDX-License-Identifier: GPL-2.0
"""``kz series check --each``: build after every patch, with the feature on and off."""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.build import linux, qemu
from lab.build.images import compiler, digest
from lab.core import lock, paths, progress
from lab.core.errors import LabError, UsageError
from lab.machine import arches, fetch, tools
from lab.patches import apply, parts
from lab.patches.parts import Series

VARIANTS = ("knownzero", "off")
# Not compiled into a kernel.
BESIDE = re.compile(r"^(Documentation|tools|samples)/|^(MAINTAINERS|CREDITS)$")
# Too much for one file in it.
LARGE = ("fs", "kernel")
# Builds what passed before again.
AGAIN = "KNOWNZERO_AGAIN"
Found = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """The series up to one patch.

    ``digest`` names the compiled code, ``symbols`` whether there is an option to turn off.
    """

    name: str
    patches: tuple[Path, ...]
    compiled: bool
    digest: str
    symbols: bool


def steps_of(series: Series) -> list[Step]:
    """One step for each patch in the recorded order."""
    configs = "|".join(symbol for part in series.parts for symbol in part.configs) or "-"
    option = re.compile(rf"^\+config ({configs})$".encode(), re.MULTILINE)
    code, symbols, found = hashlib.sha256(), False, []
    patches = series.patches()
    for at, patch in enumerate(patches):
        diff = parts.diff_of(patch.read_bytes())
        if compiled := any(not BESIDE.match(name) for name in parts.touched(diff)):
            code.update(diff)
        symbols |= bool(option.search(diff))
        name = f"{patch.parent.name}/{patch.name}"
        found.append(Step(name, tuple(patches[: at + 1]), compiled, code.hexdigest(), symbols))
    return found


def targets(series: Series, arch: str = "x86") -> list[str]:
    """Make targets that hold all the code a series changes.

    Folders, or objects in folders of folders.
    """
    found = set()
    for name in series.files():
        other = name.startswith("arch/") and not name.startswith(f"arch/{arch}/")
        if name.endswith(".c") and not other and not BESIDE.match(name):
            folder, _, file = name.rpartition("/")
            found.add(f"{folder}/{file.removesuffix('c')}o" if folder in LARGE else f"{folder}/")
    return sorted(found)


@dataclass(frozen=True)
class Build:
    """One thing that is built at each step: its inputs besides the source, and how."""

    name: str
    off: bool
    inputs: list[str]
    run: Callable[[Path, Path], None]


def _qemu() -> Build:
    def make(tree: Path, log: Path) -> None:
        qemu.make_qemu(tree, paths.sub("obj") / "each-qemu", log, ["qemu-system-x86_64"])

    return Build("x86_64", False, [compiler(), qemu.QEMU_RECIPE], make)


def _kernel(series: Series, arch: str, variant: str) -> Build:
    wanted = targets(series, "x86" if arch == "x86_64" else arch)
    files, obj = linux.fragments(variant, arch), paths.sub("obj") / f"each-{arch}-{variant}"
    if arch == "x86_64":
        files.append(linux.CONFIGS / "steps.config")

    def make(tree: Path, log: Path) -> None:
        # Before the patch that adds an option, setting it has no effect.
        linux.make_linux(tree, obj, files, arch, variant, log, wanted, step=True)

    inputs = [
        compiler(),
        linux.LINUX_RECIPE,
        *wanted,
        *(file.read_text(encoding="utf-8") for file in files),
    ]
    return Build(f"{arch} {variant}", variant == "off", inputs, make)


def build_each(series: Series, first: str = "") -> Iterator[Found]:
    """Build after every patch from ``first`` (PART or PART/NNNN) on.

    Yields (patch, reason) of each failure.

    A step that passed is built again only when something it depends on changes, so an interrupted
    run goes on where it was. $KNOWNZERO_AGAIN builds everything.
    """
    todo = steps_of(series)
    start = next((at for at, step in enumerate(todo) if step.name.startswith(first)), None)
    if start is None:
        why, fix = f"no patch of {series.name} starts with it", "PART or PART/NNNN, see parts/"
        raise UsageError(f"Bad --from {first}", why, fix)
    tools.need(series.name)
    source = fetch.obtain(series.name)
    pristine = fetch.pristine(source)
    tree = paths.sub("work") / f"each-{source.key[:12]}"
    built = before = 0
    with lock.locked(f"each-{series.name}"):
        kernels = itertools.product(arches.EACH, VARIANTS) if series.name == "linux" else ()
        builds = [_kernel(series, *one) for one in kernels] or [_qemu()]
        for at, step in enumerate(todo[start:], start + 1):
            for one in builds if step.compiled else []:
                if one.off and not step.symbols:
                    continue
                key = digest([source.key, step.digest, one.name, *one.inputs])
                stamp = paths.sub("passed") / f"each-{series.name}-{key[:24]}"
                if stamp.is_file() and not os.environ.get(AGAIN):
                    before += 1
                    continue
                built += 1
                apply.at_patch(series, pristine, tree, step.patches)
                log = paths.log_file(f"each-{at}-{one.name}")
                with progress.step(f"{at}/{len(todo)} {step.name[:50]} {one.name}", log):
                    try:
                        one.run(tree, log)
                        lock.write_atomically(stamp, "")
                    except LabError as error:
                        progress.note(f"{step.name} does not build: {one.name} (see {log})")
                        yield step.name, f"{one.name}: {error.why}"
    progress.note(f"{built} builds made, {before} passed before")
