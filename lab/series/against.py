# SPDX-License-Identifier: GPL-2.0
"""``kz series check --against``: what becomes of the series on another source. It reports and does not judge."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lab.core import lock, paths, progress
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.machine.apt import PrivateApt
from lab.series import series

# Where new versions come first; the suite of base.toml is looked at besides.
SUITES = ("unstable", "experimental")
VERSION_FILES = {"linux": "Makefile", "qemu": "VERSION"}
# From what needs no thought to what needs most.
HOW = ("as is", "offset", "there already", "merged", "conflict", "missing")
WORDS = {
    "as is": "as they are",
    "offset": "at other lines",
    "there already": "there already",
    "merged": "after a three-way merge",
    "conflict": "with conflicts",
    "missing": "to files that are not there",
}


@dataclass(frozen=True)
class Offer:
    """A source that the machine's mirror has. ``version`` is upstream's: 7.3.4, 7.4-rc1."""

    version: str
    debian_version: str
    suite: str
    kind: str
    package: str
    file: str
    sha256: str


@dataclass(frozen=True)
class Other:
    """Another source: its version, where it is from, and the content of the files that were asked for."""

    version: str
    origin: str
    files: dict[str, bytes]


@dataclass(frozen=True)
class FileOutcome:
    """What became of one file of a patch. ``lines``: how far off; ``places``: how many conflicts."""

    name: str
    how: str
    lines: int = 0
    places: int = 0

    def __str__(self) -> str:
        if self.how == "offset":
            return f"{self.name} ({self.lines} {'line' if self.lines == 1 else 'lines'} off)"
        if self.how == "conflict":
            return f"{self.name} (conflict in {self.places} {'place' if self.places == 1 else 'places'})"
        return f"{self.name} ({'not there' if self.how == 'missing' else self.how})"


@dataclass(frozen=True)
class PatchOutcome:
    """What became of one patch: as the worst of its files."""

    patch: str
    how: str
    files: list[FileOutcome]


@dataclass(frozen=True)
class Report:
    """What becomes of a series on a source. ``age``: newer, older or same, by its version, as the base's.

    ``changed``: files the series touches that are not as in the base; ``taken``: new files of the series whose
    place is taken; ``newest``: the newest version of the mirror, where one was asked.
    """

    name: str
    series: str
    base: str
    version: str
    origin: str
    age: str
    touched: int
    changed: list[str]
    taken: list[str]
    patches: list[PatchOutcome]
    newest: str = ""
    when: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))

    def counts(self) -> dict[str, int]:
        """How many patches there are of each outcome, the harmless first."""
        found = Counter(one.how for one in self.patches)
        return {how: found[how] for how in HOW if found[how]}

    def summary(self) -> str:
        """One sentence without its subject: ``all 3 patches apply as they are``."""
        counts = self.counts()
        if not self.patches:
            text = "there are no patches"
        elif list(counts) == ["as is"]:
            text = f"all {len(self.patches)} patches apply as they are"
        else:
            (first, many), *rest = counts.items()
            text = f"{many} of {len(self.patches)} patches apply {WORDS[first]}"
            text += "".join(f", {number} {WORDS[how]}" for how, number in rest)
        if self.taken:
            text += f"; {len(self.taken)} of its new files are there already"
        return text


def order(version: str) -> tuple[int, int, int, int]:
    """What versions sort by: ``7.4-rc1`` comes before ``7.4`` and ``7.4.0``, and after ``7.3.9``."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[-~]rc(\d+))?", version)
    if not match:
        return (0, 0, 0, 0)
    major, minor, point, candidate = match.groups()
    return int(major), int(minor), int(point or 0), int(candidate) if candidate else 1000


def upstream(debian_version: str) -> str:
    """``7.3~rc7-1~exp1`` -> ``7.3-rc7``; ``1:10.0.13+ds-0+deb13u1`` -> ``10.0.13``."""
    match = re.match(r"(?:\d+:)?(\d+(?:\.\d+)*)(?:~(rc\d+))?", debian_version)
    if not match:
        return debian_version
    return match[1] + (f"-{match[2]}" if match[2] else "")


def version_of(name: str, content: bytes) -> str:
    """The version that a source's Makefile or VERSION says, with -rc; empty when it says none."""
    text = content.decode(errors="replace")
    if name == "qemu":
        return text.strip()
    fields = dict(
        re.findall(r"^(VERSION|PATCHLEVEL|SUBLEVEL|EXTRAVERSION) =[ \t]*(\S*)$", text, re.MULTILINE)
    )
    if not fields.get("VERSION") or not fields.get("PATCHLEVEL"):
        return ""
    point, extra = fields.get("SUBLEVEL", "0"), fields.get("EXTRAVERSION", "")
    if extra.startswith("-rc") and point == "0":
        return f"{fields['VERSION']}.{fields['PATCHLEVEL']}{extra}"
    return f"{fields['VERSION']}.{fields['PATCHLEVEL']}.{point or 0}{extra}"


# Where another source comes from.


def offers(name: str) -> list[Offer]:
    """The sources of ``linux`` or ``qemu`` that the machine's mirror has; LabError when it cannot be asked.

    They are packages of the kind that base.toml names. A suite that the mirror does not carry is left out, with
    a note.
    """
    base = fetch.base(name)
    found: list[Offer] = []
    failed: list[LabError] = []
    for suite in dict.fromkeys((base.suite, *SUITES)):
        apt = PrivateApt(suite, base.kind)
        try:
            with progress.step(f"asking the mirror which {name} Debian {suite} has"):
                apt.update()
                packages = _packages(apt, base)
                records = [(package, record) for package in packages for record in apt.show(package)]
        except LabError as error:
            progress.note(f"{error.what}: left out")
            failed.append(error)
            continue
        for package, record in records:
            # showsrc also names sources that have a binary package of that name.
            if record.get("package", package) != package or "version" not in record:
                continue
            with contextlib.suppress(KeyError):
                file, checksum = fetch.record_file(record, base.kind)
                version = record["version"]
                found.append(Offer(upstream(version), version, suite, base.kind, package, file, checksum))
    if not found and failed:
        raise failed[0]
    return found


def _packages(apt: PrivateApt, base: fetch.Base) -> list[str]:
    """The packages that hold the source in a suite: Debian's kernel has its version in the package's name."""
    match = re.fullmatch(r"(.+)-\d+\.\d+", base.package)
    if not match:
        return [base.package]
    wanted = re.compile(rf"{re.escape(match[1])}-\d+\.\d+")
    found = {name for record in apt.show(match[1]) for name in wanted.findall(record.get("depends", ""))}
    return sorted(found)


def choose(name: str, wanted: str, available: list[Offer]) -> Offer:
    """The offer for ``newest``, ``7.3.y`` or a version; LabError when the mirror does not have it."""
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
            "the newest it has: " + (", ".join(reversed(recent)) or "none at all"),
            "name one of these, or a source tree or tarball of your own",
        )
    return max(fitting, key=lambda one: order(one.version))


def download(offer: Offer) -> Path:
    """The file of an offer, in the cache, checked against the checksum that the archive signs."""
    archive = paths.sub("downloads") / offer.file
    with lock.locked(f"download-{offer.file}"):
        if fetch.verify(archive, offer.sha256):
            return archive
        with (
            progress.step(f"downloading {offer.file}"),
            tempfile.TemporaryDirectory(prefix=".apt-", dir=archive.parent) as folder,
        ):
            PrivateApt(offer.suite, offer.kind).download(offer.package, offer.debian_version, Path(folder))
            fresh = Path(folder) / offer.file
            if not fetch.verify(fresh, offer.sha256):
                raise LabError(
                    f"the download of {offer.package} {offer.debian_version} is not what was asked for",
                    f"its sha256 is not {offer.sha256}",
                    "run it again; if it stays so, check the mirror",
                )
            fresh.replace(archive)
    return archive


def is_path(wanted: str) -> bool:
    """Whether ``--against`` names a tree or a tarball; UsageError when it names nothing at all."""
    if wanted == "newest" or re.fullmatch(r"\d+\.\d+(?:\.\d+|\.y)?(?:[-~]rc\d+)?", wanted):
        return False
    if not Path(wanted).expanduser().exists():
        raise UsageError(
            f"Bad --against {wanted}",
            "it is neither a version nor a file that exists",
            "say newest, 7.3.y, a version such as 7.4-rc1, or name a source tree or a tarball",
        )
    return True


def from_path(name: str, path: Path, names: Iterable[str]) -> Other:
    """Files of a source tree (as they are on disk) or of a tarball."""
    wanted = {*names, VERSION_FILES[name]}
    files = _of_folder(path, wanted) if path.is_dir() else _of_archive(path, wanted)
    version = version_of(name, files.get(VERSION_FILES[name], b""))
    if not version:
        raise UsageError(
            f"{path} holds no {name} source",
            f"its {VERSION_FILES[name]} does not say a version",
            "name the top of a source tree, or a tarball of one",
        )
    return Other(version, path.name, files)


def _of_folder(folder: Path, names: set[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _of_archive(archive: Path, names: set[str]) -> dict[str, bytes]:
    """One pass through a tarball, or the one in a .deb: a whole kernel is not unpacked for a hundred files."""
    try:
        with progress.step(f"reading {archive.name}"):
            if archive.suffix != ".deb":
                with tarfile.open(archive, "r|*") as tar:
                    return _picked(tar, names)
            argv = ["dpkg-deb", "--fsys-tarfile", str(archive)]
            with (
                subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as unpacker,
                tarfile.open(fileobj=unpacker.stdout, mode="r|") as package,
            ):
                for member in package:
                    inside = package.extractfile(member) if ".tar" in member.name else None
                    if inside:
                        with tarfile.open(fileobj=inside, mode="r|*") as tar:
                            return _picked(tar, names)
                raise tarfile.TarError("no source tarball is inside")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LabError(
            f"cannot read {archive}", str(error) or type(error).__name__, "get the archive again"
        ) from None


def _picked(tar: tarfile.TarFile, names: set[str]) -> dict[str, bytes]:
    """The content of the named files; what stands before the first slash does not count."""
    found: dict[str, bytes] = {}
    for member in tar:
        name = member.name.removeprefix("./").partition("/")[2]
        if name in names and member.isfile() and (data := tar.extractfile(member)):
            found[name] = data.read()
    return found


# What becomes of the patches there.


def _write(folder: Path, name: str, data: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def _read(folder: Path, name: str) -> bytes | None:
    path = folder / name
    return path.read_bytes() if path.is_file() else None


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=series.git_environment(folder.parent),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def offsets(said: str) -> dict[str, int]:
    """How many lines off hunks were put, at most, by file: from what ``git apply --verbose`` says."""
    found: dict[str, int] = {}
    name = ""
    for line in said.splitlines():
        if match := re.match(r"Checking patch (?:.* => )?(.+)\.\.\.$", line):
            name = match[1]
        elif match := re.match(r"Hunk #\d+ succeeded at \d+ \(offset (-?\d+) lines?\)", line):
            found[name] = max(found.get(name, 0), abs(int(match[1])))
    return found


def _one_file(patch: Path, name: str, folder: Path, before: bytes | None, after: bytes | None) -> FileOutcome:
    """Take one file of a patch that as a whole does not fit; it is left as the series would have it."""
    now = _read(folder, name)
    if now == after:
        return FileOutcome(name, "there already")
    only = ("apply", "-p1", "--whitespace=nowarn", f"--include={name}")
    done = _git(folder, *only, "--verbose", str(patch))
    if done.returncode == 0:
        off = offsets(done.stderr.decode(errors="replace")).get(name, 0)
        return FileOutcome(name, "offset" if off else "as is", off)
    if _git(folder, *only, "--reverse", "--check", str(patch)).returncode == 0:
        return FileOutcome(name, "there already")
    if now is None:
        return FileOutcome(name, "missing")
    if before is None or after is None:
        # Made or removed by the patch, and there is something else in that place.
        if after is None:
            (folder / name).unlink()
        else:
            _write(folder, name, after)
        return FileOutcome(name, "conflict", places=1)
    with tempfile.TemporaryDirectory() as scratch:
        for part, data in (("now", now), ("before", before), ("after", after)):
            (Path(scratch) / part).write_bytes(data)
        plain = _git(Path(scratch), "merge-file", "-p", "now", "before", "after")
        if plain.returncode == 0:
            _write(folder, name, plain.stdout)
            return FileOutcome(name, "merged")
        # What the patches after this one expect, so that they are tried as well.
        settled = _git(Path(scratch), "merge-file", "-p", "--theirs", "now", "before", "after")
    _write(folder, name, settled.stdout if settled.returncode == 0 else after)
    # Its exit code is the number of conflicts; above 127 it could not merge at all.
    return FileOutcome(name, "conflict", places=plain.returncode if plain.returncode < 128 else 1)


def attempt(what: series.Series, pristine: Path, other: Other) -> tuple[list[PatchOutcome], list[str]]:
    """Apply the series patch by patch to another source: what became of each, and which new files were there.

    What does not fit is merged three ways with the base, as ``git am -3`` does; in a conflict the side of the
    series is taken, so that the rest can be tried. LabError when the series does not fit its own base.
    """
    patches = what.patches()
    names = {name for patch in patches for name in series.touched(patch.read_bytes())}
    fresh = what.new_files()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix=".against-", dir=paths.sub("work")) as scratch:
        own, theirs = Path(scratch) / "base", Path(scratch) / "other"
        own.mkdir()
        theirs.mkdir()
        for name in names:
            if (pristine / name).is_file():
                _write(own, name, (pristine / name).read_bytes())
            if name in other.files:
                _write(theirs, name, other.files[name])
        for name in fresh:
            for folder in (own, theirs):
                _write(folder, name, (what.new_root / name).read_bytes())
        for patch in patches:
            touched = series.touched(patch.read_bytes())
            before = {name: _read(own, name) for name in touched}
            if reason := series.apply_patch(patch, own):
                raise LabError(
                    f"{patch.name} does not fit the source the series is written for",
                    reason,
                    f"see what `kz series check {what.name}` says",
                )
            done = _git(theirs, "apply", "-p1", "--whitespace=nowarn", "--verbose", str(patch))
            if done.returncode == 0:
                off = offsets(done.stderr.decode(errors="replace"))
                files = [FileOutcome(n, "offset" if off.get(n) else "as is", off.get(n, 0)) for n in touched]
            else:
                files = [_one_file(patch, n, theirs, before[n], _read(own, n)) for n in touched]
            worst = max((one.how for one in files), key=HOW.index, default="as is")
            outcomes.append(PatchOutcome(patch.name, worst, files))
    return outcomes, sorted(name for name in fresh if name in other.files)


def against(name: str, wanted: str) -> Report:
    """Obtain another source and report what becomes of the series there; the report is remembered.

    ``wanted``: ``newest``, ``7.3.y``, a version, or the path of a tree or a tarball. UsageError when it is none
    of these; LabError when the source cannot be had.
    """
    what = series.get(name)
    local = is_path(wanted)
    source = fetch.obtain(name)
    pristine = fetch.pristine(source)
    names = {n for patch in what.patches() for n in series.touched(patch.read_bytes())}
    newest = ""
    if local:
        other = from_path(name, Path(wanted).expanduser(), names | set(what.new_files()))
    else:
        available = offers(name)
        offer = choose(name, wanted, available)
        newest = max((one.version for one in available), key=order)
        # The very source the series is written for is unpacked already.
        place = pristine if offer.sha256 == source.key else download(offer)
        found = from_path(name, place, names | set(what.new_files()))
        other = Other(
            found.version, f"Debian {offer.suite}, {offer.package} {offer.debian_version}", found.files
        )
    base = version_of(name, (pristine / VERSION_FILES[name]).read_bytes())
    with progress.step(f"applying the {name} series to {other.version}"):
        outcomes, taken = attempt(what, pristine, other)
    changed = sorted(n for n in names if _read(pristine, n) != other.files.get(n))
    here, there = order(base), order(other.version)
    age = "same" if here == there else "newer" if there > here else "older"
    report = Report(
        name, what.key(), base, other.version, other.origin, age, len(names), changed, taken, outcomes, newest
    )
    lock.write_atomically(_memory(name, other.version), to_json(report))
    return report


def to_json(report: Report) -> str:
    """The report with its counts, for programs."""
    return json.dumps({**asdict(report), "counts": report.counts(), "summary": report.summary()}) + "\n"


def _memory(name: str, version: str) -> Path:
    return paths.sub("against") / f"{name}-{re.sub(r'[^0-9A-Za-z.-]', '_', version)}.json"


def remembered(what: series.Series) -> list[Report]:
    """The reports about this very series on its base's version or newer ones, the newest first."""
    found = []
    for file in paths.sub("against").glob(f"{what.name}-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(file.read_text(encoding="utf-8"))
            if data["series"] != what.key() or data["age"] == "older":
                continue
            for extra in ("counts", "summary"):
                data.pop(extra, None)
            data["patches"] = [
                PatchOutcome(one["patch"], one["how"], [FileOutcome(**part) for part in one["files"]])
                for one in data["patches"]
            ]
            found.append(Report(**data))
    return sorted(found, key=lambda one: order(one.version), reverse=True)


def lines(report: Report) -> list[str]:
    """The report for people."""
    ages = {
        "same": f"the version that the series is written for ({report.base})",
        "newer": f"newer than {report.base}, which the series is written for",
        "older": f"OLDER than {report.base}, which the series is written for",
    }
    found = [f"{report.name} {report.version} ({report.origin}): {ages[report.age]}"]
    if report.newest and order(report.newest) <= order(report.base):
        found.append(f"The machine's mirror has nothing newer than {report.base}.")
    elif report.newest and order(report.newest) > order(report.version):
        found.append(f"The newest that the machine's mirror has is {report.newest}.")
    for one in report.patches:
        if one.how != "as is":
            # Beside a conflict nobody asks for lines that moved.
            least = min(HOW.index(one.how), HOW.index("merged"))
            files = ", ".join(str(part) for part in one.files if HOW.index(part.how) >= least)
            found.append(f"  {one.how:14}{one.patch}: {files}")
    found += [f"  new file there already: {name}" for name in report.taken]
    found.append(
        f"{len(report.changed)} of the {report.touched} files that the series changes are not as in {report.base}."
    )
    if any(one.how == "conflict" for one in report.patches):
        found.append(
            "In a conflict the side of the series was taken, so that the patches after it could be tried."
        )
    summary = report.summary()
    found.append(f"{summary[0].upper()}{summary[1:]}. Only text was compared: nothing was built.")
    return found
