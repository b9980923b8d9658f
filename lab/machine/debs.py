# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the machine's own release, unpacked in the cache and not installed."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import apt, fetch

TRIPLET = "x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"


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


def _remembered(name: str) -> Path | None:
    try:
        path = Path(json.loads((paths.cache() / "debs" / f"{name}.json").read_text(encoding="utf-8"))["path"])
        return path if path.is_dir() else None
    except (OSError, ValueError, KeyError):
        return None


def _once(name: str, what: str, download: Callable[[Path], tuple[str, list[Path]]]) -> Path:
    """A folder with unpacked packages; ``download`` gets them, and names the folder."""
    if known := _remembered(name):
        return known
    with lock.locked(f"deb-{name}"):
        if known := _remembered(name):
            return known
        root = paths.sub("debs")
        with (
            progress.step(f"downloading Debian's {what}"),
            tempfile.TemporaryDirectory(prefix=".deb-", dir=root) as folder,
        ):
            called, files = download(Path(folder))
            unpack(files, root / called)
        lock.write_atomically(root / f"{name}.json", json.dumps({"path": str(root / called)}))
        return root / called


def unpack(files: list[Path], target: Path) -> None:
    """Unpack packages one over the other into a folder that appears when all is there."""
    log = paths.log_file("unpack-deb")
    with lock.new_directory(target) as work:
        for file in files:
            fix = "free some space, then run it again"
            run.logged(["dpkg-deb", "-x", file, work], log, f"cannot unpack {file.name}", fix)


def unpacked(package: str, arch: str = "") -> Path:
    """The files of a package; ``arch``: of another architecture than the machine's, by Debian's name of it."""
    name = f"{package}-{arch}" if arch else package

    def download(folder: Path) -> tuple[str, list[Path]]:
        version = fetch.newest([record["version"] for record in _apt(arch).show(package)])
        return f"{name}_{version.replace(':', '%3a')}", _apt(arch).download(package, version, folder)

    return _once(name, f"{package} {arch}".rstrip(), download)


def depends(package: str) -> list[str]:
    """The packages that a package depends on, first alternatives only."""
    text = _apt().show(package)[0].get("depends", "")
    return [part.split("|")[0].split("(")[0].strip() for part in text.split(",") if part.strip()]


def with_dependencies(package: str, marker: str, whole: bool = False) -> Path:
    """A package with every dependency that the machine lacks (``whole``: with all), unpacked together.

    ``marker`` is a file that must be there afterwards, relative to the folder.
    """
    name = f"{package}+{'everything' if whole else 'dependencies'}"

    def download(folder: Path) -> tuple[str, list[Path]]:
        return name, _apt().download_with_dependencies(package, folder, whole)

    target = _once(name, f"{package} and what it needs", download)
    if not (target / marker).exists():
        raise LabError(f"Debian's {package} lacks {marker}", f"unpacked in {target}", "name another file")
    return target


def with_libraries(package: str, program: str) -> list[tuple[Path, str]]:
    """A program of a package (relative to the root) and its shared libraries, each with its place in a guest.

    The package's own loader finds the libraries, so that none of the machine's is among them.
    """
    folder = with_dependencies(package, program, whole=True)
    places = [place for part in ("lib", "usr/lib") if (place := folder / part / TRIPLET).is_dir()]
    loader = next(place / LOADER for place in places if (place / LOADER).is_file())
    text = run.output(
        [loader, "--library-path", ":".join(map(str, places)), "--list", folder / program],
        f"cannot find the libraries of {program}",
        f"remove {folder} and its .json, then run it again",
    )
    found = [Path(line) for line in re.findall(r"=> (/\S+)", text) if LOADER not in line]
    return [
        (folder / program, f"/{program}"),
        (loader, f"/lib64/{LOADER}"),
        *((library, f"/lib/{TRIPLET}/{library.name}") for library in found),
    ]
