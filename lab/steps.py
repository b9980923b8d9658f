# SPDX-License-Identifier: GPL-2.0
"""Building after every patch of a series, with the feature on and off."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from lab import build, fetch, lock, paths, progress, run, series
from lab import tree as tree_of
from lab.errors import LabError

VARIANTS = ("knownzero", "off")
# What is no part of a kernel.
BESIDE = re.compile(r"^(Documentation|tools|samples)/|^(MAINTAINERS|CREDITS)$")
# Defined by the linker, for a whole kernel only; the base has the others.
LINKED = re.compile(r"^__(start|stop|crc)_")
Found = tuple[str, str]


@dataclass(frozen=True)
class Step:
    """A series up to one of its patches."""

    number: int
    patch: Path
    of_the_kernel: bool

    @property
    def name(self) -> str:
        """The patch."""
        return self.patch.name


def steps_of(what: series.Series) -> list[Step]:
    """All steps; the ones whose patch changes only texts and tools are marked as such."""
    return [
        Step(at, patch, any(not BESIDE.match(name) for name in series.touched(patch.read_bytes())))
        for at, patch in enumerate(what.patches(), start=1)
    ]


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


def missing_symbols(obj: Path, targets: list[str], elsewhere: set[str]) -> dict[str, str]:
    """Symbols that objects need and neither these nor the rest of the kernel have: symbol -> object."""
    defined = set(elsewhere)
    needed: dict[str, str] = {}
    for target in targets:
        objects = [obj / target] if target.endswith(".o") else sorted((obj / target).rglob("*.o"))
        for file in objects:
            # Modules and objects linked from others say nothing new.
            if not (file.parent / f".{file.name}.cmd").is_file() or file.name.endswith(".mod.o"):
                continue
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


def build_each(what: series.Series, whole: bool, first: int = 0) -> Iterator[Found]:
    """Build after every patch from number ``first`` on; what did not work, as (patch, why)."""
    build.need_tools(what.name)
    source = fetch.obtain(what.name)
    pristine = fetch.pristine(source)
    tree = paths.sub("work") / f"each-{source.key[:12]}"
    with ExitStack() as stack:
        stack.enter_context(lock.locked(f"each-{what.name}"))
        todo = steps_of(what)
        one = _qemu if what.name == "qemu" else _whole_kernel if whole else _Parts(what)
        for step in todo:
            if not step.of_the_kernel or tree_of.number_of(step.name) < first:
                continue
            series.at_step(what, pristine, tree, step.number)
            title = f"{step.number}/{len(todo)} {step.name[:50]}"
            yield from one(tree, step, title)


def _qemu(tree: Path, step: Step, title: str) -> Iterator[Found]:
    log = paths.log_file(f"each-{step.name[:4]}-qemu")
    with progress.step(title, log):
        try:
            build.make_qemu(tree, paths.sub("obj") / "each-qemu", log, ["qemu-system-x86_64"])
        except LabError as error:
            yield step.name, error.why


def _make(tree: Path, step: Step, title: str, arch: str, variant: str, targets: list[str]) -> str:
    """Build targets of a kernel; why that did not work, or nothing."""
    log = paths.log_file(f"each-{step.name[:4]}-{arch}-{variant}")
    kind = "whole" if targets == ["vmlinux"] else "parts"
    with progress.step(f"{title} {arch} {variant}", log):
        try:
            obj = paths.sub("obj") / f"each-{kind}-{arch}-{variant}"
            # Before the patch that brings an option, asking for it has no effect.
            files = build.fragments(variant, arch)
            build.make_linux(tree, obj, files, arch, variant, log, targets, lenient=True)
        except LabError as error:
            return error.why
    return ""


def _whole_kernel(tree: Path, step: Step, title: str) -> Iterator[Found]:
    for arch in build.ARCHES:
        for variant in VARIANTS:
            if why := _make(tree, step, title, arch, variant, ["vmlinux"]):
                yield step.name, f"{arch}, {variant}: {why}"


class _Parts:
    """Compiles what the series can have broken, and looks up what it would be linked with."""

    def __init__(self, what: series.Series) -> None:
        self.targets = parts(what)
        # The rest of the kernel is that of the base: what the series adds is in its parts.
        self.elsewhere = symbols_of(build.build_linux("base"))

    def __call__(self, tree: Path, step: Step, title: str) -> Iterator[Found]:
        for variant in VARIANTS:
            if why := _make(tree, step, title, "x86_64", variant, self.targets):
                yield step.name, f"x86_64, {variant}: {why}"
                continue
            obj = paths.sub("obj") / f"each-parts-x86_64-{variant}"
            for symbol, where in missing_symbols(obj, self.targets, self.elsewhere).items():
                yield step.name, f"x86_64, {variant}: {where} needs {symbol}, which nobody defines"
            if not build.OURS.search((obj / ".config").read_text(encoding="utf-8")):
                return  # nothing to turn off yet
