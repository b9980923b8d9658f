# SPDX-License-Identifier: GPL-2.0
"""What becomes of a series on another source is told patch by patch, and never passes for what it is not."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import ClassVar

import pytest

from lab.core.errors import MACHINE, USAGE, LabError, UsageError
from lab.machine import fetch
from lab.series import against, series

MAKEFILE = "VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\nEXTRAVERSION =\n"
ALPHA = [f"alpha {i}\n" for i in range(60)]
BETA = [f"beta {i}\n" for i in range(20)]
BASE = {
    "Makefile": MAKEFILE,
    "mm/alpha.c": "".join(ALPHA),
    "mm/beta.c": "".join(BETA),
    "mm/gone.c": "int gone;\n",
}


def with_line(lines: list[str], number: int, text: str) -> list[str]:
    return [*lines[:number], text, *lines[number + 1 :]]


def diff(name: str, before: list[str], after: list[str], folder: Path) -> str:
    """A patch in git form."""
    for part, lines in (("a", before), ("b", after)):
        path = folder / part / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))
    done = subprocess.run(
        ["git", "diff", "--no-index", "--no-prefix", "--full-index", f"a/{name}", f"b/{name}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return done.stdout


@pytest.fixture
def pristine(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small source for which a series of three patches and one new file is written."""
    folder = tmp_path / "source"
    for name, text in BASE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    one = with_line(ALPHA, 30, "one\n")
    two = with_line(one, 50, "two\n")
    patches = {
        "0001-one.patch": diff("mm/alpha.c", ALPHA, one, tmp_path / "diff"),
        "0002-two.patch": diff("mm/alpha.c", one, two, tmp_path / "diff")
        + diff("mm/beta.c", BETA, with_line(BETA, 10, "two\n"), tmp_path / "diff"),
        "0003-gone.patch": diff("mm/gone.c", ["int gone;\n"], ["int still;\n"], tmp_path / "diff"),
    }
    root = repo / "linux"
    (root / "patches").mkdir()
    for name, text in patches.items():
        (root / "patches" / name).write_text(f"Subject: {name}\n\nWhy.\n\n{text}")
    (root / "patches" / "series").write_text("".join(f"{name}\n" for name in patches))
    (root / "new" / "mm").mkdir(parents=True)
    (root / "new" / "mm" / "new.c").write_text("int new;\n")
    return folder


def other(tmp_path: Path, changes: dict[str, str | None], version: str = "") -> Path:
    """Another source: the base with some files changed, or gone."""
    folder = tmp_path / "other"
    shutil.rmtree(folder, ignore_errors=True)
    files: dict[str, str | None] = {**BASE, **changes}
    if version:
        files["Makefile"] = MAKEFILE.replace("SUBLEVEL = 4", f"SUBLEVEL = {version}")
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder


def outcomes(report: against.Report) -> dict[str, str]:
    return {one.patch[:4]: one.how for one in report.patches}


@pytest.mark.usefixtures("pristine")
def test_the_same_source_takes_all_as_it_is(tmp_path: Path) -> None:
    report = against.against("linux", str(other(tmp_path, {})))
    assert report.counts() == {"as is": 3}
    assert report.summary() == "all 3 patches apply as they are"
    assert (report.age, report.changed, report.taken) == ("same", [], [])
    assert "nothing was built" in against.lines(report)[-1]


@pytest.mark.usefixtures("pristine")
def test_lines_that_moved_are_told(tmp_path: Path) -> None:
    moved = "".join(["/* more */\n"] * 3 + ALPHA)
    report = against.against("linux", str(other(tmp_path, {"mm/alpha.c": moved}, "5")))
    assert (report.version, report.age, report.changed) == ("7.3.5", "newer", ["mm/alpha.c"])
    assert outcomes(report) == {"0001": "offset", "0002": "offset", "0003": "as is"}
    assert "  offset        0001-one.patch: mm/alpha.c (3 lines off)" in against.lines(report)


@pytest.mark.usefixtures("pristine")
def test_a_changed_context_is_merged_and_said_so(tmp_path: Path) -> None:
    # Within the patch's context, but not the line that it changes.
    near = "".join(with_line(ALPHA, 28, "something else\n"))
    report = against.against("linux", str(other(tmp_path, {"mm/alpha.c": near}, "9")))
    assert outcomes(report) == {"0001": "merged", "0002": "as is", "0003": "as is"}


@pytest.mark.usefixtures("pristine")
def test_a_conflict_is_counted_and_the_rest_is_tried(tmp_path: Path) -> None:
    clash = "".join(with_line(ALPHA, 30, "something else\n"))
    report = against.against(
        "linux", str(other(tmp_path, {"mm/alpha.c": clash, "mm/new.c": "int mine;\n"}, "9"))
    )
    # The second patch changes the same file further down, and does not suffer for the first.
    assert outcomes(report) == {"0001": "conflict", "0002": "as is", "0003": "as is"}
    assert report.patches[0].files == [against.FileOutcome("mm/alpha.c", "conflict", places=1)]
    assert report.taken == ["mm/new.c"]
    text = "\n".join(against.lines(report))
    assert "conflict      0001-one.patch: mm/alpha.c (conflict in 1 place)" in text
    assert "new file there already: mm/new.c" in text
    assert "2 of 3 patches apply as they are, 1 with conflicts; 1 of its new files are there already" in text


@pytest.mark.usefixtures("pristine")
def test_what_upstream_took_or_removed_is_told(tmp_path: Path) -> None:
    took = "".join(with_line(ALPHA, 30, "one\n"))
    report = against.against("linux", str(other(tmp_path, {"mm/alpha.c": took, "mm/gone.c": None}, "9")))
    assert outcomes(report) == {"0001": "there already", "0002": "as is", "0003": "missing"}


@pytest.mark.usefixtures("pristine")
def test_one_file_in_trouble_does_not_hide_the_other(tmp_path: Path) -> None:
    clash = "".join(with_line(BETA, 10, "something else\n"))
    report = against.against("linux", str(other(tmp_path, {"mm/beta.c": clash}, "9")))
    assert outcomes(report) == {"0001": "as is", "0002": "conflict", "0003": "as is"}
    assert {one.name: one.how for one in report.patches[1].files} == {
        "mm/alpha.c": "as is",
        "mm/beta.c": "conflict",
    }
    # Of each patch, all files that need a look are named.
    near = "".join(with_line(ALPHA, 48, "something else\n"))
    report = against.against("linux", str(other(tmp_path, {"mm/alpha.c": near, "mm/beta.c": None}, "9")))
    assert "  missing       0002-two.patch: mm/alpha.c (merged), mm/beta.c (not there)" in against.lines(
        report
    )


def test_the_sources_are_not_changed(pristine: Path, tmp_path: Path) -> None:
    folder = other(tmp_path, {"mm/alpha.c": "".join(with_line(ALPHA, 30, "x\n"))}, "9")
    before = {p: p.read_bytes() for p in [*pristine.rglob("*"), *folder.rglob("*")] if p.is_file()}
    against.against("linux", str(folder))
    assert {p: p.read_bytes() for p in [*pristine.rglob("*"), *folder.rglob("*")] if p.is_file()} == before


def test_a_series_that_does_not_fit_its_own_base_is_an_error(pristine: Path, tmp_path: Path) -> None:
    folder = other(tmp_path, {})
    (pristine / "mm/alpha.c").write_text("nothing of the sort\n")
    with pytest.raises(LabError, match="the series is written for") as caught:
        against.against("linux", str(folder))
    assert caught.value.code == MACHINE


def test_reports_are_remembered_for_this_very_series(pristine: Path, repo: Path, tmp_path: Path) -> None:
    del pristine
    report = against.against("linux", str(other(tmp_path, {}, "9")))
    assert against.remembered(series.get("linux")) == [report]
    data = json.loads(against.to_json(report))
    assert (data["version"], data["counts"], data["summary"]) == ("7.3.9", {"as is": 3}, report.summary())
    (repo / "linux/new/mm/new.c").write_text("int newer;\n")
    assert against.remembered(series.get("linux")) == []


def test_an_older_source_is_called_older_and_not_remembered(pristine: Path, tmp_path: Path) -> None:
    del pristine
    report = against.against("linux", str(other(tmp_path, {}, "2")))
    assert report.age == "older"
    assert "OLDER than 7.3.4" in against.lines(report)[0]
    assert against.remembered(series.get("linux")) == []


def tarball(version: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, text in {
            **BASE,
            "Makefile": MAKEFILE.replace("SUBLEVEL = 4", f"SUBLEVEL = {version}"),
        }.items():
            info = tarfile.TarInfo(f"linux/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


@pytest.mark.usefixtures("pristine")
def test_tarballs_and_packages_are_read_without_unpacking(tmp_path: Path) -> None:
    plain = tmp_path / "linux.tar.xz"
    plain.write_bytes(tarball("6"))
    assert against.against("linux", str(plain)).counts() == {"as is": 3}
    root = tmp_path / "package"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: linux-source-7.3\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: x\n"
    )
    (root / "usr/src").mkdir(parents=True)
    (root / "usr/src/linux-source-7.3.tar.xz").write_bytes(tarball("7"))
    deb = tmp_path / "linux-source-7.3_1_all.deb"
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", str(root), str(deb)], check=True, capture_output=True
    )
    report = against.against("linux", str(deb))
    assert (report.version, report.counts()) == ("7.3.7", {"as is": 3})
    deb.write_bytes(deb.read_bytes()[:-200])
    with pytest.raises(LabError, match="cannot read") as caught:
        against.against("linux", str(deb))
    assert caught.value.code == MACHINE


@pytest.mark.usefixtures("pristine")
@pytest.mark.parametrize("wanted", ["nonsense", "/nonexistent/linux.tar.xz", "7.x", "-1"])
def test_what_is_no_source_is_bad_usage(wanted: str) -> None:
    with pytest.raises(UsageError) as caught:
        against.against("linux", wanted)
    assert caught.value.code == USAGE


@pytest.mark.usefixtures("pristine")
def test_a_tree_of_something_else_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no linux source"):
        against.against("linux", str(tmp_path / "empty"))


class Mirror:
    """Stands for apt: suites with versions of a package whose name has the version in it."""

    SUITES: ClassVar = {"s": "7.3.4", "unstable": "7.3.9", "experimental": "7.4~rc2"}

    def __init__(self, suite: str, kind: str) -> None:
        self.suite = suite
        assert kind == "deb"

    @property
    def version(self) -> str:
        return f"{self.SUITES[self.suite]}-1"

    @property
    def package(self) -> str:
        return "linux-source-" + ".".join(self.version.replace("~", ".").split(".")[:2])

    def update(self) -> None:
        if self.suite not in self.SUITES:
            raise LabError("cannot fetch the package lists", "404", "check the mirror")

    def data(self) -> bytes:
        return tarball(self.SUITES[self.suite].rpartition(".")[2])

    def show(self, package: str) -> list[dict[str, str]]:
        if package == "linux-source":
            return [
                {"package": package, "version": self.version, "depends": f"{self.package} (= {self.version})"}
            ]
        checksum = hashlib.sha256(self.data()).hexdigest()
        name = f"pool/{package}_{self.version}.tar.xz"
        return [{"package": package, "version": self.version, "filename": name, "sha256": checksum}]

    def download(self, package: str, version: str, folder: Path) -> list[Path]:
        path = folder / f"{package}_{version}.tar.xz"
        path.write_bytes(self.data())
        return [path]


@pytest.fixture
def mirror(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """base.toml names a package as Debian does, and the mirror has three suites."""
    file = repo / "linux/base.toml"
    file.write_text(file.read_text().replace('package = "p"', 'package = "linux-source-7.3"'))
    monkeypatch.setattr(against, "PrivateApt", Mirror)


@pytest.mark.usefixtures("pristine", "mirror")
def test_versions_are_found_on_the_mirror(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    available = against.offers("linux")
    assert [one.version for one in available] == ["7.3.4", "7.3.9", "7.4-rc2"]
    assert against.choose("linux", "newest", available).version == "7.4-rc2"
    assert against.choose("linux", "7.3.y", available).version == "7.3.9"
    assert against.choose("linux", "7.4~rc2", available).package == "linux-source-7.4"
    with pytest.raises(LabError, match=r"has no linux 7\.4\.y") as caught:
        against.choose("linux", "7.4.y", available)
    assert "7.4-rc2, 7.3.9" in caught.value.why
    assert caught.value.code == MACHINE
    report = against.against("linux", "7.3.y")
    assert (report.version, report.newest, report.counts()) == ("7.3.9", "7.4-rc2", {"as is": 3})
    assert "The newest that the machine's mirror has is 7.4-rc2." in against.lines(report)
    assert (cache / "downloads/linux-source-7.3_7.3.9-1.tar.xz").is_file()
    assert "left out" not in capsys.readouterr().err


@pytest.mark.usefixtures("pristine", "mirror")
def test_a_mirror_with_nothing_newer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Mirror, "SUITES", {"s": "7.3.4", "unstable": "7.2.12"})
    report = against.against("linux", "newest")
    assert report.version == "7.3.4"
    assert "The machine's mirror has nothing newer than 7.3.4." in against.lines(report)
    assert "left out" in capsys.readouterr().err  # experimental is not carried


@pytest.mark.usefixtures("pristine", "mirror")
def test_no_mirror_at_all_is_a_broken_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mirror, "SUITES", {})
    with pytest.raises(LabError, match="cannot fetch") as caught:
        against.against("linux", "newest")
    assert caught.value.code == MACHINE


@pytest.mark.usefixtures("pristine", "mirror")
def test_a_download_that_is_not_what_was_asked_for(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def wrong(self: Mirror, package: str, version: str, folder: Path) -> list[Path]:
        (folder / f"{package}_{version}.tar.xz").write_bytes(self.data()[:-8])
        return []

    monkeypatch.setattr(Mirror, "download", wrong)
    with pytest.raises(LabError, match="not what was asked for"):
        against.against("linux", "7.3.y")
    assert list((cache / "downloads").glob("linux-source*")) == []


def test_versions_sort_as_kernels_do() -> None:
    ordered = ["7.2.13", "7.3-rc7", "7.3", "7.3.4", "7.3.10", "7.4-rc1", "7.4-rc12", "7.4"]
    mixed = ordered[4:] + ordered[:4]
    assert sorted(mixed, key=against.order) == ordered
    assert against.order("7.4~rc1") == against.order("7.4-rc1")
    assert against.upstream("7.3~rc7-1~exp1") == "7.3-rc7"
    assert against.upstream("1:10.0.13+ds-0+deb13u1") == "10.0.13"
    assert against.upstream("1:11.0.0~rc2+ds-1") == "11.0.0-rc2"
    candidate = b"VERSION = 7\nPATCHLEVEL = 4\nSUBLEVEL = 0\nEXTRAVERSION = -rc2\nNAME = x\n"
    assert against.version_of("linux", candidate) == "7.4-rc2"
    assert against.version_of("linux", MAKEFILE.encode()) == "7.3.4"
    assert against.version_of("qemu", b"10.0.13\n") == "10.0.13"
    assert fetch.upstream("7.3.4-1~bpo13+1") == against.upstream("7.3.4-1~bpo13+1")
