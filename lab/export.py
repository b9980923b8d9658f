# SPDX-License-Identifier: GPL-2.0
"""The series as mails for a list: cover letter, threading, new files where they are first used."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lab import lock, paths, series, tree
from lab.errors import LabError

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


def cover_letter(what: series.Series) -> tuple[str, str]:
    """Subject and text of the cover letter: <name>/cover-letter.txt, or placeholders."""
    file = what.root / "cover-letter.txt"
    if not file.is_file():
        return "*** SUBJECT HERE ***", "*** BLURB HERE ***"
    subject, _, text = file.read_text(encoding="utf-8").partition("\n")
    return subject.strip(), text.strip()


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


def export(name: str, directory: Path) -> list[Path]:
    """Write the mails into ``directory`` and return them in order."""
    what = series.get(name)
    if directory.exists() and any(directory.iterdir()):
        raise LabError(
            f"{directory} is not empty", "old mails would mix with the new ones", "name a new directory", 2
        )
    repo = tree.Repo(tree.make(name, None))
    tip = tree.commit_series(repo, tree.BASE, what, homes(what))
    subject, text = cover_letter(what)
    with lock.new_directory(directory.absolute()) as work:
        repo.git(
            "format-patch", "-o", str(work), "--cover-letter", "--thread=shallow", "--numbered", "--no-renames", f"--base={tree.BASE}",
            "--no-notes", "--no-ext-diff", f"{tree.BASE}..{tip}", env=sender(),
        )  # fmt: skip
        letter = next(work.glob("0000-*"))
        body = (
            letter.read_text(encoding="utf-8")
            .replace("*** SUBJECT HERE ***", subject)
            .replace("*** BLURB HERE ***", text)
        )
        letter.write_text(body, encoding="utf-8")
    return sorted(directory.absolute().iterdir())
