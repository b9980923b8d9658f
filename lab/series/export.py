# SPDX-License-Identifier: GPL-2.0
"""``kz series export``: a part as mails for ``git send-email``. Nothing is sent."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.build.images import jobs
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.patches import parts
from lab.patches.repo import BASE, Repo, branch_of, commit_parts, small
from lab.series import letter
from lab.series.checkpatch import Problem, checkpatch

RECIPIENTS = "recipients"
ASSISTED = "knownzero.assistedBy"


@dataclass(frozen=True)
class Exported:
    """The mails in order, and the failed checks."""

    mails: list[Path]
    problems: list[Problem]


def sender() -> dict[str, str]:
    """Name and address from git's configuration. UsageError: one is not set."""
    found = {}
    for field in ("name", "email"):
        done = run.ask(["git", "config", "--get", f"user.{field}"], paths.REPO)
        if not done.stdout.strip():
            why, fix = f"git's user.{field} is not set", f"git config --global user.{field} '…'"
            raise UsageError("the mails have no sender", why, fix)
        for role in ("AUTHOR", "COMMITTER"):
            found[f"GIT_{role}_{field.upper()}"] = done.stdout.strip()
    return found


def assisted() -> str:
    """The sender's Assisted-by, as Documentation/process/coding-assistants.rst asks for it."""
    return " ".join(run.ask(["git", "config", "--get", ASSISTED], paths.REPO).stdout.split())


def export(
    name: str,
    part_name: str,
    directory: Path,
    strict: bool = False,
    since: Path | None = None,
    base_commit: str = "",
) -> Exported:
    """Write the mails of one part into a new directory, with the sender's identity and sign-off.

    A value of ``knownzero.assistedBy`` in git's configuration is added as Assisted-by.
    ``strict``: fail without an identity, figures, or with a failed check; nothing is written then.
    ``since``: an earlier export for a range-diff. ``base_commit``: the hash of the base in the
    reader's git, 40 hex digits.
    """
    if directory.exists() and any(directory.iterdir()):
        why, fix = "old mails would mix with new ones", "name a new directory"
        raise UsageError(f"{directory} is not empty", why, fix)
    if base_commit and not re.fullmatch(r"[0-9a-f]{40}", base_commit):
        why, fix = "it is not 40 hex digits", "git rev-parse v7.3.4^{commit}"
        raise UsageError(f"Bad --base-commit {base_commit}", why, fix)
    series = parts.get(name, [part_name])
    part = series.parts[-1]
    source = fetch.obtain(name)
    pristine = fetch.pristine(source)
    words = letter.write(name, part, source)
    long = f"is longer than {letter.WIDTH} columns"
    problems = [Problem("letter", part.name, f"line {n} {long}") for n in words.wide]
    benches = sorted({letter.bench_of(metric) for metric in words.gaps})
    if words.gaps:
        gap = (
            f"no published run has {', '.join(words.gaps)}: kz bench {' '.join(benches)}, then kz "
            "publish"
        )
        problems.append(Problem("figures", part.name, gap))
        if strict:
            why, fix = gap.split(": kz")[0], f"kz bench {benches[0]}, then kz publish"
            raise LabError(f"the cover letter of {part.name} lacks figures", why, fix, 1)
    who = sender()
    earlier = sorted(since.glob("*.patch"))[1:] if since else []  # without the letter
    target = directory.absolute()
    with small(series, pristine, also=earlier) as repo, lock.new_directory(target) as work:
        commit_parts(repo, series)
        first = branch_of(series.parts[-2].name) if len(series.parts) > 1 else BASE
        # The same commits, with the sender as author and signer.
        repo.git("checkout", "-q", "-B", "export", branch_of(part.name))
        amend = "git commit -q --amend --no-edit --reset-author"
        # git writes a trailer after a sign-off of the same command.
        tags = (
            [f"{amend} --trailer {shlex.quote(f'Assisted-by: {by}')}"] if (by := assisted()) else []
        )
        repo.git("rebase", "-q", "--exec", " && ".join([*tags, f"{amend} -s"]), first, env=who)
        options = [
            "--cover-letter",
            "--thread=shallow",
            "--numbered",
            "--no-renames",
            "--abbrev=12",
        ]
        options.append(f"--base={BASE}")
        if since:
            options.append(f"--range-diff={_earlier(repo, first, since, earlier)}")
        repo.git("format-patch", "-o", str(work), *options, f"{first}..export", env=who)
        mails = sorted(work.glob("*.patch"))
        for mail in mails:
            _finish(mail, words, source, base_commit)
        with progress.step(f"checkpatch on {len(mails)} mails"):
            problems += checkpatch(series, pristine, mails[1:], jobs(), signed=True)
        people = recipients(mails, pristine, part.also)
        (work / RECIPIENTS).write_text("".join(f"{line}\n" for line in people), encoding="utf-8")
        if strict and problems:
            why = "\n".join(f"{p.check}: {p.where}: {p.text}" for p in problems)
            fix = "correct these, then export again"
            raise LabError(f"the mails of {part.name} are not ready", why, fix, 1)
    return Exported(sorted(target.glob("*.patch")), problems)


def _earlier(repo: Repo, first: str, since: Path, mails: list[Path]) -> str:
    """The range of an earlier export, applied to the same start."""
    if not mails:
        why, fix = "--since names the directory of an earlier export", "kz series export"
        raise UsageError(f"{since} holds no mails", why, fix)
    repo.git("checkout", "-q", "-B", "earlier", first)
    if (done := repo.am(mails, "--3way")).returncode:
        repo.ask("am", "--abort")
        why, fix = done.stderr.strip()[-400:], "export without --since"
        raise LabError(f"the mails in {since} do not apply", why, fix)
    return f"{first}..earlier"


def _finish(mail: Path, words: letter.Letter, source: fetch.Source, base_commit: str) -> None:
    """Fill in the letter, and the base.

    The commit of the lab's own tree means nothing to a reader.
    """
    text = mail.read_text(encoding="utf-8").replace("*** SUBJECT HERE ***", words.subject)
    text = text.replace("*** BLURB HERE ***", words.text)
    known = (
        f"base-commit: {base_commit}"
        if base_commit
        else f"base-version: {source.name} {source.version}"
    )
    mail.write_text(
        re.sub(r"^base-commit: [0-9a-f]{40}$", known, text, flags=re.MULTILINE), encoding="utf-8"
    )


def recipients(mails: list[Path], pristine: Path, also: Sequence[str] = ()) -> list[str]:
    """Addresses of get_maintainer.pl, then the maintainers of further sections of MAINTAINERS."""
    script = pristine / "scripts" / "get_maintainer.pl"
    if not script.is_file() or len(mails) < 2:
        return []
    with progress.step(f"asking MAINTAINERS about {len(mails) - 1} mails"):
        options = ["--no-git", "--no-git-fallback", "--no-rolestats", "--roles"]
        what, fix = "scripts/get_maintainer.pl failed", "run it on the mails and read its message"
        text = run.output(["perl", script, *options, *mails[1:]], what, fix, cwd=pristine)
    people = [line for line in text.splitlines() if "@" in line]
    listed = (pristine / "MAINTAINERS").read_text(encoding="utf-8")
    for section in also:
        for person in maintainers(listed, section):
            address = person[person.find("<") :]
            if not any(address in line for line in people):
                people.append(f"{person} (maintainer:{section})")
    return people


def maintainers(listed: str, section: str) -> list[str]:
    """The M: lines of a section. LabError: MAINTAINERS has no such section."""
    _, found, rest = f"\n{listed}".partition(f"\n{section}\n")
    if not found:
        why, fix = "it has no such section", "correct `also` in parts.toml"
        raise LabError(f"MAINTAINERS: {section}", why, fix)
    people = re.findall(r"^M:\s+(.*\S)", rest.partition("\n\n")[0], re.MULTILINE)
    # A mail header quotes a name with punctuation, such as parentheses.
    return [re.sub(r'^([^"<]*[^\w\s"<-][^"<]*?) <', r'"\1" <', person) for person in people]
