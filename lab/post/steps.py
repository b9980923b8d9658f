# SPDX-License-Identifier: GPL-2.0
"""Building after every patch of a series, with the feature on and off."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from lab.build import linux as build
from lab.build.images import compiler
from lab.build.qemu import QEMU_RECIPE, make_qemu
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch, tools
from lab.post import export
from lab.series import series
from lab.series import tree as tree_of

VARIANTS = ("knownzero", "off")
# What is no part of a kernel.
BESIDE = re.compile(r"^(Documentation|tools|samples)/|^(MAINTAINERS|CREDITS)$")
# Defined by the linker, for a whole kernel only; the base has the others.
LINKED = re.compile(r"^__(start|stop|crc)_")
# An option that our variants turn on or off.
OPTION = re.compile(rb"^\+?config (PAGE_ZEROED|PREZERO_PAGE|REFPAGE)", re.MULTILINE)
# Builds anew what passed before.
AGAIN = "KNOWNZERO_AGAIN"
Found = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """A series up to one of its patches; ``digest`` tells what it makes of the code to be built."""

    number: int
    patch: Path
    of_the_kernel: bool
    new: frozenset[str]
    digest: str
    has_options: bool

    @property
    def name(self) -> str:
        """The patch."""
        return self.patch.name


def steps_of(what: series.Series) -> list[Step]:
    """All steps, each with the new files used so far.

    The ones whose patch changes only texts and tools are marked as such.
    """
    homes = export.homes(what)
    so_far = hashlib.sha256()
    new: set[str] = set()
    has_options = False
    found = []
    for at, patch in enumerate(what.patches()):
        diff = series.diff_part(patch.read_bytes())
        of_the_kernel = any(not BESIDE.match(name) for name in series.touched(diff))
        if of_the_kernel:
            so_far.update(diff)
        has_options |= bool(OPTION.search(diff))
        for name in sorted(name for name, home in homes.items() if home == at):
            new.add(name)
            content = (what.new_root / name).read_bytes()
            has_options |= bool(OPTION.search(content))
            if not BESIDE.match(name):
                so_far.update(f"{name}\0".encode() + content)
        step = Step(at + 1, patch, of_the_kernel, frozenset(new), so_far.hexdigest(), has_options)
        found.append(step)
    return found


def parts(what: series.Series, arch: str = "x86") -> list[str]:
    """Make targets that hold all the code a series touches: folders, or objects in folders of folders."""
    names = {name for patch in what.patches() for name in series.touched(patch.read_bytes())}
    sources = [
        PurePosixPath(name)
        for name in sorted(names | set(what.new_files()))
        if name.endswith(".c")
        and not BESIDE.match(name)
        and (not name.startswith("arch/") or name.startswith(f"arch/{arch}/"))
    ]
    folders = Counter(source.parent for source in sources)
    # All of kernel/ is much for one file of it.
    alone = {
        folder
        for folder in folders
        if folders[folder] == 1 and any(folder in other.parents for other in folders)
    }
    found = set()
    for source in sources:
        if source.parent in alone:
            found.add(str(source.with_suffix(".o")))
        elif not any(folder in folders and folder not in alone for folder in source.parent.parents):
            found.add(f"{source.parent}/")
    return sorted(found)


def _objects(obj: Path, target: str) -> list[Path]:
    """What make built for a target; beside it there may be objects of other steps."""
    if target.endswith(".o"):
        return [obj / target]
    names = []
    archives = [f"{target}{name}" for name in ("built-in.a", "lib.a") if (obj / target / name).is_file()]
    if not archives and any((obj / target).rglob("*.o")):
        archives = [f"{target}built-in.a"]  # is missing; a folder may be empty: hugetlbfs in User-mode Linux
    for archive in archives:
        names += run.output(["ar", "t", archive], f"cannot read {archive}", "build it again", cwd=obj).split()
    modules = obj / target / "modules.order"
    if modules.is_file():
        names += modules.read_text(encoding="utf-8").split()
    return [obj / name for name in names]


def missing_symbols(obj: Path, targets: list[str], elsewhere: set[str]) -> dict[str, str]:
    """Symbols that objects need and neither these nor the rest of the kernel have: symbol -> object."""
    defined = set(elsewhere)
    needed: dict[str, str] = {}
    for target in targets:
        for file in _objects(obj, target):
            told = run.output(["nm", str(file)], f"cannot read {file}", "build it again")
            for line in told.splitlines():
                kind, symbol = line.split()[-2:]
                if kind == "U":
                    needed.setdefault(symbol, str(file.relative_to(obj)))
                elif kind not in "wv":
                    defined.add(symbol)
    return {s: where for s, where in needed.items() if s not in defined and not LINKED.match(s)}


def symbols_of(image: Path) -> set[str]:
    """What a kernel defines, by the System.map beside its image."""
    text = (image.parent / "System.map").read_text(encoding="utf-8")
    return {line.split()[-1] for line in text.splitlines()}


class _Builds(Protocol):
    """What is built at each step: some (architecture, variant)."""

    @property
    def kind(self) -> str:
        """What is built, in a word."""

    @property
    def builds(self) -> tuple[tuple[str, str], ...]:
        """Which of it, in this order."""

    def inputs(self, arch: str, variant: str) -> list[str]:
        """All that the outcome depends on besides the source."""

    def __call__(self, tree: Path, step: Step, title: str, arch: str, variant: str) -> list[str]:
        """Build it; what did not work."""


def build_each(what: series.Series, whole: bool, first: int = 0) -> Iterator[Found]:
    """Build after every patch from number ``first`` on; what did not work, as (patch, why).

    What passed once is not built again as long as nothing it depends on changes, so that a run that was
    interrupted goes on where it was. $KNOWNZERO_AGAIN builds everything.
    """
    if not any(tree_of.number_of(patch.name) >= first for patch in what.patches()):
        raise UsageError(
            "Bad --from", f"no patch of {what.name} has the number {first:04} or more", "see patches/series"
        )
    tools.need(what.name, *(["steps"] if what.name == "linux" else []))
    source = fetch.obtain(what.name)
    pristine = fetch.pristine(source)
    tree = paths.sub("work") / f"each-{source.key[:12]}"
    built = before = 0
    with ExitStack() as stack:
        stack.enter_context(lock.locked(f"each-{what.name}"))
        todo = steps_of(what)
        one: _Builds = _Qemu() if what.name == "qemu" else _Whole() if whole else _Parts(what)
        prefix = f"each-{what.name}-{one.kind}-"
        used = set()
        for step in todo:
            if not step.of_the_kernel or tree_of.number_of(step.name) < first:
                continue
            title = f"{step.number}/{len(todo)} {step.name[:50]}"
            for arch, variant in one.builds:
                if variant == "off" and not step.has_options:
                    continue  # nothing to turn off yet
                key = json.dumps([source.key, step.digest, arch, variant, *one.inputs(arch, variant)])
                stamp = paths.sub("passed") / f"{prefix}{hashlib.sha256(key.encode()).hexdigest()[:24]}"
                used.add(stamp.name)
                if stamp.is_file() and not os.environ.get(AGAIN):
                    before += 1
                    continue
                series.at_step(what, pristine, tree, step.number, step.new)
                name = f"{title} {arch} {variant}".rstrip()
                wrong = one(tree, step, name, arch, variant)
                built += 1
                # At once, and not in hours when all has been built.
                for why in wrong:
                    progress.note(f"{name}: {why}")
                yield from ((step.name, ", ".join(filter(None, (arch, variant, why)))) for why in wrong)
                if not wrong:
                    lock.write_atomically(stamp, "")
        if not first:
            for stamp in paths.sub("passed").glob(f"{prefix}*"):
                if stamp.name not in used:
                    stamp.unlink(missing_ok=True)
    progress.note(f"{what.name}: {built} builds now, {before} had passed before")


class _Qemu:
    kind = "program"
    builds = (("", ""),)

    def inputs(self, arch: str, variant: str) -> list[str]:
        return [compiler(), QEMU_RECIPE]

    def __call__(self, tree: Path, step: Step, title: str, arch: str, variant: str) -> list[str]:
        log = paths.log_file(f"each-{step.name[:4]}-qemu")
        with progress.step(title, log):
            try:
                make_qemu(tree, paths.sub("obj") / "each-qemu", log, ["qemu-system-x86_64"])
            except LabError as error:
                return [error.why]
        return []


class _Kernel:
    """Makes targets of a kernel, ``kind`` of them, for every architecture and variant."""

    kind = ""
    builds = tuple((arch, variant) for arch in build.ARCHES for variant in VARIANTS)

    def targets(self, arch: str) -> list[str]:
        raise NotImplementedError

    def folder(self, arch: str, variant: str) -> Path:
        """Where it is built."""
        return paths.sub("obj") / f"each-{self.kind}-{arch}-{variant}"

    def inputs(self, arch: str, variant: str) -> list[str]:
        texts = [file.read_text(encoding="utf-8") for file in build.fragments(variant, arch)]
        return [compiler(), build.LINUX_RECIPE, *self.targets(arch), *texts]

    def __call__(self, tree: Path, step: Step, title: str, arch: str, variant: str) -> list[str]:
        log = paths.log_file(f"each-{step.name[:4]}-{arch}-{variant}")
        with progress.step(title, log):
            try:
                # Before the patch that brings an option, asking for it has no effect.
                files = build.fragments(variant, arch)
                obj = self.folder(arch, variant)
                build.make_linux(tree, obj, files, arch, variant, log, self.targets(arch), step=True)
            except LabError as error:
                return [error.why]
        return []


class _Whole(_Kernel):
    kind = "whole"

    def targets(self, arch: str) -> list[str]:
        return ["vmlinux"]


class _Parts(_Kernel):
    """Compiles what the series can have broken, and looks up what it would be linked with."""

    kind = "parts"

    def __init__(self, what: series.Series) -> None:
        self._targets = {arch: parts(what, "x86" if arch == "x86_64" else arch) for arch in build.ARCHES}
        # The rest of the kernel is that of the base: what the series adds is in its parts.
        self._elsewhere = {arch: symbols_of(build.build_linux("base", arch)) for arch in build.ARCHES}

    def targets(self, arch: str) -> list[str]:
        return self._targets[arch]

    def __call__(self, tree: Path, step: Step, title: str, arch: str, variant: str) -> list[str]:
        if wrong := super().__call__(tree, step, title, arch, variant):
            return wrong
        missing = missing_symbols(self.folder(arch, variant), self.targets(arch), self._elsewhere[arch])
        return [f"{where} needs {symbol}, which nobody defines" for symbol, where in missing.items()]
