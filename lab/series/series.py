# SPDX-License-Identifier: GPL-2.0
"""The series as it is kept in the repository: new files, patches, and the tree they make."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import fetch

APPLIED = ".knownzero-applied"
Content = tuple[bytes, int]  # the bytes of a file and its mode


@dataclass(frozen=True)
class Series:
    """The files of one series, found under <name>/new and <name>/patches."""

    name: str
    root: Path

    @property
    def new_root(self) -> Path:
        """Files the series adds, at their place in the source tree."""
        return self.root / "new"

    @property
    def patch_root(self) -> Path:
        """The folder of the patches and of their list, ``series``."""
        return self.root / "patches"

    def new_files(self) -> list[str]:
        """Paths of the added files, relative to the source tree, sorted."""
        if not self.new_root.is_dir():
            return []
        return sorted(str(p.relative_to(self.new_root)) for p in self.new_root.rglob("*") if p.is_file())

    def patches(self) -> list[Path]:
        """The patches in the order in which they apply."""
        listing = self.patch_root / "series"
        if not listing.is_file():
            return []
        found = []
        for line in listing.read_text(encoding="utf-8").splitlines():
            name = line.split("#", 1)[0].strip()
            if not name:
                continue
            path = self.patch_root / name
            if not path.is_file():
                raise LabError(
                    f"{listing} names a patch that is not there",
                    str(path),
                    "restore the patch, or take the line out",
                )
            found.append(path)
        return found

    def key(self) -> str:
        """A name for what the series does to a tree (messages of patches do not count)."""
        digest = hashlib.sha256()
        for name in self.new_files():
            path = self.new_root / name
            digest.update(f"new {name} {mode_of(path):o}\n".encode() + path.read_bytes())
        for patch in self.patches():
            digest.update(b"patch\n" + diff_part(patch.read_bytes()))
        return digest.hexdigest()

    def empty(self) -> bool:
        """Whether there is nothing to apply."""
        return not self.new_files() and not self.patches()


def get(name: str) -> Series:
    """The series of ``linux`` or ``qemu``."""
    fetch.base(name)
    return Series(name, paths.REPO / name)


def mode_of(path: Path) -> int:
    """The mode git would keep: 755 for what can be run, 644 otherwise."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def diff_part(patch: bytes) -> bytes:
    """A patch without its message."""
    at = patch.find(b"\ndiff --git ")
    return patch[at + 1 :] if at >= 0 else b"" if not patch.startswith(b"diff --git ") else patch


def touched(patch: bytes) -> list[str]:
    """The paths a patch in git form changes (both names of a rename)."""
    found: list[str] = []
    for line in diff_part(patch).splitlines():
        match = re.match(rb"diff --git a/(.+) b/(.+)$", line)
        if match:
            for name in match.groups():
                text = name.decode()
                if text not in found:
                    found.append(text)
    return found


def git_environment(ceiling: Path) -> dict[str, str]:
    """An environment in which git behaves the same for everybody."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return {
        **keep,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "LC_ALL": "C",
    }


def apply_patch(patch: Path, folder: Path) -> str:
    """Apply one patch to plain files with all its context; the reason when it does not fit."""
    done = subprocess.run(
        ["git", "apply", "-p1", "--whitespace=nowarn", str(patch)],
        cwd=folder,
        env=git_environment(folder.parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else (done.stderr.strip() or f"git apply: exit code {done.returncode}")


def result(
    series: Series, pristine: Path, upto: int | None = None, new: frozenset[str] | None = None
) -> dict[str, Content | None]:
    """What the series makes of each file it touches (None: deleted), after ``upto`` patches.

    ``new``: the new files that are there already, by default all.
    """
    patches = series.patches()[:upto]
    new_files = [name for name in series.new_files() if new is None or name in new]
    names = {name for patch in patches for name in touched(patch.read_bytes())}
    with tempfile.TemporaryDirectory(prefix=".apply-", dir=paths.sub("work")) as folder:
        scratch = Path(folder)
        for name in names:
            if (pristine / name).is_file():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(pristine / name, scratch / name)
        for name in new_files:
            if (pristine / name).exists():
                raise LabError(
                    f"new file {name} exists already in {series.name}",
                    f"{series.new_root.name}/ may only hold files that the base does not have",
                    "make it a patch of the existing file",
                )
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(series.new_root / name, scratch / name)
        for patch in patches:
            reason = apply_patch(patch, scratch)
            if reason:
                raise LabError(
                    f"{patch.name} does not fit {series.name} {fetch.tree_version(series.name, pristine)}",
                    reason,
                    f"mend it in the tree that `kz tree {series.name}` makes (or use the version in {series.name}/base.toml), then `kz series save {series.name}`",
                )
        made: dict[str, Content | None] = {}
        for name in names | set(new_files):
            path = scratch / name
            made[name] = (path.read_bytes(), mode_of(path)) if path.is_file() else None
        return made


def _sync(tree: Path, pristine: Path, made: dict[str, Content | None], key: str = "") -> None:
    """Make the working copy hold exactly base + ``made``; untouched files keep their times."""
    state = tree / APPLIED
    before = set(json.loads(state.read_text(encoding="utf-8"))["files"]) if state.is_file() else set()
    # Said first, so that an interrupted run is mended by the next.
    lock.write_atomically(state, json.dumps({"key": "", "files": sorted(before | set(made))}))
    for name in sorted(before - set(made)):
        origin = pristine / name
        if origin.is_file():
            # Written anew, not linked: make must see a fresh time.
            lock.write_if_changed(tree / name, origin.read_bytes(), mode_of(origin))
        else:
            (tree / name).unlink(missing_ok=True)
    for name, content in made.items():
        if content is None:
            (tree / name).unlink(missing_ok=True)
        else:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            lock.write_if_changed(tree / name, *content)
    lock.write_atomically(state, json.dumps({"key": key, "files": sorted(made)}))


@contextlib.contextmanager
def working_copy(series: Series, source: fetch.Source) -> Iterator[Path]:
    """A patched tree to build from, with the times of unchanged files kept.

    Builds share it; nobody changes it as long as one holds it.
    """
    pristine = fetch.pristine(source)
    if series.empty():
        yield pristine
        return
    tree = paths.sub("work") / f"{source.name}-{source.key[:12]}"
    name = f"tree-{tree.name}"
    key = series.key()
    while True:
        with lock.locked(name, shared=True):
            if _applied(tree) == key:
                yield tree
                return
        with lock.locked(name):
            if _applied(tree) == key:
                continue
            with progress.step(f"applying the {series.name} series"):
                made = result(series, pristine)
                if not tree.exists():
                    with lock.new_directory(tree) as work:
                        _link_tree(pristine, work)
                _sync(tree, pristine, made, key)


def at_step(what: Series, pristine: Path, tree: Path, upto: int, new: frozenset[str]) -> None:
    """Make ``tree`` (a folder of ours) hold the base with the first patches and these new files."""
    if not tree.exists():
        with lock.new_directory(tree) as work:
            _link_tree(pristine, work)
    _sync(tree, pristine, result(what, pristine, upto, new))


def _applied(tree: Path) -> str:
    try:
        key: str = json.loads((tree / APPLIED).read_text(encoding="utf-8"))["key"]
        return key
    except (OSError, ValueError, KeyError):
        return ""


def _link_tree(pristine: Path, work: Path) -> None:
    """Hard links: files are replaced, never written in place, so the original stays whole."""
    run.logged(
        ["cp", "-al", f"{pristine}/.", work],
        paths.log_file("link-tree"),
        f"cannot copy {pristine}",
        "check the space in the cache",
    )
