# SPDX-License-Identifier: GPL-2.0
"""``kz series check --against``: which parts apply to another source, by ``git am -3``."""

import contextlib
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.core import lock, progress
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.machine.apt import PrivateApt
from lab.machine.fetch import Base
from lab.patches.parts import Part, Series, get
from lab.patches.repo import BASE, Repo, branch_of, commit_parts, small

# Suites besides the one in base.toml and the release that it is for.
SUITES = ("unstable", "experimental")


@dataclass
class Outcome:
    """One part on one source.

    Patches that need -3, and conflicting ones, which are left out, with their files.
    """

    part: str
    patches: int
    merged: int = 0
    conflicts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """clean, 3-way or conflict."""
        return "conflict" if self.conflicts else "3-way" if self.merged else "clean"

    def cell(self) -> str:
        if self.conflicts:
            first, files = next(iter(self.conflicts.items()))
            return (
                f"conflict: {len(self.conflicts)} of {self.patches}, first {first} "
                f"({', '.join(files)})"
            )
        return f"3-way ({self.merged} of {self.patches})" if self.merged else self.state


@dataclass(frozen=True)
class Report:
    """The outcomes of a series on one source."""

    name: str
    base: str
    version: str
    origin: str
    outcomes: list[Outcome]

    def data(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "outcomes": [{**asdict(one), "state": one.state} for one in self.outcomes],
        }


# Other sources.


def offers(name: str) -> list[Base]:
    """The sources of ``linux`` or ``qemu`` that the machine's mirror has.

    A suite that it lacks is left out.
    """
    base = fetch.base(name)
    found: list[Base] = []
    failed: LabError | None = None
    for suite in dict.fromkeys((base.suite, base.suite.removesuffix("-backports"), *SUITES)):
        apt = PrivateApt(suite, base.kind)
        try:
            with progress.step(f"asking the mirror for the {name} sources of Debian {suite}"):
                apt.update()
                records = [
                    (package, one) for package in _packages(apt, base) for one in apt.show(package)
                ]
        except LabError as error:
            progress.note(f"{error.what}: left out")
            failed = failed or error
            continue
        for package, record in records:
            # showsrc also lists sources that have a binary package of that name.
            if record.get("package", package) != package or "version" not in record:
                continue
            with contextlib.suppress(KeyError):
                found.append(fetch.offered(replace(base, suite=suite, package=package), record))
    if not found and failed:
        raise failed
    return found


def _packages(apt: PrivateApt, base: Base) -> list[str]:
    """The source packages of a suite: Debian's kernel has its version in the package's name."""
    if not (match := re.fullmatch(r"(.+)-\d+\.\d+", base.package)):
        return [base.package]
    depends = " ".join(record.get("depends", "") for record in apt.show(match[1]))
    return sorted(set(re.findall(rf"{re.escape(match[1])}-\d+\.\d+", depends)))


def choose(name: str, wanted: str, available: list[Base]) -> list[Base]:
    """The offers for ``newest``, ``all`` (each series' newest and its newest candidate), ``7.3.y``
    or a version.
    """
    if wanted == "all":
        newest: dict[tuple[int, int, bool], Base] = {}
        for one in sorted(available, key=lambda one: fetch.order(one.version)):
            major, minor, _, candidate = fetch.order(one.version)
            newest[major, minor, candidate == 1000] = one
        return list(newest.values())
    if wanted == "newest":
        fitting = available
    elif match := re.fullmatch(r"(\d+\.\d+)\.y", wanted):
        fitting = [
            one
            for one in available
            if re.fullmatch(rf"{re.escape(match[1])}(?:\.\d+)?", one.version)
        ]
    else:
        fitting = [one for one in available if fetch.order(one.version) == fetch.order(wanted)]
    if not fitting:
        recent = sorted({one.version for one in available}, key=fetch.order)[-8:]
        why = "it has " + (", ".join(reversed(recent)) or "none")
        fix = "name one of these, or a source tree or tarball of your own"
        raise UsageError(f"the machine's mirror has no {name} {wanted}", why, fix)
    return [max(fitting, key=lambda one: fetch.order(one.version))]


def is_path(wanted: str) -> bool:
    """Whether the argument names a tree or a tarball.

    UsageError when it is neither that nor a version.
    """
    if wanted in ("newest", "all") or re.fullmatch(r"\d+\.\d+(?:\.\d+|\.y)?(?:[-~]rc\d+)?", wanted):
        return False
    if not Path(wanted).expanduser().exists():
        why = "it is neither a version nor an existing file"
        fix = "use newest, all, 7.3.y, a version such as 7.4-rc1, a source tree or a tarball"
        raise UsageError(f"Bad source {wanted}", why, fix)
    return True


def as_source(name: str, wanted: str) -> fetch.Source:
    if is_path(wanted):
        return fetch.local(name, Path(wanted).expanduser().absolute(), "source")
    return download(choose(name, wanted, offers(name))[0])


def download(offer: Base) -> fetch.Source:
    with lock.locked(f"download-{offer.file}"), progress.step(f"downloading {offer.file}"):
        archive = fetch.download(PrivateApt(offer.suite, offer.kind), offer)
    return fetch.Source(offer.name, offer.version, offer.sha256, archive, False)


# The attempt.


def attempt(series: Series, pristine: Path, other: Path) -> list[Outcome]:
    """Apply each part to another source tree on top of the parts it stands on.

    A conflicting patch is left out.
    """
    with small(series, pristine) as known, small(series, other) as repo:
        commit_parts(known, series)
        repo.git("fetch", "-q", str(known.path), "HEAD:refs/knownzero/own")
        version = fetch.tree_version(series.name, other)
        return [_one_part(repo, part, part.patches(version)) for part in series.parts]


def _one_part(repo: Repo, part: Part, patches: list[Path]) -> Outcome:
    found = Outcome(part.name, len(patches))
    first, *others = [branch_of(name) for name in part.on] or [BASE]
    repo.git("checkout", "-q", "--detach", first)
    for other in others:
        # A part that stands on two: both are merged, as the recorded order does.
        if repo.ask("merge", "-q", "--no-edit", other).returncode:
            found.conflicts[other] = _unmerged(repo, "merge")
    for patch in patches:
        if repo.am([patch]).returncode == 0:
            continue
        repo.ask("am", "--abort")
        if repo.am([patch], "--3way").returncode == 0:
            found.merged += 1
        else:
            found.conflicts[patch.name[:4]] = _unmerged(repo, "am")
    repo.git("branch", "-f", branch_of(part.name), "HEAD")
    return found


def _unmerged(repo: Repo, verb: str) -> list[str]:
    names = repo.ask("diff", "--name-only", "--diff-filter=U").stdout.split()
    repo.ask(verb, "--abort")
    return names or ["a file is missing"]


def against(name: str, wanted: str) -> list[Report]:
    """Reports for another source, or for each source series of the mirror (``all``).

    LabError without a source.
    """
    series, local = get(name), is_path(wanted)
    own = fetch.obtain(name)
    pristine = fetch.pristine(own)
    found: list[tuple[str, fetch.Source]] = []
    if local:
        found.append((Path(wanted).name, as_source(name, wanted)))
    else:
        for offer in choose(name, wanted, offers(name)):
            origin = f"Debian {offer.suite}, {offer.package} {offer.debian_version}"
            try:
                found.append((origin, own if offer.sha256 == own.key else download(offer)))
            except LabError as error:
                if wanted != "all":
                    raise
                progress.note(f"{error.what}: left out")
    base = fetch.tree_version(name, pristine)
    reports = []
    for origin, source in found:
        tree = source.archive if source.archive.is_dir() else fetch.pristine(source)
        version = fetch.tree_version(name, tree)
        with progress.step(f"applying the {name} series to {version}"):
            reports.append(Report(name, base, version, origin, attempt(series, pristine, tree)))
    return reports


def lines(reports: list[Report]) -> list[str]:
    """The reports as a Markdown table of parts by kernels."""
    rows = [["part", *(one.version for one in reports)], ["---"] * (len(reports) + 1)]
    for outcomes in zip(*(one.outcomes for one in reports), strict=True):
        rows.append([outcomes[0].part, *(one.cell() for one in outcomes)])
    found = ["| " + " | ".join(row) + " |" for row in rows]
    found += [f"{one.version}: {one.origin}" for one in reports]
    return [*found, f"The series is for {reports[0].base}. This compares text and builds nothing."]
