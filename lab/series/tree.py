# SPDX-License-Identifier: GPL-2.0
"""Git trees of a series, and the way back: ``kz tree`` and ``kz series save``."""

from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import UsageError
from lab.machine import fetch
from lab.patches import parts
from lab.patches.parts import Series
from lab.patches.repo import BASE, BRANCH, Repo, commit_all, commit_parts, formatted, ranges

APPLIED = "refs/knownzero/applied"
PREVIOUS = "refs/knownzero/previous"
KEY = "knownzero.series"
# A rebase moves the branches of the parts along.
SETTINGS = {"rebase.updateRefs": "true", "rebase.autosquash": "true"}
SETTINGS |= {"gc.auto": "0", "core.looseCompression": "1"}


def default_path(name: str) -> Path:
    older = f"-{parts.older()}" if name == "linux" and parts.older() else ""
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
    for part, first, last in ranges(repo, series):
        patches = formatted(repo, first, last)
        wanted = {part.root / name: data for name, data in patches.items()}
        if patches:
            wanted[part.root / "series"] = "".join(f"{name}\n" for name in patches).encode()
        present = {*part.root.glob("*.patch"), *part.root.glob("series")}
        changes |= {
            p: data for p, data in wanted.items() if not p.is_file() or p.read_bytes() != data
        }
        changes |= dict.fromkeys(sorted(present - set(wanted)))
    return changes


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
    repo.git("config", KEY, series.key())
    return sorted(str(file.relative_to(series.root)) for file in changes)


def _lock(name: str, path: Path) -> str:
    return f"git-{name}-{path.name}"


def make(name: str, path: Path | None, force: bool = False) -> Path:
    """Make the git tree of ``linux`` or ``qemu``, or bring it up to the series; returns its path.

    Commits that are not saved stay, unless ``force`` says otherwise; then refs/knownzero/previous
    keeps them.
    """
    series = parts.get(name)
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
        if head not in (applied, repo.find(BASE)) and (changes := unsaved(repo, series)):
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
