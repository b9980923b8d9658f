# SPDX-License-Identifier: GPL-2.0
"""Debian packages of the machine's own release, unpacked in the cache and not installed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from lab import apt, fetch, lock, paths, progress, run
from lab.errors import LabError

_machine: apt.PrivateApt | None = None


def _apt() -> apt.PrivateApt:
    global _machine
    if _machine is None:
        release = apt.codename()
        if not release:
            raise LabError(
                "cannot tell which Debian this is",
                "/etc/os-release has no VERSION_CODENAME",
                "run on Debian 12 or newer",
            )
        _machine = apt.PrivateApt(release)
        _machine.update()
    return _machine


def _remembered(package: str) -> Path | None:
    try:
        data = json.loads((paths.cache() / "debs" / f"{package}.json").read_text(encoding="utf-8"))
        path = Path(data["path"])
        return path if path.is_dir() else None
    except (OSError, ValueError, KeyError):
        return None


def unpacked(package: str) -> Path:
    """The files of a package of the machine's release, in a cache folder."""
    known = _remembered(package)
    if known:
        return known
    with lock.locked(f"deb-{package}"):
        known = _remembered(package)
        if known:
            return known
        with progress.step(f"downloading Debian's {package}"):
            records = _apt().show(package)
            version = fetch.newest([r["version"] for r in records])
            target = paths.sub("debs") / f"{package}_{version.replace(':', '%3a')}"
            with tempfile.TemporaryDirectory(prefix=".deb-", dir=target.parent) as folder:
                files = _apt().download(package, version, Path(folder))
                unpack(files, target)
        lock.write_atomically(
            target.parent / f"{package}.json", json.dumps({"path": str(target), "version": version})
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
