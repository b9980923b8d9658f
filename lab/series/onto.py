# SPDX-License-Identifier: GPL-2.0
"""``kz series rebase linux --onto 6.12``: the parts of linux/lts; fixes-* are written anew."""

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from lab.boot.guest import boot
from lab.boot.spec import BootSpec
from lab.build import linux
from lab.core import lock, paths, progress
from lab.core.errors import TestFailure, UsageError
from lab.machine import fetch
from lab.patches.parts import Part, get, lts
from lab.patches.repo import Repo, branch_of, commit_parts, formatted, small
from lab.series import against
from lab.series.bugs import Bug, registry

# Of a guest with a balloon that reports free pages. Most of these 128 MiB must not be zeroed again.
JOB = """uname -r; fillfree; sleep 5; alloc_once --size 128 --verify --mode touch_all >&2
awk '$1 == "pgzeroed_skip" {skip = $2} END {exit skip < 16384}' /proc/vmstat"""


@dataclass(frozen=True)
class Ported:
    """What became of a patch."""

    patch: str
    state: str  # as it is, 3-way, back-port, left out, conflict
    why: str = ""

    def line(self) -> str:
        return f"{self.patch:17} {self.state}{': ' if self.why else ''}{self.why}"


@dataclass(frozen=True)
class Report:
    """The patches on one source, and the release of the kernel that booted; empty without one."""

    version: str
    debian: str
    patches: list[Ported]
    booted: str = ""

    def data(self) -> dict[str, object]:
        return asdict(self)

    def lines(self) -> list[str]:
        end = f"built and booted: {self.booted}" if self.booted else "not built"
        return [f"{self.version} ({self.debian}): {end}", *(one.line() for one in self.patches)]


def folder(series: str) -> Path:
    return paths.REPO / "linux" / "lts" / series


def onto(series: str) -> Report:
    """Write the parts fixes-* for the newest SERIES.y into linux/lts/SERIES, build and boot it.

    A patch that does not apply exactly is taken from linux/lts/SERIES if it is there. With a
    conflict, nothing is written. The other parts of linux/lts/SERIES are only applied.
    """
    if not re.fullmatch(r"\d+\.\d+", series):
        why, fix = "it is not the name of a stable series", "write it as 6.12"
        raise UsageError(f"Bad --onto: {series}", why, fix)
    if (own := fetch.base("linux").series) == series:
        why, fix = "the parts are written for it", "kz tree linux"
        raise UsageError(f"Bad --onto: {series}", why, fix)
    bugs = {bug.file: bug for bug in registry()}
    offer = against.choose("linux", f"{series}.y", against.offers("linux"))[0]
    source = against.download(offer)
    pristine, base = fetch.pristine(source), fetch.pristine(fetch.obtain("linux"))
    fixes = get("linux", {bug.part for bug in bugs.values()})
    also = [patch for part in lts(series).parts for patch in part.patches()]
    found: list[Ported] = []
    mails: dict[str, dict[str, bytes]] = {}
    with (
        progress.step(f"applying the fixes of {own} to {source.version}"),
        small(fixes, base) as known,
        small(fixes, pristine, also) as repo,
    ):
        commit_parts(known, fixes)
        repo.git("fetch", "-q", str(known.path), "HEAD:refs/knownzero/own")
        for part in fixes.parts:
            first = repo.find("HEAD")
            names = _port(repo, part, series, bugs, found)
            made = formatted(repo, first, "HEAD").values()
            mails[part.name] = dict(zip(names, made, strict=True))
            repo.git("branch", "-f", branch_of(part.name), "HEAD")
    report = Report(source.version, f"{offer.package} {offer.debian_version}", found)
    if any(one.state == "conflict" for one in found):
        return report
    _write(series, mails)
    return replace(report, booted=_boot(source))


def _port(
    repo: Repo, part: Part, series: str, bugs: dict[Path, Bug], found: list[Ported]
) -> list[str]:
    """Apply the patches of a part that the source needs; returns the names of those."""
    names = []
    for patch in part.patches():
        bug = bugs[patch]
        if why := _needless(bug, series):
            found.append(Ported(bug.name, "left out", why))
            continue
        state, why = _apply(repo, patch, folder(series) / part.name / patch.name)
        if state != "conflict":
            names.append(patch.name)
        found.append(Ported(bug.name, state, why))
    return names


def _apply(repo: Repo, patch: Path, ours: Path) -> tuple[str, str]:
    """Commit a patch, or ``ours`` instead; returns the state of a ``Ported`` and its reason."""
    if repo.am([patch]).returncode == 0:
        return "as it is", ""
    repo.ask("am", "--abort")
    if ours.is_file():
        if repo.am([ours], "--3way").returncode == 0:
            return "back-port", ""
    elif repo.am([patch], "--3way").returncode == 0:
        return "3-way", f"read {ours.relative_to(paths.REPO)}, which git has merged"
    files = repo.git("diff", "--name-only", "--diff-filter=U").split()
    repo.ask("am", "--abort")
    return "conflict", f"{' '.join(files)}; write {ours.relative_to(paths.REPO)}"


def _needless(bug: Bug, series: str) -> str:
    if bug.since and fetch.order(bug.since) > fetch.order(series):
        return f"the bug is in Linux since {bug.since}"
    return "it fixes no bug" if not bug.since and not bug.needed_by else ""


def _write(series: str, mails: dict[str, dict[str, bytes]]) -> None:
    for part, patches in mails.items():
        root = folder(series) / part
        root.mkdir(parents=True, exist_ok=True)
        for old in set(root.glob("*.patch")) - {root / name for name in patches}:
            old.unlink()
        for name, data in patches.items():
            lock.write_if_changed(root / name, data)
        lock.write_if_changed(root / "series", "".join(f"{name}\n" for name in patches).encode())


# The kernel.


def _boot(source: fetch.Source) -> str:
    """Build the source with all parts of linux/lts, as far as it has the options, and boot it."""
    os.environ[fetch.variable("linux")] = str(source.archive)
    kernel = linux.build_linux("knownzero")
    device = "virtio-balloon-pci,free-page-reporting=on"
    spec = BootSpec(kernel, memory="512M", devices=[device], command=["sh", "-ec", JOB])
    with progress.step(f"booting linux {source.version}"):
        result = boot(spec)
    if result.exit_code:
        why = f"{result.stderr[-500:]} (console: {result.console})"
        raise TestFailure(f"{source.version} fails its job", why, "read the console")
    return result.stdout.split()[0]
