# SPDX-License-Identifier: GPL-2.0
"""Git trees of a series, and the way back: ``kz tree`` and ``kz series save``."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import UsageError
from lab.machine import fetch
from lab.patches import parts as parts_of
from lab.patches.parts import Part, Series
from lab.patches.repo import (
    BASE,
    BRANCH,
    Repo,
    branch_of,
    commit_all,
    commit_parts,
    formatted,
    ranges,
    small,
)

APPLIED = "refs/knownzero/applied"
PREVIOUS = "refs/knownzero/previous"
KEY = "knownzero.series"
# A rebase moves the branches of the parts along.
SETTINGS = {"rebase.updateRefs": "true", "rebase.autosquash": "true"}
SETTINGS |= {"gc.auto": "0", "core.looseCompression": "1"}


def default_path(name: str) -> Path:
    older = f"-{parts_of.older()}" if name == "linux" and parts_of.older() else ""
    return paths.cache() / "tree" / f"{name}{older}"


def opened(path: Path) -> Repo:
    """A tree of the user; UsageError when it is none."""
    if not (path / ".git").exists():
        why, fix = "it has no .git", "`kz tree` makes one; --path names another"
        raise UsageError(f"{path} is not a git tree", why, fix)
    return Repo(path)


def unsaved(repo: Repo, series: Series) -> dict[Path, bytes | None]:
    """Files under parts/ that saving the tree would write (content) or delete (None)."""
    changes: dict[Path, bytes | None] = {}
    for part, patches in _in_order(repo, series).items():
        wanted = {part.root / name: data for name, data in patches.items()}
        if patches:
            wanted[part.root / "series"] = "".join(f"{name}\n" for name in patches).encode()
        present = {*part.root.glob("*.patch"), *part.root.glob("series")}
        changes |= {
            p: data for p, data in wanted.items() if not p.is_file() or p.read_bytes() != data
        }
        changes |= dict.fromkeys(sorted(present - set(wanted)))
    return changes


def _in_order(repo: Repo, series: Series) -> dict[Part, dict[str, bytes]]:
    """The patches of a tree. Those of some parts are written as they are among all parts."""
    found = {part: formatted(repo, first, last) for part, first, last in ranges(repo, series)}
    if len(found) == len(series.parts):
        return found
    with tempfile.TemporaryDirectory() as folder:
        moved = []
        for part in series.parts:
            root = Path(folder) / part.name if part in found else part.root
            if part in found:
                root.mkdir()
                (root / "series").write_text(
                    "".join(f"{name}\n" for name in found[part]), encoding="utf-8"
                )
                for name, data in found[part].items():
                    (root / name).write_bytes(data)
            moved.append(replace(part, root=root))
        whole = replace(series, parts=tuple(moved))
        with small(whole, fetch.pristine(fetch.obtain(series.name))) as again:
            # The objects of the tree are the common ancestors of a merge.
            objects = repo.git("rev-parse", "--path-format=absolute", "--git-path", "objects")
            (again.path / ".git/objects/info/alternates").write_text(
                f"{objects}\n", encoding="utf-8"
            )
            try:
                commit_parts(again, whole, "--3way")
            except UsageError as error:
                fix = (
                    f"make the change in a tree of all parts (`kz tree {series.name}` without "
                    "--parts)"
                )
                what = f"the tree's parts do not fit the others: {error.what}"
                raise UsageError(what, error.why, fix) from None
            return {
                part: formatted(again, a, b)
                for part, a, b in ranges(again, series)
                if part in found
            }


def save(series: Series, path: Path) -> list[str]:
    """Write a tree's commits back into their parts; returns the changed files.

    UsageError, and nothing written: the tree has uncommitted changes, or its branches are out of
    order.
    """
    repo = opened(path)
    if dirty := repo.git("status", "--porcelain", "--untracked-files=no"):
        why, fix = "\n".join(dirty.splitlines()[:8]), "git commit, then save again"
        raise UsageError(f"{path} has uncommitted changes", why, fix)
    with lock.locked(_lock(series.name, path)):  # not in the middle of kz tree
        changes = unsaved(repo, series)
    for file, data in changes.items():
        if data is None:
            file.unlink()
        else:
            lock.write_atomically(file, data)
    repo.git("update-ref", APPLIED, "HEAD")
    present = [part.name for part in series.parts if repo.find(branch_of(part.name))]
    repo.git("config", KEY, parts_of.get(series.name, present).key())
    return sorted(str(file.relative_to(series.root)) for file in changes)


def _lock(name: str, path: Path) -> str:
    return f"git-{name}-{path.name}"


def make(name: str, path: Path | None, force: bool = False, chosen: Iterable[str] = ()) -> Path:
    """Make the git tree of ``linux`` or ``qemu``, or bring it up to the series; returns its path.

    ``chosen``: these parts and what they stand on instead of all. Commits that are not saved stay,
    unless ``force`` says otherwise; then refs/knownzero/previous keeps them.
    """
    series = parts_of.get(name, chosen)
    target = (path or default_path(name)).absolute()
    with lock.locked(_lock(name, target)):
        if not target.exists() or not any(target.iterdir()):
            create(name, target, fetch.obtain(name))
        _update(opened(target), series, force)
    return target


def create(name: str, target: Path, source: fetch.Source) -> Repo:
    pristine = fetch.pristine(source)
    log = paths.log_file(f"tree-{name}")
    what = f"making a git tree of {name} {source.version}"
    with progress.step(what, log), lock.new_directory(target) as work:
        argv: list[str | Path] = ["cp", "-a", "--reflink=auto", f"{pristine}/.", work]
        run.logged(argv, log, f"cannot copy {pristine}", "free space on the disk")
        repo = Repo(work)
        repo.git("init", "-q", "-b", BRANCH)
        for name_of, value in SETTINGS.items():
            repo.git("config", name_of, value)
        commit_all(repo, f"{name} {source.version}")
    return Repo(target)


def _update(repo: Repo, series: Series, force: bool) -> None:
    head, applied, key = repo.find("HEAD"), repo.find(APPLIED), series.key()
    if applied and repo.ask("config", "--get", KEY).stdout.strip() == key and not force:
        return  # The series is the one applied: the user's work in the tree stays.
    if not force:
        if dirty := repo.git("status", "--porcelain", "--untracked-files=no"):
            why = "\n".join(dirty.splitlines()[:8])
            fix = f"commit them and `kz series save {series.name}`, or discard them with --force"
            raise UsageError(f"{repo.path} has uncommitted changes", why, fix)
        if head not in (applied, repo.find(BASE)) and (
            changes := unsaved(repo, parts_of.get(series.name))
        ):
            raise UsageError(
                f"{repo.path} has commits that are not saved, and the series has changed as well",
                "they differ in " + ", ".join(sorted(file.name for file in changes)[:8]),
                f"`kz series save {series.name} --path {repo.path}` takes the tree's side, --force "
                "the repository's",
            )
    with progress.step(f"applying the {series.name} series as commits"):
        repo.git("update-ref", PREVIOUS, head)
        repo.ask("am", "--abort")
        tip = _commits(repo, series)
        for part in parts_of.get(series.name).parts:
            if part not in series.parts:
                repo.ask("branch", "-D", branch_of(part.name))
        repo.git("reset", "-q", "--hard", tip)
        repo.git("update-ref", APPLIED, tip)
        repo.git("config", KEY, key)


def _commits(repo: Repo, series: Series) -> str:
    """Make the commits in a worktree beside.

    Files that end up unchanged keep their times, so builds stay warm.
    """
    scratch = Repo(paths.sub("work") / f".am-{repo.path.name}")
    repo.ask("worktree", "remove", "--force", str(scratch.path))
    repo.git("worktree", "prune")
    repo.git("worktree", "add", "-q", "--no-checkout", "--detach", str(scratch.path), BASE)
    try:
        # Only the files that patches change are on disk.
        lines = "".join(f"/{name}\n" for name in sorted(series.files())).encode()
        scratch.git("sparse-checkout", "set", "--no-cone", "--stdin", stdin=lines)
        scratch.git("read-tree", "-mu", "HEAD")
        # After a merge of branches, a part's patches may be for older parts below; the tree has
        # their files.
        return commit_parts(scratch, series, "--3way")
    finally:
        repo.ask("worktree", "remove", "--force", str(scratch.path))
