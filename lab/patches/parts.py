# SPDX-License-Identifier: GPL-2.0
"""Parts of a series: mail patches in <project>/parts/NAME, described by <project>/parts.toml."""

import difflib
import functools
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.core import paths
from lab.core.errors import LabError, UsageError
from lab.machine import fetch

# Patches of linux/measure for kernels to measure and test with; like parts, but never exported or
# packaged.
MEASURE = ("floor", "pvm", "kcsan")


@dataclass(frozen=True)
class Part:
    """One series that can be sent by itself.

    ``on``: the parts that it directly stands on. ``also``: sections of MAINTAINERS whose
    maintainers get it, in addition to those of get_maintainer.pl.
    """

    name: str
    title: str
    root: Path
    on: tuple[str, ...] = ()
    configs: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    file: str = ""  # its only patch, of a folder without a list

    def key(self) -> str:
        """A name for what its patches change (their messages do not count)."""
        digest = hashlib.sha256()
        for patch in self.patches():
            digest.update(b"patch\n" + diff_of(patch.read_bytes()))
        return digest.hexdigest()[:12]

    def patches(self, version: str = "") -> list[Path]:
        """The patches in the order in which they apply.

        LabError when the list names a missing file.

        A folder such as ``10.2`` holds patches that differ for sources of that series. ``version``:
        of the source, by default the one in use.
        """
        if self.file:
            return [self.root / self.file]
        listing = self.root / "series"
        if not listing.is_file():
            return []
        names = [
            line.split("#", 1)[0].strip()
            for line in listing.read_text(encoding="utf-8").splitlines()
        ]
        found = [self.root / name for name in names if name]
        for path in found:
            if not path.is_file():
                why, fix = (
                    "this file does not exist",
                    f"git checkout {path.name}, or remove the line",
                )
                raise LabError(f"{listing} names {path.name}", why, fix)
        if not any(self.root.glob("*/")):
            return found
        version = version or fetch.identify(self.root.parents[1].name).version
        other = self.root / ".".join(version.split(".")[:2])
        return [other / path.name if (other / path.name).is_file() else path for path in found]


@dataclass(frozen=True)
class Series:
    """Parts of one project in the recorded order.

    ``rules``: accepted reports of checkpatch, from parts.toml.
    """

    name: str
    root: Path
    parts: tuple[Part, ...]
    rules: dict[str, Any]
    whole: bool = True

    @property
    def suffix(self) -> str:
        """The end of the name of a tree with these parts.

        Few trees serve all sets of parts: ccache does not know a file in another folder.
        """
        measure = [part.name for part in self.parts if part.name in MEASURE]
        some = len(self.parts) > len(measure) and (measure or not self.whole)
        return "".join(f"-{name}" for name in [*measure[-1:], *(["parts"] if some else [])])

    def patches(self) -> list[Path]:
        return [patch for part in self.parts for patch in part.patches()]

    def key(self) -> str:
        """A name for the resulting source (messages of patches do not count)."""
        digest = hashlib.sha256()
        for patch in self.patches():
            digest.update(b"patch\n" + diff_of(patch.read_bytes()))
        return digest.hexdigest()

    def files(self) -> set[str]:
        """Paths in the source tree that the patches change, those for other sources included."""
        found = [
            path for part in self.parts for path in [*part.patches(), *part.root.glob("*/*.patch")]
        ]
        return {name for patch in found for name in touched(patch.read_bytes())}


def keys() -> dict[str, str]:
    """The key of each part of this checkout, by PROJECT/PART."""
    both = (_all(project) for project in ("linux", "qemu"))
    return {f"{series.name}/{part.name}": part.key() for series in both for part in series.parts}


@functools.cache
def _all(name: str) -> Series:
    fetch.base(name)  # rejects unknown projects
    root = paths.REPO / name
    file = root / "parts.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        found: list[Part] = []
        for part, fields in data.pop("parts").items():
            on = tuple(fields.get("on", ()))
            if missing := [one for one in on if one not in {p.name for p in found}]:
                raise ValueError(f"{part} stands on {missing[0]}, which does not come before it")
            for name_of in ("solved", "tests"):
                fields.pop(name_of, None)  # for readers
            given: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
            }
            found.append(Part(part, root=root / "parts" / part, **given))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"cannot read {file}", str(error), f"git checkout {file}") from None
    return Series(name, root, tuple(found), data)


def lts(series: str) -> Series:
    """The parts of linux/lts/SERIES, written for an older kernel; none if there is no such.

    Each stands on all before it.
    """
    own, folder = _all("linux"), paths.REPO / "linux" / "lts" / series
    found: list[Part] = []
    for part in own.parts:
        if (folder / part.name / "series").is_file():
            before = tuple(one.name for one in found)
            found.append(replace(part, root=folder / part.name, on=before))
    return replace(own, parts=tuple(found))


def older() -> str:
    """``6.12`` if the source of Linux in use is a 6.12.y and linux/lts has parts for it."""
    series = ".".join(fetch.identify("linux").version.split(".")[:2])
    return series if lts(series).parts else ""


def get(name: str, parts: Iterable[str] = ()) -> Series:
    """A series: all parts, or these and the parts they stand on; those of MEASURE come last.

    For an older source of Linux, those of linux/lts. UsageError for a part that does not exist.
    """
    series = _all(name)
    if name == "linux" and (version := older()):
        series = lts(version)
    if not (wanted := set(parts)):
        return series
    measure = tuple(
        Part(one, "A kernel to measure or test with", series.root / "measure", file=f"{one}.patch")
        for one in MEASURE
        if one in wanted
    )
    wanted.difference_update(MEASURE)
    known = {part.name: part for part in series.parts}
    for one in sorted(wanted):
        if one not in known:
            near = difflib.get_close_matches(one, known, 3) or list(known)
            why, fix = f"{name}/parts.toml does not list it", f"use {', '.join(near)}"
            raise UsageError(f"Unknown part {one!r} of {name}", why, fix)
    for part in reversed(series.parts):
        if part.name in wanted:
            wanted.update(part.on)
    chosen = tuple(part for part in series.parts if part.name in wanted)
    whole = len(chosen) == len(series.parts)
    return Series(name, series.root, (*chosen, *measure), series.rules, whole)


def split(text: str) -> tuple[str, ...]:
    """``"zeroed,prezero"`` as names."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def diff_of(patch: bytes) -> bytes:
    """A patch without its message."""
    at = patch.find(b"\ndiff --git ")
    return patch[at + 1 :] if at >= 0 else b"" if not patch.startswith(b"diff --git ") else patch


def touched(patch: bytes) -> list[str]:
    names = re.findall(rb"^diff --git a/(.+) b/(.+)$", diff_of(patch), re.MULTILINE)
    return list(dict.fromkeys(name.decode() for pair in names for name in pair))


def subject(patch: bytes) -> str:
    """The subject of a mail patch without its prefix."""
    head = patch.split(b"\n\n", 1)[0].decode(errors="replace")
    match = re.search(r"^Subject: (?:\[[^]]*\] )?(.*(?:\n[ \t].*)*)", head, re.MULTILINE)
    return re.sub(r"\n[ \t]+", " ", match[1]) if match else ""
