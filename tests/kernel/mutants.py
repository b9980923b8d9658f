# SPDX-License-Identifier: GPL-2.0
"""Kernels with one deliberate mistake each, built in one object folder per architecture."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.build import linux
from lab.build.images import cached_environment, digest
from lab.core import lock, paths, run
from lab.core.errors import LabError
from lab.machine import arches, fetch
from lab.patches import apply, parts
from lab.patches.repo import Repo

FOLDER = paths.REPO / "tests" / "mutants"
FIELD = re.compile(r"^(Kernel|Found-by|Says): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """A mistake.

    ``found_by``: the test that must fail. ``says``: a pattern that its output must match.
    """

    patch: Path
    mistake: str
    arch: str
    found_by: str
    says: str


def read(patch: Path) -> Mutant:
    """A mutant from the text above its diff; LabError when a field is missing."""
    head, _, diff = patch.read_text(encoding="utf-8").partition("\ndiff --git ")
    fields = dict(FIELD.findall(head))
    mistake = " ".join(FIELD.sub("", head).split())
    if not diff or not mistake or len(fields) != 3 or fields["Kernel"] not in arches.EACH:
        why, fix = (
            "it needs a sentence, Kernel, Found-by, Says and a diff",
            "see tests/mutants/README.md",
        )
        raise LabError(f"{patch.name} is no mutant", why, fix)
    return Mutant(patch, mistake, fields["Kernel"], fields["Found-by"], fields["Says"])


def every() -> list[Mutant]:
    return [read(patch) for patch in sorted(FOLDER.glob("*.patch"))]


@contextlib.contextmanager
def tree_with(patch: Path | None, what: str = "linux") -> Iterator[Path]:
    """The tree of a series with the mistake of ``patch``, for one build at a time.

    It stays, without the mistake.
    """
    source, series = fetch.obtain(what), parts.get(what)
    tree = paths.sub("work") / f"{what}-{source.key[:12]}-mutants"
    clean = tree / ".knownzero-mutants"  # exists whenever the tree has no mistake
    with lock.locked(f"build-mutants-{what}"):
        if not clean.is_file() or clean.read_text(encoding="utf-8") != series.key():
            apply.at_patch(series, fetch.pristine(source), tree, series.patches())
            lock.write_atomically(clean, series.key())
        if not patch:
            yield tree
            return
        clean.unlink()
        Repo(tree).git("apply", str(patch))
        try:
            yield tree
        finally:
            Repo(tree).git("apply", "-R", str(patch))
            lock.write_atomically(clean, series.key())


def build(arch: str, folder: Path, patch: Path | None = None) -> Path:
    """The debug kernel with all parts, and with the mistake of ``patch``, copied to ``folder``."""
    image, files = Path(arches.ARCHES[arch].image), linux.fragments("debug", arch)
    log = paths.log_file(f"mutants-{arch}")
    obj = paths.sub("obj") / f"linux-{fetch.obtain('linux').key[:8]}-{arch}-mutants"
    key = digest([parts.get("linux").key(), *(file.read_text(encoding="utf-8") for file in files)])
    configured = obj / ".knownzero-mutants"
    with tree_with(patch) as tree:
        if not configured.is_file() or configured.read_text(encoding="utf-8") != key:
            linux.configure_linux(tree, obj, files, arch, log)
            lock.write_atomically(configured, key)
        what = f"the mutant {patch.stem if patch else 'none'} does not build"
        linux.make_targets(tree, obj, [image.name], log, arch, what, cached_environment())
        return Path(shutil.copy2(obj / image, folder / f"{arch}-{image.name}"))


def run_tests(kernels: dict[str, Path], tests: list[str]) -> run.Done:
    """Run ``tests`` of this repository with these kernels (by architecture) in place of the debug
    kernels.
    """
    argv = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    argv += ["-p", "tests.kernel.mutated", *tests]
    named = {f"KNOWNZERO_MUTANT_{arch}": str(kernel) for arch, kernel in kernels.items()}
    env = os.environ | named | {"KNOWNZERO_NIGHTLY": "1", "PYTHONPATH": str(paths.REPO)}
    return run.ask(argv, env=env)
