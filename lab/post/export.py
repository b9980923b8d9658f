# SPDX-License-Identifier: GPL-2.0
"""The series as mails for a list: cover letter, threading, new files where they are first used."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.core import lock, paths
from lab.core.errors import LabError
from lab.machine import fetch
from lab.post import letter, sending
from lab.report.results import results_of
from lab.series import against, series, tree
from lab.series.checkpatch import Problem

# Says whose the files are, and uses none of them.
LISTING = "MAINTAINERS"


def lists(name: str, text: str) -> bool:
    """Whether lines of MAINTAINERS name a file, or a folder it is in."""
    listed = [line.removeprefix("F:").strip() for line in text.splitlines() if line.startswith("F:")]
    return any(name == one or (one.endswith("/") and name.startswith(one)) for one in listed)


def hooks(name: str, text: str, place: str = "") -> bool:
    """Whether added ``text`` (of the file ``place``) makes the tree use the new file ``name``."""
    path = Path(name)
    stem = re.escape(path.stem)
    if path.suffix in (".c", ".S"):
        if not path.is_relative_to(Path(place).parent):
            return False
        return bool(re.search(rf"\b{stem}\.(?:o|c)\b", text)) or (
            Path(place).name == "meson.build" and path.name in text
        )
    if path.suffix == ".h":
        includes = {name.removeprefix("include/"), path.name, re.sub(r"^arch/\w+/include/", "", name)}
        return any(re.search(rf'#\s*include\s+[<"](?:\S*/)?{re.escape(i)}[>"]', text) for i in includes)
    if path.suffix == ".rst":
        return place.startswith("Documentation/") and bool(re.search(rf"\b{stem}\b", text))
    if path.name.startswith("Kconfig"):
        return name in text or f'"{path.name}"' in text
    return False


def added(patch: bytes) -> list[tuple[str, str]]:
    """The lines a patch adds, by file."""
    found: dict[str, list[str]] = {}
    place = ""
    for line in series.diff_part(patch).decode(errors="replace").splitlines():
        if line.startswith("+++ "):
            place = line[4:].removeprefix("b/")
        elif line.startswith("+") and place:
            found.setdefault(place, []).append(line[1:])
    return [(name, "\n".join(lines)) for name, lines in found.items()]


def homes(what: series.Series) -> dict[str, int]:
    """For each new file, the position of the patch that first uses it.

    A file used by other new files comes at the latest with them. One that nothing names (an ABI
    text, a selftest) comes when MAINTAINERS lists it, with the patch of its own folder, or with the last one.
    """
    files = {n: (what.new_root / n).read_text(errors="replace") for n in what.new_files()}
    patches = [added(p.read_bytes()) for p in what.patches()]
    if not patches:
        raise LabError(
            f"the {what.name} series has no patches",
            "there is nothing that uses its new files",
            "save patches first",
        )
    found: dict[str, int] = {}
    for name in files:
        for position, changes in enumerate(patches):
            if any(hooks(name, text, place) for place, text in changes if place != LISTING):
                found[name] = position
                break
    changed = True
    while changed:
        changed = False
        for user, position in list(found.items()):
            for name in files:
                if (
                    name != user
                    and hooks(name, files[user], user)
                    and found.get(name, len(patches)) > position
                ):
                    found[name] = position
                    changed = True
    for name in files:
        if name not in found:
            listed = [i for i, changes in enumerate(patches) if lists(name, dict(changes).get(LISTING, ""))]
            if listed:
                found[name] = listed[0]
                continue
            top = name.split("/", 1)[0]
            near = [
                i
                for i, changes in enumerate(patches)
                if any(place.split("/", 1)[0] == top for place, _ in changes)
            ]
            found[name] = near[-1] if near else len(patches) - 1
    return found


def sender() -> dict[str, str]:
    """Who the cover letter is from: git's own settings of whoever runs this; empty if there are none."""
    found = {}
    for role in ("AUTHOR", "COMMITTER"):
        for part in ("name", "email"):
            done = subprocess.run(
                ["git", "config", "--get", f"user.{part}"],
                cwd=paths.REPO,
                capture_output=True,
                text=True,
                check=False,
            )
            if value := done.stdout.strip():
                found[f"GIT_{role}_{part.upper()}"] = value
    return found


@dataclass(frozen=True)
class Exported:
    """What an export made: mails in order, the letter, what to look at, and whom MAINTAINERS names."""

    mails: list[Path]
    letter: letter.Letter
    problems: list[Problem]
    recipients: list[str]


def export(name: str, directory: Path, figures: Sequence[Path] = (), ready: bool = False) -> Exported:
    """Write the mails into ``directory``.

    ``figures``: runs whose figures the letter gets; by default the newest of this series under out/. ``ready``: also
    have checkpatch read the mails, rehearse sending them, and ask MAINTAINERS whom to send them to.
    """
    what = series.get(name)
    if directory.exists() and any(directory.iterdir()):
        raise LabError(
            f"{directory} is not empty", "old mails would mix with the new ones", "name a new directory", 2
        )
    for run in figures:
        results_of(run)  # a wrong one is told before anything is fetched
    source = fetch.obtain(name)
    pristine = fetch.pristine(source)
    words = letter.write(what, source, figures, against.remembered(what))
    # What the series touches is enough for its patches, and takes no copy of the whole source.
    with tree.small(what, pristine) as repo, lock.new_directory(directory.absolute()) as work:
        tip = tree.commit_series(repo, tree.BASE, what, homes(what))
        # No base-commit: nobody else has it. The letter says in words which source it is.
        repo.git(
            "format-patch", "-o", str(work), "--cover-letter", "--thread=shallow", "--numbered", "--no-renames",
            "--no-base", "--no-notes", "--no-ext-diff", f"{tree.BASE}..{tip}", env=sender(),
        )  # fmt: skip
        first = next(work.glob("0000-*"))
        body = (
            first.read_text(encoding="utf-8")
            .replace("*** SUBJECT HERE ***", words.subject)
            .replace("*** BLURB HERE ***", words.text)
        )
        first.write_text(body, encoding="utf-8")
    mails = sorted(directory.absolute().iterdir())
    problems = sending.threading(mails) + sending.forms(mails)
    problems += [
        Problem("letter", mails[0].name, f"line {n} of its text is longer than {letter.WIDTH} columns")
        for n in words.long_lines
    ]
    people: list[str] = []
    if ready:
        problems += sending.checkpatch(name, mails[1:], pristine) + sending.rehearsal(mails)
        people = sending.recipients(mails, pristine)
    return Exported(mails, words, problems, people)


def remarks(done: Exported, name: str) -> list[str]:
    """What whoever sends the mails should know, a line each."""
    found = []
    if done.letter.runs:
        found.append("the letter's figures are from " + ", ".join(map(str, done.letter.runs)))
    if done.letter.gaps:
        benches = sorted({letter.bench_of(metric) for metric in done.letter.gaps})
        found.append(
            f"the letter has marked gaps, no run has these figures: {', '.join(benches)}; `kz bench all` measures "
            "them, --figures names other runs"
        )
    if done.letter.stale:
        found.append(
            f"the series has changed since these figures were measured ({', '.join(done.letter.stale)}); the "
            "letter says so"
        )
    reports = against.remembered(series.get(name))
    found += [f"on {name} {one.version} ({one.origin}): {one.summary()}" for one in reports]
    if reports and all(one.age == "same" for one in reports) and any(one.newest for one in reports):
        found.append(f"the machine's mirror had nothing newer than {reports[0].base} to try it on")
    if not reports:
        found.append(f"not tried on other sources: `kz series check {name} --against newest` does")
    return found
