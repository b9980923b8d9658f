# SPDX-License-Identifier: GPL-2.0
"""``kz series check --against``: which parts apply to another source, by ``git am -3``."""

import contextlib
import re
from dataclasses import dataclass, replace
from pathlib import Path

from lab.core import lock, progress
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.machine.apt import PrivateApt
from lab.machine.fetch import Base
from lab.patches.parts import Part, Series, get
from lab.patches.repo import BASE, Repo, branch_of, commit_parts, small
from lab.report.table import Table

# Suites besides the one in base.toml and the release that it is for.
SUITES = ("unstable", "experimental")
CLEAN = "clean"


@dataclass(frozen=True)
class Report:
    """A series on one source: CLEAN, or what git merges, or the conflicts, by part."""

    version: str
    origin: str
    tree: Path
    parts: dict[str, str]


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
    """The offers for ``newest``, ``all`` (each series' newest and its newest candidate), or a
    version.
    """
    by_version = {fetch.order(one.version): one for one in available}
    ordered = [by_version[version] for version in sorted(by_version)]
    if wanted == "all":
        return list(
            {(*key[:2], key[3] == 1000): by_version[key] for key in sorted(by_version)}.values()
        )
    fitting = [one for one in ordered if wanted in ("newest", one.version)]
    if not fitting:
        why = "it has " + (", ".join(one.version for one in ordered[-8:]) or "none")
        fix = "name one of these, or a source tree or tarball of your own"
        raise UsageError(f"the machine's mirror has no {name} {wanted}", why, fix)
    return fitting[-1:]


def sources(name: str, wanted: str) -> list[tuple[str, fetch.Source]]:
    """What ``wanted`` names, with the origin of each: a tree, a tarball, or those of ``choose``."""
    if Path(wanted).expanduser().exists():
        path = Path(wanted).expanduser().absolute()
        return [(path.name, fetch.local(name, path, "source"))]
    found = []
    for offer in choose(name, wanted, offers(name)):
        with lock.locked(f"download-{offer.file}"), progress.step(f"downloading {offer.file}"):
            archive = fetch.download(PrivateApt(offer.suite, offer.kind), offer)
        origin = f"Debian {offer.suite}, {offer.package} {offer.debian_version}"
        found.append(
            (origin, fetch.Source(name, offer.version, offer.sha256, archive, from_debian=False))
        )
    return found


# The attempt.


def attempt(series: Series, pristine: Path, other: Path) -> dict[str, str]:
    """Apply each part to another source tree on top of the parts it stands on.

    A conflicting patch is left out.
    """
    with small(series, pristine) as known, small(series, other) as repo:
        commit_parts(known, series)
        repo.git("fetch", "-q", str(known.path), "HEAD:refs/knownzero/own")
        version = fetch.tree_version(series.name, other)
        return {part.name: _one_part(repo, part, part.patches(version)) for part in series.parts}


def _one_part(repo: Repo, part: Part, patches: list[Path]) -> str:
    merged, conflicts = 0, []
    first, *others = [branch_of(name) for name in part.on] or [BASE]
    repo.git("checkout", "-q", "--detach", first)
    for other in others:
        # A part that stands on two: both are merged, as the recorded order does.
        if repo.ask("merge", "-q", "--no-edit", other).returncode:
            conflicts.append(f"{other} ({_unmerged(repo, 'merge')})")
    for patch in patches:
        if repo.am([patch]).returncode == 0:
            continue
        repo.ask("am", "--abort")
        if repo.am([patch], "--3way").returncode == 0:
            merged += 1
        else:
            conflicts.append(f"{patch.name[:4]} ({_unmerged(repo, 'am')})")
    repo.git("branch", "-f", branch_of(part.name), "HEAD")
    if conflicts:
        return f"conflict: {len(conflicts)} of {len(patches)}, first {conflicts[0]}"
    return f"3-way ({merged} of {len(patches)})" if merged else CLEAN


def _unmerged(repo: Repo, verb: str) -> str:
    names = repo.ask("diff", "--name-only", "--diff-filter=U").stdout.split()
    repo.ask(verb, "--abort")
    return ", ".join(names) or "a file is missing"


def against(name: str, wanted: str) -> list[Report]:
    """Reports for another source, or for each source series of the mirror (``all``)."""
    series, pristine = get(name), fetch.pristine(fetch.obtain(name))
    reports = []
    for origin, source in sources(name, wanted):
        tree = source.archive if source.archive.is_dir() else fetch.pristine(source)
        version = fetch.tree_version(name, tree)
        with progress.step(f"applying the {name} series to {version}"):
            reports.append(Report(version, origin, tree, attempt(series, pristine, tree)))
    return reports


def lines(reports: list[Report]) -> list[str]:
    """The reports as a table of parts by kernels."""
    rows = [[part, *(one.parts[part] for one in reports)] for part in reports[0].parts]
    table = Table(["part", *(one.version for one in reports)], rows)
    origins = [f"{one.version}: {one.origin}" for one in reports]
    return [*table.text(), *origins, "This compares text and builds nothing."]
