# SPDX-License-Identifier: GPL-2.0
"""``kz series check --each``: build after every patch, with the feature on and off."""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.build import linux, qemu
from lab.build.images import compiler, digest
from lab.core import lock, paths, progress
from lab.core.errors import LabError
from lab.machine import arches, fetch, tools
from lab.patches import apply
from lab.patches.parts import Series, diff_of, touched

VARIANTS = ("knownzero", "off")
# Not compiled into a kernel.
BESIDE = re.compile(r"^(Documentation|tools|samples)/|^(MAINTAINERS|CREDITS)$")
# Too much for one file in it.
LARGE = ("fs", "kernel")


def targets(series: Series, arch: str = "x86") -> list[str]:
    """Make targets with all the code that a series changes: folders, or objects in LARGE ones."""
    found = set()
    for name in series.files():
        folder, _, file = name.rpartition("/")
        other = name.startswith("arch/") and not name.startswith(f"arch/{arch}/")
        if file.endswith(".c") and not other and not BESIDE.match(name):
            found.add(f"{folder}/{file.removesuffix('c')}o" if folder in LARGE else f"{folder}/")
    return sorted(found)


@dataclass(frozen=True)
class Build:
    """One thing that is built after each patch: its inputs besides the source, and how."""

    name: str
    inputs: list[str]
    run: Callable[[Path, Path], None]


def _qemu() -> Build:
    def make(tree: Path, log: Path) -> None:
        qemu.make_qemu(tree, paths.sub("obj") / "each-qemu", log, ["qemu-system-x86_64"])

    return Build("x86_64", [compiler(), qemu.QEMU_RECIPE], make)


def _kernel(series: Series, arch: str, variant: str) -> Build:
    wanted = targets(series, "x86" if arch == "x86_64" else arch)
    files, obj = linux.fragments(variant, arch), paths.sub("obj") / f"each-{arch}-{variant}"
    if arch == "x86_64":
        files.append(linux.CONFIGS / "steps.config")

    def make(tree: Path, log: Path) -> None:
        # Before the patch that adds an option, setting it has no effect.
        linux.make_linux(tree, obj, files, arch, variant, log, wanted, step=True)

    texts = [file.read_text(encoding="utf-8") for file in files]
    return Build(f"{arch} {variant}", [compiler(), linux.LINUX_RECIPE, *wanted, *texts], make)


def builds(series: Series) -> list[Build]:
    if series.name == "qemu":
        return [_qemu()]
    return [_kernel(series, *one) for one in itertools.product(arches.EACH, VARIANTS)]


def build_each(series: Series) -> Iterator[tuple[str, str]]:
    """Build after every patch; yields (patch, reason) of each failure.

    What passed is built again only when something it depends on changes, so an interrupted run
    goes on where it was.
    """
    tools.need(series.name)
    source = fetch.obtain(series.name)
    pristine = fetch.pristine(source)
    tree = paths.sub("work") / f"each-{source.key[:12]}"
    code, patches = hashlib.sha256(), series.patches()
    with lock.locked(f"each-{series.name}"):
        wanted = builds(series)
        for at, patch in enumerate(patches, 1):
            name = f"{patch.parent.name}/{patch.name}"
            diff = diff_of(patch.read_bytes())
            if all(BESIDE.match(file) for file in touched(diff)):
                continue
            code.update(diff)
            for one in wanted:
                key = digest([source.key, code.hexdigest(), one.name, *one.inputs])
                stamp = paths.sub("passed") / f"each-{series.name}-{key[:24]}"
                if stamp.is_file():
                    continue
                apply.at_patch(series, pristine, tree, patches[:at])
                log = paths.log_file(f"each-{at}-{one.name}")
                with progress.step(f"{at}/{len(patches)} {name[:50]} {one.name}", log):
                    try:
                        one.run(tree, log)
                        lock.write_atomically(stamp, "")
                    except LabError as error:
                        progress.note(f"{name} does not build: {one.name} (see {log})")
                        yield name, f"{one.name}: {error.why}"
