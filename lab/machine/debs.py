# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the machine's own release, unpacked in the cache and not installed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import apt, fetch

TRIPLET = "x86_64-linux-gnu"


@functools.cache
def _apt(arch: str = "") -> apt.PrivateApt:
    release = apt.codename()
    if not release:
        raise LabError(
            "cannot tell which Debian this is",
            "/etc/os-release has no VERSION_CODENAME",
            "run on Debian 12 or newer",
        )
    machine = apt.PrivateApt(release, arch=arch)
    machine.update()
    return machine


def _remembered(package: str) -> Path | None:
    try:
        data = json.loads((paths.cache() / "debs" / f"{package}.json").read_text(encoding="utf-8"))
        path = Path(data["path"])
        return path if path.is_dir() else None
    except (OSError, ValueError, KeyError):
        return None


def unpacked(package: str, arch: str = "") -> Path:
    """The files of a package of the machine's release, in a cache folder.

    ``arch``: of another architecture than the machine's, by Debian's name of it.
    """
    name = f"{package}-{arch}" if arch else package
    known = _remembered(name)
    if known:
        return known
    with lock.locked(f"deb-{name}"):
        known = _remembered(name)
        if known:
            return known
        with progress.step(f"downloading Debian's {package} {arch}".rstrip()):
            records = _apt(arch).show(package)
            version = fetch.newest([r["version"] for r in records])
            target = paths.sub("debs") / f"{name}_{version.replace(':', '%3a')}"
            with tempfile.TemporaryDirectory(prefix=".deb-", dir=target.parent) as folder:
                files = _apt(arch).download(package, version, Path(folder))
                unpack(files, target)
        lock.write_atomically(
            target.parent / f"{name}.json", json.dumps({"path": str(target), "version": version})
        )
        return target


def unpack(files: list[Path], target: Path) -> None:
    """Unpack packages one over the other into a folder that appears when all is there."""
    log = paths.log_file("unpack-deb")
    with lock.new_directory(target) as work:
        for file in files:
            run.logged(
                ["dpkg-deb", "-x", file, work],
                log,
                f"cannot unpack {file.name}",
                "free some space, then run it again",
            )


def depends(package: str) -> list[str]:
    """The packages a package depends on, first alternatives only."""
    text = _apt().show(package)[0].get("depends", "")
    return [part.split("|")[0].split("(")[0].strip() for part in text.split(",") if part.strip()]


def with_dependencies(package: str, marker: str) -> Path:
    """A package with every dependency the machine lacks, unpacked together.

    ``marker`` is a file that must be there afterwards, relative to the folder.
    """
    name = f"{package}+dependencies"
    known = _remembered(name)
    if known:
        return known
    with lock.locked(f"deb-{name}"), progress.step(f"downloading Debian's {package} and what it needs"):
        known = _remembered(name)
        if known:
            return known
        target = paths.sub("debs") / name
        with tempfile.TemporaryDirectory(prefix=".deb-", dir=target.parent) as folder:
            files = _apt().download_with_dependencies(package, Path(folder))
            unpack(files, target)
        if not (target / marker).exists():
            raise LabError(
                f"Debian's {package} lacks {marker}",
                f"unpacked in {target}",
                "remove that folder and run it again",
            )
        lock.write_atomically(target.parent / f"{name}.json", json.dumps({"path": str(target)}))
        return target


def needed(file: Path) -> list[str]:
    """The shared libraries that an ELF file names, its loader not among them unless it names that too."""
    text = run.output(
        ["readelf", "-d", str(file)],
        f"cannot read {file}",
        "install binutils, and check that it is an ELF file",
    )
    return re.findall(r"\(NEEDED\).*\[(.+)\]", text)


def _find(name: str, package: str) -> tuple[Path, str] | None:
    """A library in the folders that the loader searches, and which package it is from."""
    for candidate in (package, *depends(package)):
        folder = unpacked(candidate)
        for place in ("lib", "usr/lib"):
            file = folder / place / TRIPLET / name
            if file.is_file():
                return file, candidate
    return None


def with_libraries(package: str, program: str) -> list[tuple[Path, str]]:
    """A program of a package, and all the shared libraries it needs, each with its place in a guest.

    ``program`` is relative to the root folder; it needs nothing of what the machine has installed.
    """
    name = f"{package}+libraries"
    record = paths.sub("debs") / f"{name}.json"

    def known() -> list[tuple[Path, str]]:
        try:
            found = [(Path(file), place) for file, place in json.loads(record.read_text(encoding="utf-8"))]
        except (OSError, ValueError):
            return []
        return found if all(file.is_file() for file, _ in found) else []

    if files := known():
        return files
    with lock.locked(f"deb-{name}"):
        if files := known():
            return files
        start = unpacked(package) / program
        if not start.is_file():
            raise LabError(
                f"Debian's {package} has no {program}",
                f"unpacked in {unpacked(package)}",
                "name another file",
            )
        files = [(start, f"/{program}")]
        waiting = [(start, package)]
        seen = set()
        while waiting:
            file, owner = waiting.pop()
            for library in needed(file):
                if library in seen:
                    continue
                seen.add(library)
                found = _find(library, owner)
                if found is None:
                    raise LabError(
                        f"cannot find {library}",
                        f"{file.name} needs it, and no package that {owner} depends on has it",
                        "see apt-cache depends; first alternatives only are searched",
                    )
                loader = library.startswith("ld-linux")
                files.append((found[0], f"/lib64/{library}" if loader else f"/lib/{TRIPLET}/{library}"))
                waiting.append(found)
        lock.write_atomically(record, json.dumps([(str(file), place) for file, place in files]))
        return files
