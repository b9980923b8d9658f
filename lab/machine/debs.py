# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the machine's own release, unpacked in the cache and not installed."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import apt

TRIPLET = "x86_64-linux-gnu"
LOADER = "ld-linux-x86-64.so.2"


@functools.cache
def _apt(arch: str = "", suite: str = "") -> apt.PrivateApt:
    release = suite or apt.codename()
    if not release:
        why = "/etc/os-release has no VERSION_CODENAME"
        raise LabError("cannot identify the Debian release", why, "run on Debian 12 or newer")
    machine = apt.PrivateApt(release, arch=arch)
    machine.update()
    return machine


def _once(name: str, what: str, download: Callable[[Path], list[Path]]) -> Path:
    """The folder with the unpacked packages that ``download`` gets, made when missing."""
    target = paths.sub("debs") / name
    if not target.is_dir():
        with (
            lock.locked(f"deb-{name}"),
            progress.step(f"downloading Debian's {what}"),
            tempfile.TemporaryDirectory(prefix=".deb-", dir=target.parent) as folder,
        ):
            if not target.is_dir():
                unpack(download(Path(folder)), target)
    return target


def unpack(files: list[Path], target: Path) -> None:
    """Unpack packages one over the other into a folder that appears when all is there."""
    log = paths.log_file("unpack-deb")
    with lock.new_directory(target) as work:
        for file in files:
            fix = "free some space, then run it again"
            run.logged(["dpkg-deb", "-x", file, work], log, f"cannot unpack {file.name}", fix)


def unpacked(package: str, arch: str = "", suite: str = "") -> Path:
    """The files of a package.

    ``arch``: of another architecture than the machine's, by Debian's name of it. ``suite``: not the
    machine's own.
    """
    name, what = "-".join(filter(None, (package, arch, suite))), f"{package} {arch}".rstrip()
    return _once(name, what, lambda folder: _apt(arch, suite).download(package, folder))


def depends(package: str) -> list[str]:
    """The packages that a package depends on, first alternatives only."""
    text = _apt().show(package)[0].get("depends", "")
    return [part.split("|")[0].split("(")[0].strip() for part in text.split(",") if part.strip()]


def place(package: str, suite: str = "") -> Path:
    """The folder of ``with_dependencies``; it may not exist yet."""
    return paths.sub("debs") / "+".join([package, "everything", *suite.split()])


def with_dependencies(package: str, marker: str, suite: str = "") -> Path:
    """A package with all it needs, with the file ``marker``; ``suite``: not the machine's own."""
    name, what = place(package, suite).name, f"{package} and what it needs"
    target = _once(name, what, lambda at: _apt(suite=suite).download_with_dependencies(package, at))
    if not (target / marker).exists():
        raise LabError(
            f"Debian's {package} lacks {marker}", f"unpacked in {target}", "name another file"
        )
    return target


def loader(folder: Path) -> list[str]:
    """The command that runs a program of ``with_dependencies`` with the libraries there, and none
    of the machine's.
    """
    places = [place for part in ("lib", "usr/lib") if (place := folder / part / TRIPLET).is_dir()]
    own = next(place / LOADER for place in places if (place / LOADER).is_file())
    return [str(own), "--inhibit-cache", "--library-path", ":".join(map(str, places))]
