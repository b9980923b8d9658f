#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Insert the texts of this folder into a checkout of the virtio specification."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

TEXTS = [
    Path(__file__).resolve().parent / name
    for name in ("device-init-reported.tex", "device-init-on-inflate.tex", "report-now.tex")
]
BALLOON = Path("device-types/balloon")
FORM = "% Goes into FILE, before|after|at the end of COMMAND[ of SECTION][, content only]"
PLACE = re.compile(
    r"% Goes into (?P<file>[\w-]+\.tex), (?P<where>before|after|at the end of) (?P<command>.+?)"
    r"(?: of (?P<section>\\.+?))?(?P<content>, content only)?"
)
REQ = re.compile(r"\\req\{[^}]*\} *")
LEVELS = ("section", "subsection", "subsubsection", "paragraph", "subparagraph")
HEADING = re.compile(r"\\(?:(?:driver|device)normative\{\\)?((?:sub)*(?:section|paragraph))[{}]")
EPILOG = """\
The file device-init-reported.tex describes the form of a text. A place that is not there once, or
a text that is already there, is an error; then no text is inserted.

One patch for each feature bit, in the order 6, 7, 16:
  spec/insert.py SPEC spec/device-init-reported.tex
  git -C SPEC commit --all
  spec/insert.py SPEC spec/device-init-on-inflate.tex
  git -C SPEC commit --all
  spec/insert.py SPEC spec/report-now.tex
  git -C SPEC commit --all
  git -C SPEC format-patch -3

Exit: 0 inserted; 1 an error; 2 bad usage.
"""


class Refused(Exception):
    """An error in three parts."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")


@dataclass(frozen=True)
class Piece:
    """Lines of a text, and the place for them."""

    file: str
    where: str
    command: str
    section: str | None
    content: bool  # of a list or a listing that is there: no blank lines around it
    lines: list[str]


def read(path: Path) -> list[str]:
    """The lines of a file."""
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        fix = f"name a text, and a checkout of the virtio specification that has {BALLOON}/"
        raise Refused(f"Cannot read {path}", str(error), fix) from None


def pieces(text: Path) -> list[Piece]:
    """The pieces of a text, without comments and numbers of statements."""
    found: list[Piece] = []
    for number, line in enumerate(read(text), 1):
        if line.startswith("% Goes into"):
            place = PLACE.fullmatch(line)
            if not place:
                why = "this line does not name a place"
                raise Refused(f"{text}:{number}: {line}", why, f"write {FORM}")
            file, where, command, section, content = place.groups()
            found.append(Piece(file, where, command, section, bool(content), []))
        elif found and not line.startswith("%"):
            found[-1].lines.append(REQ.sub("", line))
    for piece in found:
        strip(piece, text)
    if not found:
        raise Refused(f"Nothing to insert: {text}", "it does not name a place", f"write {FORM}")
    return found


def strip(piece: Piece, text: Path) -> None:
    """Remove blank lines around a piece, and the environment that its place already has."""
    lines = "\n".join(piece.lines).strip("\n").split("\n")
    if piece.content:
        name = re.fullmatch(r"\\begin(\{\w+\})", lines[0])
        if not name or lines[-1] != f"\\end{name[1]}":
            what = f"{text}: bad content for {piece.file}, {piece.where} {piece.command}"
            raise Refused(what, "it is not one environment", "put it between \\begin and \\end")
        lines = lines[1:-1]
    if not any(lines):
        what = f"{text}: no lines for {piece.file}, {piece.where} {piece.command}"
        raise Refused(what, "the next place, or the end, follows", "add lines, or remove the place")
    piece.lines[:] = lines


def find(lines: list[str], command: str, among: range, path: Path) -> int:
    """The index of the one line that begins with a command."""
    found = [at for at in among if lines[at].lstrip().startswith(command)]
    if len(found) != 1:
        why = f"{len(found)} lines begin with it{': ' if found else ''}"
        why += ", ".join(str(at + 1) for at in found)
        fix = "compare the place in the text with the specification, and name another command"
        raise Refused(f"{path}: no single place for {command}", why, fix)
    return found[0]


def next_heading(lines: list[str], after: int, levels: tuple[str, ...] = LEVELS) -> int:
    """The index of the next heading of such a level, or that of the end."""
    for at in range(after + 1, len(lines)):
        heading = HEADING.match(lines[at])
        if heading and heading[1] in levels:
            return at
    return len(lines)


def locate(lines: list[str], piece: Piece, path: Path) -> int:
    """The index of the line before which a piece goes."""
    among = range(len(lines))
    if piece.section:
        start = find(lines, piece.section, among, path)
        among = range(start, next_heading(lines, start))
    at = find(lines, piece.command, among, path)
    if piece.where == "before":
        return at
    if piece.where == "at the end of":
        return next_heading(lines, at)
    heading = HEADING.match(lines[at])
    if not heading:
        return at + 1
    return next_heading(lines, at, LEVELS[: LEVELS.index(heading[1]) + 1])


def insert(lines: list[str], piece: Piece, path: Path) -> None:
    """Put a piece into its place."""
    if piece.lines[0] in lines:
        why = f"line {lines.index(piece.lines[0]) + 1} has its first line: {piece.lines[0].strip()}"
        fix = "name the texts that are missing, or undo the changes with git checkout"
        raise Refused(f"{path}: a text is already there", why, fix)
    at = locate(lines, piece, path)
    added = list(piece.lines)
    if piece.content:
        if not lines[at - 1]:  # This blank line stood before the end of the list.
            added.append("")
    else:
        if lines[at - 1]:
            added.insert(0, "")
        if at < len(lines) and lines[at]:
            added.append("")
    lines[at:at] = added


def write(files: dict[Path, list[str]], spec: Path) -> None:
    """Write the changed files of a checkout."""
    for path, lines in files.items():
        try:
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except OSError as error:
            fix = f"make it writable; undo the changes: git -C {spec} checkout {BALLOON}"
            raise Refused(f"Cannot write {path}", str(error), fix) from None
        print(path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("spec", type=Path, metavar="SPEC", help="a checkout of the specification")
    result.add_argument(
        "texts",
        type=Path,
        nargs="*",
        default=TEXTS,
        metavar="TEXT",
        help="the texts to insert, in this order (default: those for bits 6, 7 and 16)",
    )
    return result


def main(argv: list[str] | None = None) -> int:
    """Insert all texts and return the exit code."""
    options = parser().parse_args(argv)
    files: dict[Path, list[str]] = {}
    try:
        for text in options.texts:
            for piece in pieces(text):
                path = options.spec / BALLOON / piece.file
                if path not in files:
                    files[path] = read(path)
                insert(files[path], piece, path)
        write(files, options.spec)
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    print(f"Inserted. The patch: git -C {options.spec} diff")
    return 0


if __name__ == "__main__":
    sys.exit(main())
