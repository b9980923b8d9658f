# SPDX-License-Identifier: GPL-2.0
"""A series as git commits: branch part/NAME marks the last commit of each part."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.core import paths, run
from lab.core.errors import UsageError
from lab.patches.parts import Part, Series, subject, touched

BASE = "base"
BRANCH = "knownzero"
IDENTITY = ("knownzero", "knownzero@localhost")
EPOCH = "1000000000 +0000"

# Configuration of a user's tree that would change what git am and git commit do there.
PINNED = (
    *(
        "core.attributesFile=/dev/null",
        "core.autocrlf=false",
        "core.hooksPath=/dev/null",
        "gc.auto=0",
    ),
    *("apply.whitespace=nowarn", "commit.gpgSign=false", "am.threeWay=false", "am.keepcr=false"),
    *("rerere.enabled=false", "advice.mergeConflict=false"),
)
STAT = ("--stat=72", "--stat-graph-width=20")
FORMAT = ("--zero-commit", "--no-signature", "--full-index", "-N", "--no-renames", *STAT)


def git_environment(ceiling: Path) -> dict[str, str]:
    """An environment in which git ignores the user's and the machine's configuration."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    kept |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}
    return kept | {"GIT_CEILING_DIRECTORIES": str(ceiling)}


def mode_of(path: Path) -> int:
    """The mode git keeps: 755 for executables, 644 otherwise."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


class Repo:
    """A git repository in which git runs with a pinned configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def argv(self, *arguments: str) -> list[str]:
        return [
            "git",
            "-C",
            str(self.path),
            *[word for item in PINNED for word in ("-c", item)],
            *arguments,
        ]

    def env(self, more: run.Env = None) -> dict[str, str]:
        """The environment of git: a fixed identity and nothing of the user's configuration."""
        name, mail = IDENTITY
        who = {f"GIT_{role}_NAME": name for role in ("COMMITTER", "AUTHOR")}
        who |= {f"GIT_{role}_EMAIL": mail for role in ("COMMITTER", "AUTHOR")}
        return {**git_environment(self.path.parent), **who, **(more or {})}

    def git(self, *arguments: str, stdin: bytes | None = None, env: run.Env = None) -> str:
        """Run git and return its stdout without the last newline; a failure is an error."""
        what = f"git {arguments[0]} failed in {self.path}"
        fix = "read the message of git; `kz tree` makes a new tree if this one cannot be repaired"
        return run.output(
            self.argv(*arguments), what, fix, env=self.env(env), stdin=stdin
        ).removesuffix("\n")

    def ask(self, *arguments: str, env: run.Env = None) -> run.Done:
        return run.ask(self.argv(*arguments), env=self.env(env))

    def find(self, name: str) -> str:
        """The commit of a name, or the empty string."""
        return self.ask("rev-parse", "-q", "--verify", f"{name}^{{commit}}").stdout.strip()

    def am(self, patches: Sequence[Path], *options: str) -> run.Done:
        """``git am`` on HEAD; equal input gives equal commits."""
        return self.ask("am", "-q", "--committer-date-is-author-date", *options, *map(str, patches))


def branch_of(part: str) -> str:
    return f"part/{part}"


def apply(repo: Repo, series: Series, patches: Sequence[Path], *options: str) -> None:
    """Commit patches on HEAD.

    UsageError for one that does not apply, and HEAD is the last commit before it.
    """
    done = repo.am(patches, *options) if patches else None
    if not done or done.returncode == 0:
        return
    stopped = subject(repo.ask("am", "--show-current-patch=raw").stdout.encode())
    if "--3way" not in options:
        repo.ask("am", "--abort")
    reason = [
        line for line in (done.stderr or done.stdout).splitlines() if not line.startswith("hint:")
    ]
    fix = f"change it in the tree of `kz tree {series.name}`, then `kz series save {series.name}`"
    raise UsageError(
        f"{patches[0].parent.name}: {stopped} does not apply", "\n".join(reason[-8:]), fix
    )


def commit_parts(repo: Repo, series: Series, *options: str) -> str:
    """Apply the parts as commits on HEAD, each with its branch; returns the last commit.

    See ``apply``.
    """
    for part in series.parts:
        apply(repo, series, part.patches(), *options)
        repo.git("branch", "-f", branch_of(part.name), "HEAD")
    return repo.find("HEAD")


@contextmanager
def small(series: Series, pristine: Path, also: Sequence[Path] = ()) -> Iterator[Repo]:
    """A temporary tree with only the files that the series, or ``also`` these patches, change.

    Exact and quick.
    """
    names = series.files() | {name for patch in also for name in touched(patch.read_bytes())}
    folders = {parent for n in names for parent in Path(n).parents}
    names |= {str(folder / ".gitattributes") for folder in folders}
    with tempfile.TemporaryDirectory(prefix=".small-", dir=paths.sub("work")) as folder:
        repo = Repo(Path(folder) / "tree")
        repo.path.mkdir()
        repo.git("init", "-q", "-b", BRANCH)
        for name in sorted(names):
            source, target = pristine / name, repo.path / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
                target.chmod(mode_of(source))
        commit_all(repo, "base")
        yield repo


def commit_all(repo: Repo, message: str) -> None:
    """Commit all files and tag the commit as the base."""
    repo.git("add", "-A", "-f", ".")
    dates = {"GIT_AUTHOR_DATE": EPOCH, "GIT_COMMITTER_DATE": EPOCH}
    repo.git("commit", "-q", "--allow-empty", "-m", message, env=dates)
    repo.git("tag", "-f", BASE)


def ranges(repo: Repo, series: Series) -> list[tuple[Part, str, str]]:
    """(part, first excluded commit, last commit) of each part. The last part ends at HEAD.

    UsageError: HEAD does not stand on ``base`` in a straight line, a branch is missing, or the
    branches are not in the recorded order.
    """
    head = repo.find("HEAD")
    if not repo.find(BASE):
        why, fix = "it marks the unpatched source", f"git tag {BASE} COMMIT, or `kz tree`"
        raise UsageError(f"{repo.path} has no tag {BASE}", why, fix)
    if repo.git("rev-list", "--merges", f"{BASE}..{head}"):
        why, fix = "a series is a straight line", f"git rebase {BASE}"
        raise UsageError(f"{repo.path} has merge commits", why, fix)
    if repo.git("merge-base", BASE, head) != repo.find(BASE):
        why, fix = f"{BASE} is not an ancestor of HEAD", f"git rebase {BASE}"
        raise UsageError(f"{repo.path} does not stand on its base", why, fix)
    found, before = [], repo.find(BASE)
    for part in series.parts:
        if not (end := repo.find(branch_of(part.name))):
            why = "it marks the last commit of that part"
            fix = f"git branch {branch_of(part.name)} COMMIT, or `kz tree` makes a new tree"
            raise UsageError(f"{repo.path} has no branch {branch_of(part.name)}", why, fix)
        end = head if part is series.parts[-1] else end
        pairs = (before, end), (end, head)
        if any(repo.ask("merge-base", "--is-ancestor", *pair).returncode for pair in pairs):
            what = f"branch {branch_of(part.name)} is not between the part before it and HEAD"
            why = f"it is at {end[:12]}; a rebase without --update-refs leaves it behind"
            fix = f"git branch -f {branch_of(part.name)} COMMIT, with the last commit of that part"
            raise UsageError(what, why, fix)
        found.append((part, before, end))
        before = end
    return found


def formatted(repo: Repo, first: str, last: str) -> dict[str, bytes]:
    """The commits of a range as mail patches, by file name.

    The tree's own configuration does not count.
    """
    ends = f"{repo.find(first)}..{repo.find(last)}"
    objects = repo.git("rev-parse", "--path-format=absolute", "--git-path", "objects")
    with tempfile.TemporaryDirectory() as folder:
        plain = {"GIT_DIR": f"{folder}/git", "GIT_WORK_TREE": str(repo.path)}
        plain["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = objects
        repo.git("init", "-q", env=plain)
        repo.git("format-patch", *FORMAT, "-o", f"{folder}/mails", ends, env=plain)
        mails = sorted(Path(folder).glob("mails/*"))
        return {f"{mail.stem.rstrip('-')}.patch": mail.read_bytes() for mail in mails}
