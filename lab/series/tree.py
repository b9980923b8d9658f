# SPDX-License-Identifier: GPL-2.0
"""The series as git commits: trees to work in, and the way back into the repository."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.series import series

BASE = "base"
BRANCH = "knownzero"
NOTES = "refs/notes/knownzero"
APPLIED = "refs/knownzero/applied"
PREVIOUS = "refs/knownzero/previous"
NEW_FILES = "New files of the series"
IDENTITY = ("knownzero", "knownzero@localhost")
EPOCH = "1000000000 +0000"  # dates of commits that nobody wrote

# What a user's or a repository's configuration must not change in the patches we keep.
PINNED = (
    "diff.algorithm=myers", "diff.context=3", "diff.interHunkContext=0", "diff.noprefix=false", "diff.mnemonicPrefix=false",
    "diff.srcPrefix=a/", "diff.dstPrefix=b/", "diff.indentHeuristic=true", "diff.renames=false",
    "diff.suppressBlankEmpty=false", "core.quotePath=true", "core.abbrev=40", "core.autocrlf=false", "core.fileMode=true",
    "core.attributesFile=/dev/null", "core.hooksPath=/dev/null", "core.fsmonitor=false",
    "format.signature=", "format.noprefix=false", "format.encodeEmailHeaders=true", "format.forceInBodyFrom=false", "format.from=false",
    "format.useAutoBase=false", "format.subjectPrefix=PATCH", "format.suffix=.patch", "format.signOff=false", "format.notes=false",
    "i18n.commitEncoding=utf-8", "i18n.logOutputEncoding=utf-8", "apply.whitespace=nowarn", "commit.gpgSign=false",
)  # fmt: skip
FORMAT = (
    "-O/dev/null",
    "--zero-commit",
    "--no-signature",
    "--full-index",
    "-N",
    "--no-renames",
    "--stat=72",
    "--no-cover-letter",
    "--no-attach",
    "--no-thread",
    "--no-ext-diff",
    "--no-textconv",
    "--no-base",
    "--no-notes",
)


class Repo:
    """A git repository in which we run git with everything pinned."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def argv(self, *arguments: str) -> list[str]:
        """A git command line with the pinned configuration."""
        pinned = [word for item in PINNED for word in ("-c", item)]
        return ["git", "-C", str(self.path), *pinned, *arguments]

    def git(self, *arguments: str, stdin: bytes | None = None, env: Mapping[str, str] | None = None) -> str:
        """Run git and return its stdout without the last newline."""
        name, mail = IDENTITY
        identity = {
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": mail,
            "GIT_AUTHOR_NAME": name,
            "GIT_AUTHOR_EMAIL": mail,
        }
        environment = {**series.git_environment(self.path.parent), **identity, **(env or {})}
        return run.output(
            self.argv(*arguments),
            f"git {arguments[0]} failed in {self.path}",
            "look at the tree with git; if it is beyond repair, remove it and make it again with `kz tree`",
            env=environment,
            stdin=stdin,
        ).removesuffix("\n")

    def find(self, name: str) -> str:
        """The commit a name stands for, or the empty string."""
        argv = self.argv("rev-parse", "-q", "--verify", f"{name}^{{commit}}")
        done = subprocess.run(
            argv, env=series.git_environment(self.path.parent), capture_output=True, text=True, check=False
        )
        return done.stdout.strip()


@dataclass
class Kept:
    """A series as files to be kept: patches by file name in order, and new files."""

    patches: dict[str, bytes]
    new: dict[str, series.Content]


# From the repository into git.


def mail_parts(repo: Repo, patch: Path) -> tuple[dict[str, str], bytes]:
    """Author variables for git, and the commit message, of a patch in mail form."""
    with tempfile.TemporaryDirectory() as folder:
        message = Path(folder) / "message"
        info = repo.git(
            "mailinfo",
            "--encoding=UTF-8",
            str(message),
            str(Path(folder) / "patch"),
            stdin=patch.read_bytes(),
        )
        text = message.read_bytes()
    fields = dict(re.findall(r"^(Author|Email|Subject|Date): (.*)$", info, re.MULTILINE))
    if not {"Author", "Email", "Subject", "Date"} <= set(fields):
        raise LabError(
            f"{patch.name} is not a patch in mail form",
            "it lacks From, Date or Subject",
            "write it with git format-patch",
        )
    who = {
        "GIT_AUTHOR_NAME": fields["Author"],
        "GIT_AUTHOR_EMAIL": fields["Email"],
        "GIT_AUTHOR_DATE": fields["Date"],
    }
    body = (fields["Subject"].encode() + b"\n\n" + text.strip(b"\n")).rstrip(b"\n") + b"\n"
    return who, body


@contextmanager
def _index(repo: Repo) -> Iterator[dict[str, str]]:
    """A scratch index, so that neither the real one nor the files are touched."""
    with tempfile.TemporaryDirectory() as folder:
        yield {"GIT_INDEX_FILE": str(Path(folder) / "index")}


def _add(repo: Repo, env: Mapping[str, str], files: Mapping[str, series.Content]) -> None:
    lines = []
    for name, (data, mode) in sorted(files.items()):
        blob = repo.git("hash-object", "-w", "--stdin", "--no-filters", stdin=data)
        lines.append(f"{'100755' if mode & 0o100 else '100644'} {blob}\t{name}\n")
    repo.git("update-index", "--add", "--index-info", stdin="".join(lines).encode(), env=env)


def new_content(what: series.Series) -> dict[str, series.Content]:
    """The new files of a series as they are in the repository."""
    return {
        n: ((what.new_root / n).read_bytes(), series.mode_of(what.new_root / n)) for n in what.new_files()
    }


def number_of(patch: str) -> int:
    """The number in a patch's file name."""
    match = re.match(r"(\d{4})-", patch)
    if not match:
        raise LabError(
            f"{patch} has no number",
            "patches are called NNNN-subject.patch",
            "rename it, in patches/series too",
        )
    return int(match[1])


def commit_series(repo: Repo, base: str, what: series.Series, homes: Mapping[str, int] | None = None) -> str:
    """Turn the series into commits on ``base``, without touching branch, index or files.

    New files come first, in one commit; ``homes`` instead says with which patch each comes.
    Returns the last commit; equal input gives equal commits.
    """
    fresh = new_content(what)
    for name in fresh:
        if repo.git("ls-tree", base, "--", name):
            raise LabError(
                f"new file {name} exists already in {what.name}",
                "new/ may only hold files the base lacks",
                "make it a patch",
            )
    with _index(repo) as env:
        repo.git("read-tree", base, env=env)
        tip = base
        date = {"GIT_AUTHOR_DATE": EPOCH, "GIT_COMMITTER_DATE": EPOCH}
        if fresh and homes is None:
            _add(repo, env, fresh)
            tree = repo.git("write-tree", env=env)
            tip = repo.git(
                "commit-tree", tree, "-p", tip, stdin=f"{NEW_FILES}\n".encode(), env={**env, **date}
            )
        for position, patch in enumerate(what.patches()):
            if homes is not None:
                _add(repo, env, {n: c for n, c in fresh.items() if homes[n] == position})
            who, message = mail_parts(repo, patch)
            try:
                repo.git("apply", "--cached", "--whitespace=nowarn", str(patch), env=env)
            except LabError as error:
                raise LabError(
                    f"{patch.name} does not fit {what.name}",
                    error.why,
                    "mend it in a tree of the version it was made for, then `kz series save`",
                ) from None
            tree = repo.git("write-tree", env=env)
            tip = repo.git(
                "commit-tree", tree, "-p", tip, stdin=message, env={**env, **who, "GIT_COMMITTER_DATE": EPOCH}
            )
            repo.git(
                "notes", f"--ref={NOTES}", "add", "-f", "-m", f"{number_of(patch.name):04d}", tip, env=date
            )
        return tip


# From git into the repository.


def kept(repo: Repo, base: str, head: str, known: Mapping[str, int]) -> Kept:
    """What a tree's commits look like as a series.

    Files that ``base`` lacks become new files with their last content; what commits do to
    the others becomes patches. ``known`` maps subjects to numbers used before.
    """
    if repo.git("rev-list", "--merges", f"{base}..{head}"):
        raise LabError(
            "the tree has merges",
            "a series is a straight line of commits",
            f"rebase it onto {BASE}: git rebase {BASE}",
        )
    if repo.git("merge-base", base, head) != repo.find(base):
        raise LabError(
            "the tree does not stand on its base",
            f"{head} does not contain the commit {BASE}",
            f"rebase it onto {BASE}",
        )
    changed = repo.git("diff-tree", "-r", "-z", "--no-renames", "--name-status", base, head).split("\0")
    new: dict[str, series.Content] = {}
    for status, name in zip(changed[0::2], changed[1::2], strict=False):
        if status == "A":
            mode = 0o755 if repo.git("ls-tree", head, "--", name).startswith("100755") else 0o644
            new[name] = (_blob(repo, head, name), mode)
    commits = repo.git("rev-list", "--reverse", f"{base}..{head}").split()
    wanted = []
    for commit in commits:
        names = repo.git(
            "diff-tree", "-r", "-z", "--no-renames", "--no-commit-id", "--name-only", commit
        ).split("\0")
        existing = [n for n in names if n and repo.git("ls-tree", base, "--", n)]
        if existing:
            wanted.append((commit, existing))
    numbers = _numbers(repo, [commit for commit, _ in wanted], known)
    patches: dict[str, bytes] = {}
    for (commit, names), number in zip(wanted, numbers, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            repo.git(
                "format-patch", *FORMAT, f"--start-number={number}", "-o", folder, "-1", commit, "--", *names
            )
            made = next(Path(folder).iterdir())
            patches[made.stem.rstrip("-") + ".patch"] = made.read_bytes()
    return Kept(patches, new)


def _blob(repo: Repo, commit: str, name: str) -> bytes:
    argv = repo.argv("cat-file", "blob", f"{commit}:{name}")
    return subprocess.run(
        argv, env=series.git_environment(repo.path.parent), capture_output=True, check=True
    ).stdout


def _note(repo: Repo, commit: str) -> int | None:
    argv = repo.argv("notes", f"--ref={NOTES}", "show", commit)
    done = subprocess.run(
        argv, env=series.git_environment(repo.path.parent), capture_output=True, text=True, check=False
    )
    match = re.match(r"\s*(\d{1,4})\b", done.stdout) if done.returncode == 0 else None
    return int(match[1]) if match else None


def _numbers(repo: Repo, commits: list[str], known: Mapping[str, int]) -> list[int]:
    """A number for each commit: its note, the one its subject had, or the next in the band."""
    found: list[int] = []
    for commit in commits:
        subject = repo.git("show", "-s", "--format=%s", commit)
        number = _note(repo, commit)
        if number is None:
            number = known.get(subject)
        before = found[-1] if found else 0
        if number is None or number <= before:
            number = before + 1
            progress.note(
                f"{subject!r} gets number {number:04d}; to change it: git notes --ref=knownzero add -f -m NNNN {commit[:12]}"
            )
        if number > 9999:
            raise LabError(
                "no patch number is left",
                f"{subject!r} would get {number}",
                "give the commits numbers with git notes --ref=knownzero",
            )
        found.append(number)
    return found


def known_numbers(what: series.Series) -> dict[str, int]:
    """Subject -> number of the patches that are in the repository."""
    found = {}
    for patch in what.patches():
        head = patch.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        match = re.search(r"^Subject: (?:\[[^]]*\] )?(.*(?:\n[ \t].*)*)", head, re.MULTILINE)
        if match:
            found[re.sub(r"\n[ \t]+", " ", match[1])] = number_of(patch.name)
    return found


def series_file(patches: Mapping[str, bytes]) -> bytes:
    """The list of patches, as it is kept."""
    return "".join(f"{name}\n" for name in patches).encode()


def differences(what: series.Series, now: Kept) -> list[str]:
    """The files of the repository that saving would change."""
    target = _files(what, now)
    changed = [
        str(p.relative_to(what.root))
        for p, (data, mode) in target.items()
        if not p.is_file() or p.read_bytes() != data or series.mode_of(p) != mode
    ]
    return sorted(changed + [str(p.relative_to(what.root)) for p in _present(what) if p not in target])


def _files(what: series.Series, now: Kept) -> dict[Path, series.Content]:
    files: dict[Path, series.Content] = {what.patch_root / n: (d, 0o644) for n, d in now.patches.items()}
    if now.patches or (what.patch_root / "series").exists():
        files[what.patch_root / "series"] = (series_file(now.patches), 0o644)
    files |= {what.new_root / n: c for n, c in now.new.items()}
    return files


def _present(what: series.Series) -> list[Path]:
    found = list(what.patch_root.glob("*.patch")) if what.patch_root.is_dir() else []
    return found + [what.new_root / n for n in what.new_files()]


def save(what: series.Series, path: Path) -> list[str]:
    """Write a tree's commits into the repository; returns the files that changed."""
    repo = _open(path)
    dirty = repo.git("status", "--porcelain", "--untracked-files=no")
    if dirty:
        raise LabError(
            "the tree has changes that are not committed",
            "\n".join(dirty.splitlines()[:8]),
            "commit them (git commit), then save again",
        )
    now = kept(repo, BASE, "HEAD", known_numbers(what))
    changed = differences(what, now)
    files = _files(what, now)
    for file, (data, mode) in files.items():
        lock.write_if_changed(file, data, mode)
    for file in _present(what):
        if file not in files:
            file.unlink()
            for parent in file.parents:
                if parent == what.root or any(parent.iterdir()):
                    break
                parent.rmdir()
    head = repo.find("HEAD")
    repo.git("update-ref", APPLIED, head)
    repo.git("config", "knownzero.series", what.key())
    return changed


# Trees to work in.


def default_path(name: str) -> Path:
    """Where ``kz tree`` makes a tree unless told otherwise."""
    return paths.cache() / "tree" / name


def _open(path: Path) -> Repo:
    repo = Repo(path)
    if not (path / ".git").exists():
        raise UsageError(
            f"{path} is no git tree", "it has no .git", "make one with `kz tree`, or name it with --path"
        )
    if not repo.find(BASE):
        raise UsageError(
            f"{path} has no tag {BASE}",
            f"the tag {BASE} marks the unpatched source",
            f"git tag {BASE} <commit of the unpatched source>",
        )
    return repo


def make(name: str, path: Path | None, force: bool = False) -> Path:
    """Make the git tree of ``linux`` or ``qemu``, or bring it up to the series; returns its path.

    Work that was not saved is never thrown away, unless ``force`` says so (it stays
    reachable as refs/knownzero/previous).
    """
    what = series.get(name)
    target = (path or default_path(name)).absolute()
    with lock.locked(f"git-{name}-{target.name}"):
        if not target.exists() or not any(target.iterdir()):
            _create(name, target)
        repo = _open(target)
        _update(repo, what, force)
    return target


def _create(name: str, target: Path) -> None:
    source = fetch.obtain(name)
    pristine = fetch.pristine(source)
    log = paths.log_file(f"tree-{name}")
    with (
        progress.step(f"making a git tree of {name} {source.version}", log),
        lock.new_directory(target) as work,
    ):
        run.logged(
            ["cp", "-a", "--reflink=auto", f"{pristine}/.", work],
            log,
            f"cannot copy {pristine}",
            "check the space on the disk",
        )
        repo = Repo(work)
        repo.git("init", "-q", "-b", BRANCH)
        for setting in (
            "gc.auto=0",
            "core.looseCompression=1",
            f"notes.rewriteRef={NOTES}",
            f"knownzero.source={source.key}",
        ):
            repo.git("config", *setting.split("=", 1))
        repo.git("add", "-A", "-f", ".")
        repo.git(
            "commit",
            "-q",
            "-m",
            f"{name} {source.version}",
            env={"GIT_AUTHOR_DATE": EPOCH, "GIT_COMMITTER_DATE": EPOCH},
        )
        repo.git("tag", BASE)


def _update(repo: Repo, what: series.Series, force: bool) -> None:
    head = repo.find("HEAD")
    applied = repo.find(APPLIED)
    key = what.key()
    if applied and _config(repo, "knownzero.series") == key and not force:
        return  # nothing new here; whatever the user does in the tree is theirs
    if not force:
        dirty = repo.git("status", "--porcelain", "--untracked-files=no")
        if dirty:
            raise LabError(
                f"{repo.path} has changes that are not committed",
                "\n".join(dirty.splitlines()[:8]),
                f"commit them and `kz series save {what.name}`, or throw them away with --force",
            )
        if head not in (applied, repo.find(BASE)):
            unsaved = differences(what, kept(repo, BASE, "HEAD", known_numbers(what)))
            if unsaved:
                raise LabError(
                    f"{repo.path} has commits that are not saved, and the series has changed as well",
                    "they differ in: " + ", ".join(unsaved[:8]),
                    f"`kz series save {what.name} --path {repo.path}` keeps the tree's side, --force takes the repository's",
                )
    with progress.step(f"applying the {what.name} series as commits"):
        tip = commit_series(repo, BASE, what)
        if tip != head:
            repo.git("update-ref", PREVIOUS, head)
            # Only files that differ are written, so that a build in the tree stays warm.
            repo.git("reset", "-q", "--hard", tip)
        repo.git("update-ref", APPLIED, tip)
        repo.git("config", "knownzero.series", key)


def _config(repo: Repo, name: str) -> str:
    argv = repo.argv("config", "--get", name)
    return subprocess.run(
        argv, env=series.git_environment(repo.path.parent), capture_output=True, text=True, check=False
    ).stdout.strip()


@contextmanager
def small(what: series.Series, pristine: Path) -> Iterator[Repo]:
    """A throw-away tree with only the files the series touches: quick, and exact for patches."""
    names = {n for patch in what.patches() for n in series.touched(patch.read_bytes())}
    folders = {str(parent) for n in names for parent in Path(n).parents}
    names |= {os.path.normpath(f"{folder}/.gitattributes") for folder in folders | {"."}}
    with tempfile.TemporaryDirectory(prefix=".small-", dir=paths.sub("work")) as folder:
        repo = Repo(Path(folder) / "tree")
        repo.path.mkdir()
        repo.git("init", "-q", "-b", BRANCH)
        present = {
            n: ((pristine / n).read_bytes(), series.mode_of(pristine / n))
            for n in sorted(names)
            if (pristine / n).is_file()
        }
        with _index(repo) as env:
            repo.git("read-tree", "--empty", env=env)
            _add(repo, env, present)
            tree = repo.git("write-tree", env=env)
        date = {"GIT_AUTHOR_DATE": EPOCH, "GIT_COMMITTER_DATE": EPOCH}
        commit = repo.git("commit-tree", tree, stdin=b"base\n", env=date)
        repo.git("tag", BASE, commit)
        for name, (data, _) in present.items():
            if name.endswith(".gitattributes"):  # read from the files, not from commits
                (repo.path / name).parent.mkdir(parents=True, exist_ok=True)
                (repo.path / name).write_bytes(data)
        yield repo
