# SPDX-License-Identifier: GPL-2.0
"""A series on plain files: what it makes of a source, and working copies to build from."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import UsageError
from lab.machine import fetch
from lab.series.parts import Series, touched

STATE = ".knownzero-applied"
Content = tuple[bytes, int]  # bytes and mode


def git_environment(ceiling: Path) -> dict[str, str]:
    """An environment in which git ignores the user's and the machine's configuration."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return {
        **keep,
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(ceiling),
        "LC_ALL": "C",
    }


def mode_of(path: Path) -> int:
    """The mode git keeps: 755 for executables, 644 otherwise."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def apply_patch(patch: Path, folder: Path) -> str:
    """Apply one patch with its full context; returns the reason when it fails."""
    argv = ["git", "apply", "-p1", "--whitespace=nowarn", str(patch)]
    done = run.ask(argv, folder, git_environment(folder.parent))
    return "" if done.returncode == 0 else (done.stderr.strip() or f"git apply: exit code {done.returncode}")


def result(
    series: Series, pristine: Path, patches: Sequence[Path] | None = None
) -> dict[str, Content | None]:
    """The content of each file that the patches (by default all) change; None: deleted."""
    chosen = series.patches() if patches is None else list(patches)
    names = {name for patch in chosen for name in touched(patch.read_bytes())}
    with tempfile.TemporaryDirectory(prefix=".apply-", dir=paths.sub("work")) as folder:
        scratch = Path(folder)
        for name in names:
            if (pristine / name).is_file():
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(pristine / name, scratch / name)
        for patch in chosen:
            if reason := apply_patch(patch, scratch):
                raise UsageError(
                    f"{patch.parent.name}/{patch.name} does not apply to {series.name} {fetch.tree_version(series.name, pristine)}",
                    reason,
                    f"change it in the tree of `kz tree {series.name}`, then `kz series save {series.name}`; "
                    f"`kz series rebase {series.name}` is for other versions",
                )
        made: dict[str, Content | None] = {}
        for name in names:
            path = scratch / name
            made[name] = (path.read_bytes(), mode_of(path)) if path.is_file() else None
        return made


def _sync(tree: Path, pristine: Path, made: dict[str, Content | None], key: str = "") -> None:
    """Make the working copy hold exactly base + ``made``; unchanged files keep their times."""
    state = tree / STATE
    before = set(json.loads(state.read_text(encoding="utf-8"))["files"]) if state.is_file() else set()
    # Written first: the next run repairs an interrupted one.
    lock.write_atomically(state, json.dumps({"key": "", "files": sorted(before | set(made))}))
    for name in sorted(before - set(made)):
        origin = pristine / name
        if origin.is_file():
            # A new file, not a link: make needs a new time.
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
    """A patched tree to build from; unchanged files keep their times.

    Builds share it. It does not change while one of them holds it.
    """
    pristine = fetch.pristine(source)
    if series.empty():
        yield pristine
        return
    subset = "" if series.whole else "-" + "-".join(part.name for part in series.parts)
    tree = paths.sub("work") / f"{source.name}-{source.key[:12]}{subset}"
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
        run.logged(
            ["cp", "-al", f"{pristine}/.", work],
            paths.log_file("link-tree"),
            f"cannot copy {pristine}",
            "free space in the cache",
        )


def _applied(tree: Path) -> str:
    try:
        return str(json.loads((tree / STATE).read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError):
        return ""
