# SPDX-License-Identifier: GPL-2.0
"""``kz series check --against``: which parts apply to another source, by ``git am -3``."""

from __future__ import annotations

import contextlib
import hashlib
import re
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from lab.core import lock, paths, progress
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.machine.apt import PrivateApt
from lab.series.parts import Part, Series, get
from lab.series.repo import BASE, Repo, branch_of, commit_parts, small

# Suites besides the one in base.toml.
SUITES = ("unstable", "experimental")
VERSION_FILES = {"linux": "Makefile", "qemu": "VERSION"}


@dataclass(frozen=True)
class Offer:
    """A source package of the machine's mirror. ``version`` is upstream's: 7.3.4, 7.4-rc1."""

    version: str
    debian_version: str
    suite: str
    kind: str
    package: str
    file: str
    sha256: str


@dataclass
class Outcome:
    """One part on one source: patches that apply clean, patches that need -3, and where it stops."""

    part: str
    patches: int
    clean: int = 0
    merged: int = 0
    conflict: str = ""
    files: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """clean, 3-way, conflict, or not tried (a part that it stands on has a conflict)."""
        if self.conflict:
            return "conflict"
        if self.clean + self.merged < self.patches:
            return "not tried"
        return "3-way" if self.merged else "clean"

    def cell(self) -> str:
        """The outcome as a cell of a table."""
        if self.conflict:
            return f"conflict in {self.conflict} ({', '.join(self.files)})"
        return f"3-way ({self.merged} of {self.patches})" if self.merged else self.state


@dataclass(frozen=True)
class Report:
    """What becomes of a series on one source."""

    name: str
    base: str
    version: str
    origin: str
    outcomes: list[Outcome]

    def data(self) -> dict[str, Any]:
        """The report for programs."""
        return {**asdict(self), "outcomes": [{**asdict(one), "state": one.state} for one in self.outcomes]}


def order(version: str) -> tuple[int, int, int, int]:
    """Sorts versions: ``7.4-rc1`` before ``7.4`` and ``7.4.0``, after ``7.3.9``."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[-~]rc(\d+))?", version)
    if not match:
        return (0, 0, 0, 0)
    major, minor, point, candidate = match.groups()
    return int(major), int(minor), int(point or 0), int(candidate) if candidate else 1000


def upstream(debian_version: str) -> str:
    """``7.3~rc7-1~exp1`` -> ``7.3-rc7``; ``1:10.0.13+ds-0+deb13u1`` -> ``10.0.13``."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)(?:~(rc\d+))?", debian_version)
    return debian_version if not match else match[1] + (f"-{match[2]}" if match[2] else "")


def version_of(name: str, content: bytes) -> str:
    """The version in a source's Makefile or VERSION, with -rc; empty when there is none."""
    text = content.decode(errors="replace")
    if name == "qemu":
        return text.strip()
    fields = dict(
        re.findall(r"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) =[ \t]*(\S*)$", text, re.MULTILINE)
    )
    if not fields.get("VERSION") or not fields.get("PATCHLEVEL"):
        return ""
    point, extra = fields.get("SUBLEVEL", "0"), fields.get("EXTRAVERSION", "")
    middle = "" if extra.startswith("-rc") and point == "0" else f".{point or 0}"
    return f"{fields['VERSION']}.{fields['PATCHLEVEL']}{middle}{extra}"


# Other sources.


def offers(name: str) -> list[Offer]:
    """The sources of ``linux`` or ``qemu`` that the machine's mirror has; a suite that it lacks is left out."""
    base = fetch.base(name)
    found: list[Offer] = []
    failed: LabError | None = None
    for suite in dict.fromkeys((base.suite, *SUITES)):
        apt = PrivateApt(suite, base.kind)
        try:
            with progress.step(f"asking the mirror for the {name} sources of Debian {suite}"):
                apt.update()
                records = [(package, one) for package in _packages(apt, base) for one in apt.show(package)]
        except LabError as error:
            progress.note(f"{error.what}: left out")
            failed = failed or error
            continue
        for package, record in records:
            # showsrc also lists sources that have a binary package of that name.
            if record.get("package", package) != package or "version" not in record:
                continue
            with contextlib.suppress(KeyError):
                file, checksum = fetch.record_file(record, base.kind)
                version = record["version"]
                found.append(Offer(upstream(version), version, suite, base.kind, package, file, checksum))
    if not found and failed:
        raise failed
    return found


def _packages(apt: PrivateApt, base: fetch.Base) -> list[str]:
    """The source packages of a suite: Debian's kernel has its version in the package's name."""
    match = re.fullmatch(r"(.+)-\d+\.\d+", base.package)
    if not match:
        return [base.package]
    wanted = re.compile(rf"{re.escape(match[1])}-\d+\.\d+")
    return sorted(
        {name for record in apt.show(match[1]) for name in wanted.findall(record.get("depends", ""))}
    )


def choose(name: str, wanted: str, available: list[Offer]) -> list[Offer]:
    """The offers for ``newest``, ``all`` (each series' newest), ``7.3.y`` or a version."""
    if wanted == "all":
        newest: dict[tuple[int, int], Offer] = {}
        for one in sorted(available, key=lambda one: order(one.version)):
            newest[order(one.version)[:2]] = one
        return list(newest.values())
    if wanted == "newest":
        fitting = available
    elif match := re.fullmatch(r"(\d+\.\d+)\.y", wanted):
        fitting = [one for one in available if re.fullmatch(rf"{re.escape(match[1])}(?:\.\d+)?", one.version)]
    else:
        fitting = [one for one in available if order(one.version) == order(wanted)]
    if not fitting:
        recent = sorted({one.version for one in available}, key=order)[-8:]
        raise LabError(
            f"the machine's mirror has no {name} {wanted}",
            "it has " + (", ".join(reversed(recent)) or "none"),
            "name one of these, or a source tree or tarball of your own",
        )
    return [max(fitting, key=lambda one: order(one.version))]


def download(offer: Offer) -> Path:
    """The file of an offer, in the cache, checked against the checksum that the archive signs."""
    archive = paths.sub("downloads") / offer.file
    with lock.locked(f"download-{offer.file}"):
        if fetch.verify(archive, offer.sha256):
            return archive
        step = progress.step(f"downloading {offer.file}")
        with step, tempfile.TemporaryDirectory(prefix=".apt-", dir=archive.parent) as folder:
            PrivateApt(offer.suite, offer.kind).download(offer.package, offer.debian_version, Path(folder))
            fresh = Path(folder) / offer.file
            if not fetch.verify(fresh, offer.sha256):
                raise LabError(
                    f"the download of {offer.package} {offer.debian_version} is damaged",
                    f"its sha256 is not {offer.sha256}",
                    "run it again; if it fails again, check the mirror",
                )
            fresh.replace(archive)
    return archive


def is_path(wanted: str) -> bool:
    """Whether the argument names a tree or a tarball; UsageError when it is neither that nor a version."""
    if wanted in ("newest", "all") or re.fullmatch(r"\d+\.\d+(?:\.\d+|\.y)?(?:[-~]rc\d+)?", wanted):
        return False
    if not Path(wanted).expanduser().exists():
        raise UsageError(
            f"Bad --against {wanted}",
            "it is neither a version nor an existing file",
            "use newest, all, 7.3.y, a version such as 7.4-rc1, a source tree or a tarball",
        )
    return True


def as_source(name: str, wanted: str) -> fetch.Source:
    """Another source, to make a tree of it."""
    path = Path(wanted).expanduser() if is_path(wanted) else download(choose(name, wanted, offers(name))[0])
    content = read(path, [VERSION_FILES[name]])
    version = version_of(name, content.get(VERSION_FILES[name], b""))
    key = hashlib.sha256(str(path.absolute()).encode()).hexdigest()
    return fetch.Source(name, version, key, path.absolute(), False)


def read(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Files of a source tree, a tarball, or a tarball in a .deb; only these are unpacked."""
    wanted = set(names)
    if path.is_dir():
        return {name: (path / name).read_bytes() for name in wanted if (path / name).is_file()}
    try:
        with progress.step(f"reading {path.name}"):
            if path.suffix != ".deb":
                with tarfile.open(path, "r|*") as tar:
                    return _picked(tar, wanted)
            argv = ["dpkg-deb", "--fsys-tarfile", str(path)]
            with (
                Popen(argv, stdout=PIPE, stderr=DEVNULL) as unpacker,
                tarfile.open(fileobj=unpacker.stdout, mode="r|") as package,
            ):
                for member in package:
                    inside = package.extractfile(member) if ".tar" in member.name else None
                    if inside:
                        with tarfile.open(fileobj=inside, mode="r|*") as tar:
                            return _picked(tar, wanted)
                raise tarfile.TarError("it contains no source tarball")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LabError(
            f"cannot read {path}", str(error) or type(error).__name__, "download it again"
        ) from None


def _picked(tar: tarfile.TarFile, names: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for member in tar:
        name = member.name.removeprefix("./").partition("/")[2]
        if name in names and member.isfile() and (data := tar.extractfile(member)):
            found[name] = data.read()
    return found


# The attempt.


def attempt(series: Series, pristine: Path, files: dict[str, bytes]) -> list[Outcome]:
    """Apply each part to another source's files on top of the parts it stands on.

    A part ends at its first conflict; the parts that stand on it are not tried.
    """
    with small(series, pristine) as known, small(series, pristine, files) as repo:
        commit_parts(known, series)
        repo.git("fetch", "-q", str(known.path), "HEAD:refs/knownzero/own")
        found: dict[str, Outcome] = {}
        for part in series.parts:
            one = found[part.name] = Outcome(part.name, len(part.patches()))
            if all(found[name].state in ("clean", "3-way") for name in part.on):
                _one_part(repo, part, one)
        return list(found.values())


def _one_part(repo: Repo, part: Part, one: Outcome) -> None:
    first, *others = part.on or (BASE,)
    repo.git("checkout", "-q", "--detach", branch_of(first) if part.on else BASE)
    for other in others:
        # A part that stands on two: both are merged, as the recorded order does.
        if repo.ask("merge", "-q", "--no-edit", branch_of(other)).returncode:
            repo.ask("merge", "--abort")
            one.conflict = f"merging {other}"
            return
    for patch in part.patches():
        if repo.am([patch]).returncode == 0:
            one.clean += 1
            continue
        repo.ask("am", "--abort")
        if repo.am([patch], "--3way").returncode == 0:
            one.merged += 1
            continue
        one.conflict = patch.name[:4]
        one.files = repo.ask("diff", "--name-only", "--diff-filter=U").stdout.split() or ["file missing"]
        repo.ask("am", "--abort")
        return
    repo.git("branch", "-f", branch_of(part.name), "HEAD")


def against(name: str, wanted: str) -> list[Report]:
    """Reports for another source, or for each source series of the mirror (``all``).

    UsageError: ``wanted`` is no version and no path. LabError: the source cannot be had.
    """
    series = get(name)
    local = is_path(wanted)
    source = fetch.obtain(name)
    pristine = fetch.pristine(source)
    file = VERSION_FILES[name]
    names = series.files() | {file}
    places: list[tuple[str, Path]] = []
    if local:
        path = Path(wanted).expanduser()
        places.append((path.name, path))
    else:
        for offer in choose(name, wanted, offers(name)):
            origin = f"Debian {offer.suite}, {offer.package} {offer.debian_version}"
            try:
                places.append((origin, pristine if offer.sha256 == source.key else download(offer)))
            except LabError as error:
                if wanted != "all":
                    raise
                progress.note(f"{error.what}: left out")
    base = version_of(name, (pristine / file).read_bytes())
    reports = []
    for origin, place in places:
        content = read(place, names)
        version = version_of(name, content.get(file, b""))
        if not version:
            raise UsageError(
                f"{place} holds no {name} source",
                f"its {file} has no version",
                "name the top of a source tree",
            )
        with progress.step(f"applying the {name} series to {version}"):
            reports.append(Report(name, base, version, origin, attempt(series, pristine, content)))
    return reports


def lines(reports: list[Report]) -> list[str]:
    """The reports as a Markdown table of parts by kernels."""
    head = ["part", *[f"{one.version}" for one in reports]]
    rows = [head, ["---"] * len(head)]
    rows += [
        [part.part, *[one.outcomes[at].cell() for one in reports]]
        for at, part in enumerate(reports[0].outcomes)
    ]
    found = ["| " + " | ".join(row) + " |" for row in rows]
    found += [f"{one.version}: {one.origin}" for one in reports]
    return [*found, f"The series is for {reports[0].base}. This compares text and builds nothing."]
