# SPDX-License-Identifier: GPL-2.0
"""A series on plain files: what it makes of a source, and working copies to build from."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.machine import fetch
from lab.patches.parts import Series
from lab.patches.repo import BASE, apply, mode_of, small

STATE = ".knownzero-applied"
BARE = "no patches"  # the key of such a tree
Changes = dict[str, tuple[bytes, int] | None]  # bytes and mode of files by name; None: deleted


def result(series: Series, pristine: Path, patches: Sequence[Path] | None = None) -> Changes:
    """The content of each file that the patches (by default all) change."""
    with small(series, pristine) as repo:
        apply(repo, series, series.patches() if patches is None else patches)
        made: Changes = {}
        for name in repo.git("diff", "--name-only", "--no-renames", f"{BASE}..HEAD").splitlines():
            path = repo.path / name
            made[name] = (path.read_bytes(), mode_of(path)) if path.is_file() else None
        return made


def _sync(tree: Path, pristine: Path, made: Changes, key: str = "") -> None:
    """Make the working copy hold exactly base + ``made``; unchanged files keep their times."""
    state = tree / STATE
    before = (
        set(json.loads(state.read_text(encoding="utf-8"))["files"]) if state.is_file() else set()
    )
    # Written first: the next run repairs an interrupted one.
    lock.write_atomically(state, json.dumps({"key": "", "files": sorted(before | set(made))}))
    base: Changes = {}
    for name in before - set(made):
        origin = pristine / name
        base[name] = (origin.read_bytes(), mode_of(origin)) if origin.is_file() else None
    for name, content in (base | made).items():
        if content is None:
            (tree / name).unlink(missing_ok=True)
        else:
            # A new file, not a link: make needs a new time.
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            lock.write_if_changed(tree / name, *content)
    lock.write_atomically(state, json.dumps({"key": key, "files": sorted(made)}))


@contextlib.contextmanager
def working_copy(series: Series, source: fetch.Source, bare: bool = False) -> Iterator[Path]:
    """A patched tree that builds share: it does not change while one holds it.

    Unchanged files keep their times. ``bare``: the same tree without the patches, so that ccache
    has what both have in common.
    """
    pristine = fetch.pristine(source)
    if not series.patches():
        yield pristine
        return
    # One for all sets of parts: from one to the next, few files change.
    tree = paths.sub("work") / f"{source.name}-{source.key[:12]}{series.suffix}"
    name = f"tree-{tree.name}"
    key = BARE if bare else series.key()
    while True:
        with lock.locked(name, shared=True):
            if _applied(tree) == key:
                yield tree
                return
        with lock.locked(name):
            if _applied(tree) == key:
                continue
            with progress.step(f"applying the {series.name} series"):
                made = {} if bare else result(series, pristine)
                _ensure(tree, pristine)
                _sync(tree, pristine, made, key)


def at_patch(series: Series, pristine: Path, tree: Path, patches: Sequence[Path]) -> None:
    """Make ``tree`` hold the base with these patches."""
    _ensure(tree, pristine)
    _sync(tree, pristine, result(series, pristine, patches))


def _ensure(tree: Path, pristine: Path) -> None:
    if tree.exists():
        return
    with lock.new_directory(tree) as work:
        # Hard links: files are replaced, never written in place.
        argv: run.Argv = ["cp", "-al", f"{pristine}/.", work]
        run.logged(
            argv, paths.log_file("link-tree"), f"cannot copy {pristine}", "free space in the cache"
        )


def _applied(tree: Path) -> str:
    try:
        return str(json.loads((tree / STATE).read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError):
        return ""
