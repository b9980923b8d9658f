# SPDX-License-Identifier: GPL-2.0
"""Sources of Linux and QEMU: their identity, archive, and unpacked tree, which stays unchanged."""

import bz2
import contextlib
import hashlib
import json
import os
import re
import shutil
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.machine.apt import PrivateApt

NAMES = ("linux", "qemu")


@dataclass(frozen=True)
class Base:
    """The content of <name>/base.toml: the version, and its place in Debian."""

    name: str
    version: str
    series: str
    suite: str
    kind: str
    package: str
    debian_version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """A source that is identified: ``key`` names its content, ``archive`` may be a folder."""

    name: str
    version: str
    key: str
    archive: Path
    from_debian: bool

    @property
    def tree(self) -> Path:
        """The folder of the unpacked, unchanged tree; it may not exist yet."""
        return paths.cache() / "src" / f"{self.name}-{self.version}-{self.key[:12]}"


def base(name: str, series: str = "") -> Base:
    """Read <name>/base.toml. ``series``: another source in it, such as 10.2."""
    if name not in NAMES:
        raise UsageError(
            f"Bad series: {name}", "no series has this name", f"use {' or '.join(NAMES)}"
        )
    file = paths.REPO / name / "base.toml"
    try:
        first = tomllib.loads(file.read_text(encoding="utf-8"))
        sources = [first, *first.get("also", [])]
        found = [one for one in sources if series in ("", one["series"])]
        if not found:
            have = ", ".join(one["series"] for one in sources)
            raise UsageError(
                f"Bad base of {name}: {series}", f"{file.name} lists {have}", "use one of these"
            )
        debian = dict(found[0]["debian"])
        version, series = found[0]["version"], found[0]["series"]
        return Base(name, version, series, debian_version=debian.pop("version"), **debian)
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise LabError(f"cannot read {file}", str(error), "restore the file from git") from None


def tree_version(name: str, tree: Path) -> str:
    """The version in a source tree, with -rc; empty when it has none."""
    file = tree / ("VERSION" if name == "qemu" else "Makefile")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if name == "qemu":
        return text.strip()
    fields = dict(
        re.findall(r"^((?:PATCH|SUB)LEVEL|(?:EXTRA)?VERSION) =[ \t]*(\S*)$", text, re.MULTILINE)
    )
    if not fields.get("VERSION") or not fields.get("PATCHLEVEL"):
        return ""
    point, extra = fields.get("SUBLEVEL", "0"), fields.get("EXTRAVERSION", "")
    middle = "" if extra.startswith("-rc") and point == "0" else f".{point or 0}"
    return f"{fields['VERSION']}.{fields['PATCHLEVEL']}{middle}{extra}"


def variable(name: str) -> str:
    return f"KNOWNZERO_{name.upper()}_SOURCE"


def stat_key(path: Path) -> str:
    """A name for the content of a file or folder, from names, sizes and times."""
    digest = hashlib.sha256(str(path).encode())
    for root, folders, files in (
        os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]
    ):
        folders[:] = sorted(f for f in folders if f != ".git")
        for file in sorted(files):
            full = os.path.join(root, file)
            found = os.lstat(full)
            digest.update(
                f"{os.path.relpath(full, path)} {found.st_size} {found.st_mtime_ns}\n".encode()
            )
    return digest.hexdigest()


def _override(name: str) -> Source | None:
    if not (value := os.environ.get(variable(name))):
        return None
    path = Path(value).expanduser().absolute()
    if not path.exists():
        fix = "name a source folder or a tarball, or unset it"
        raise UsageError(f"Bad {variable(name)}: {path}", "it does not exist", fix)
    if name == "linux" and (path / ".config").exists():
        why = "it has a .config, and builds outside of the tree need a clean tree"
        raise UsageError(f"Bad {variable(name)}: {path}", why, f"run `make mrproper` in {path}")
    return local(name, path, variable(name))


def local(name: str, path: Path, given_as: str) -> Source:
    """The source in a folder or tarball of the user; UsageError for a folder that holds none."""
    if path.is_dir():
        if not (version := tree_version(name, path)):
            fix = "name the top of a source tree"
            raise UsageError(f"Bad {given_as}: {path}", f"it has no version of {name}", fix)
    else:
        # The longest: linux-source-6.12_6.12.117-1_all.deb.
        found = re.findall(r"\d+\.\d+(?:\.\d+)?(?:-rc\d+)?", path.name)
        version = max(found, key=len, default="unknown")
    return Source(name, version, stat_key(path), path, from_debian=False)


def identify(name: str) -> Source:
    if chosen := _override(name):
        return chosen
    wanted = base(name)
    archive = paths.sub("downloads") / wanted.file
    if not archive.exists():
        # A newer point release that was accepted before counts as long as base.toml is unchanged.
        with contextlib.suppress(OSError, ValueError, KeyError):
            data = json.loads(archive.with_name(f"{name}.json").read_text(encoding="utf-8"))
            if data["instead_of"] == wanted.sha256:
                archive = Path(data["archive"])
                return Source(name, data["version"], data["sha256"], archive, from_debian=True)
    return Source(name, wanted.version, wanted.sha256, archive, from_debian=True)


def verify(archive: Path, checksum: str) -> bool:
    """Whether a download is whole; one that is not is thrown away, with a note."""
    if not archive.is_file():
        return False
    with archive.open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() == checksum:
            return True
    progress.note(f"{archive.name} is corrupt or partial (its checksum differs): thrown away")
    archive.unlink()
    return False


def upstream(debian_version: str) -> str:
    """``7.3~rc7-1~exp1`` -> ``7.3-rc7``; ``1:10.0.13+ds-0+deb13u1`` -> ``10.0.13``."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)(?:~(rc\d+))?", debian_version)
    return debian_version if not match else match[1] + (f"-{match[2]}" if match[2] else "")


def order(version: str) -> tuple[int, int, int, int]:
    """Sorts versions: ``7.4-rc1`` before ``7.4`` and ``7.4.0``, after ``7.3.9``."""
    if not (match := re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[-~]rc(\d+))?", version)):
        return (0, 0, 0, 0)
    major, minor, point, candidate = match.groups()
    return int(major), int(minor), int(point or 0), int(candidate) if candidate else 1000


def record_file(record: dict[str, str], kind: str) -> tuple[str, str]:
    """File name and sha256 of a package record (for sources: of the upstream tarball)."""
    if kind == "deb":
        return record["filename"].rsplit("/", 1)[-1], record["sha256"]
    for line in record["checksums-sha256"].splitlines():
        words = line.split()
        if len(words) == 3 and re.search(r"\.orig\.tar\.\w+$", words[2]):
            return words[2], words[0]
    raise KeyError("checksums-sha256")


def offered(base: Base, record: dict[str, str]) -> Base:
    """The source in a package's record; KeyError when the record lacks a field."""
    debian = record["version"]
    file, checksum = record_file(record, base.kind)
    return replace(
        base, version=upstream(debian), debian_version=debian, file=file, sha256=checksum
    )


def download(apt: PrivateApt, wanted: Base) -> Path:
    """The file of a package, in the cache, checked against the checksum that the archive signs."""
    archive = paths.sub("downloads") / wanted.file
    if not verify(archive, wanted.sha256):
        apt.download(wanted.package, archive.parent, wanted.debian_version)
        if not verify(archive, wanted.sha256):
            what = f"the download of {wanted.package} {wanted.debian_version} is corrupt"
            fix = "run it again; then check the mirror, or name a tarball in KNOWNZERO_…_SOURCE"
            raise LabError(what, f"its sha256 is not {wanted.sha256}", fix)
    return archive


def _download(wanted: Base) -> Source:
    apt = PrivateApt(wanted.suite, wanted.kind)
    apt.update()
    records = {r["version"]: r for r in apt.show(wanted.package) if "version" in r}
    if wanted.debian_version in records:
        chosen = wanted.debian_version
    else:
        same = [v for v in records if upstream(v).startswith(wanted.series + ".")]
        if not same:
            what = f"Debian {wanted.suite} no longer has {wanted.package} {wanted.series}.x"
            why = "it has: " + (", ".join(records) or "no package of that name")
            raise LabError(
                what, why, f"set {variable(wanted.name)} to a tarball of version {wanted.version}"
            )
        chosen = max(same, key=lambda one: order(upstream(one)))
        instead = f"{wanted.package} {chosen} instead of {wanted.debian_version}"
        progress.note(f"Debian {wanted.suite} has {instead}: using it (signed by the archive)")
    try:
        found = offered(wanted, records[chosen])
    except KeyError as error:
        fix = f"set {variable(wanted.name)} to a tarball"
        raise LabError(
            f"cannot use {wanted.package} {chosen}", f"its record lacks {error}", fix
        ) from None
    if chosen == wanted.debian_version:
        found = replace(found, sha256=wanted.sha256)
    archive = download(apt, found)
    if chosen != wanted.debian_version:
        data = {"instead_of": wanted.sha256, "version": found.version}
        data |= {"sha256": found.sha256, "archive": str(archive)}
        lock.write_atomically(archive.parent / f"{wanted.name}.json", json.dumps(data))
    return Source(wanted.name, found.version, found.sha256, archive, from_debian=True)


def obtain(name: str) -> Source:
    """The source with its archive present and checked; downloads when needed."""
    source = identify(name)
    if not source.from_debian or source.tree.exists():
        return source
    with lock.locked(f"download-{name}"):
        source = identify(name)
        if verify(source.archive, source.key):
            return source
        with progress.step(f"downloading the {name} source"):
            return _download(base(name))


def use(name: str, series: str) -> None:
    """Make another source of base.toml the one that this process and its children use."""
    wanted = base(name, series)
    archive = paths.sub("downloads") / wanted.file
    with lock.locked(f"download-{name}"):
        if not verify(archive, wanted.sha256):
            with progress.step(f"downloading the {name} {series} source"):
                archive = _download(wanted).archive
    os.environ[variable(name)] = str(archive)


def pristine(source: Source) -> Path:
    """The unpacked tree, never to be edited; made when missing."""
    if source.tree.exists():
        return source.tree
    with lock.locked(f"unpack-{source.name}"):
        if source.tree.exists():
            return source.tree
        what = f"unpacking {source.name} {source.version}"
        with progress.step(what), lock.new_directory(source.tree) as work:
            _unpack(source, work)
            if source.name == "qemu":
                _stand_in_firmware(work / "pc-bios")
            if not tree_version(source.name, work):
                fix = f"set {variable(source.name)} to a {source.name} source tree or tarball"
                raise LabError(
                    f"{source.archive} holds no {source.name} source", "it has no version", fix
                )
    return source.tree


def _stand_in_firmware(folder: Path) -> None:
    """Empty archives for firmware that Debian's source lacks, meson wants and no guest needs."""
    listing = folder / "meson.build"
    if not listing.is_file():
        return
    for name in re.findall(r"'(edk2-[\w-]+\.fd)'", listing.read_text(encoding="utf-8")):
        if not (archive := folder / f"{name}.bz2").exists():
            archive.write_bytes(bz2.compress(b""))


def _unpack(source: Source, work: Path) -> None:
    what = f"cannot unpack {source.archive.name}"
    fix = "free some space or get the archive again, then run it again"
    log = paths.log_file(f"unpack-{source.name}")
    archive = source.archive
    if archive.is_dir():
        _copy_tree(archive, work)
        return
    if archive.suffix == ".deb":
        run.logged(["dpkg-deb", "-x", archive, work / ".deb"], log, what, fix)
        if not (inner := sorted((work / ".deb" / "usr" / "src").glob("*.tar.*"))):
            raise LabError(what, "no source tarball inside", fix)
        archive = inner[0]
    argv: run.Argv = [
        "tar",
        "-x",
        "--strip-components=1",
        "--no-same-owner",
        "-f",
        archive,
        "-C",
        work,
    ]
    run.logged(argv, log, what, fix)
    shutil.rmtree(work / ".deb", ignore_errors=True)


def _copy_tree(origin: Path, work: Path) -> None:
    """Copy a source folder; of a git checkout only what git knows, as it is on disk."""
    what, fix = f"cannot copy {origin}", "check the folder and the space in the cache"
    if not (origin / ".git").exists():
        argv = ["cp", "-a", "--reflink=auto", f"{origin}/.", str(work)]
        run.logged(argv, paths.log_file("copy-tree"), what, fix)
        return
    listing: run.Argv = [
        "git",
        "-C",
        origin,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    for name in run.output(listing, what, fix).split("\0"):
        if name and (os.path.islink(origin / name) or os.path.isfile(origin / name)):
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin / name, work / name, follow_symlinks=False)
