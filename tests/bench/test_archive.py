# SPDX-License-Identifier: GPL-2.0
"""The archive that `kz evidence` writes: what it has, and which ones are refused."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.bench.commands import app
from lab.core.errors import UsageError
from lab.report import archive
from lab.report import publish as publishing
from lab.report.commands import app as reporting
from lab.report.results import Metric, Result


def folder_with(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "result.json").write_text(f'{{"name": "{name}"}}\n')
        (tmp_path / "run" / name / "report.html").write_text("a name")
    return tmp_path / "run"


def test_it_has_the_results_and_no_names(tmp_path: Path) -> None:
    file = tmp_path / "to" / "one.tar.gz"
    archive.pack(folder_with(tmp_path, "thp", "order0"), ["thp", "order0"], file)
    with tarfile.open(file) as tar:
        members = tar.getmembers()
    assert [one.name for one in members] == ["thp/result.json", "order0/result.json"]
    assert {(one.uid, one.gid, one.uname, one.gname, one.mtime) for one in members} == {
        (0, 0, "", "", 0)
    }
    with archive.opened(file) as place:
        assert (place / "thp" / "result.json").read_text() == '{"name": "thp"}\n'
    assert not place.exists()


@pytest.mark.parametrize("name", ["../result.json", "thp/notes.txt", "/etc/passwd"])
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "bad.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = 2
        tar.addfile(member, io.BytesIO(b"{}"))
    with pytest.raises(UsageError), archive.opened(file):
        raise AssertionError("it was opened")
    assert not (tmp_path.parent / "result.json").exists()


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bad.tar.gz"
    file.write_bytes(content)
    with pytest.raises(UsageError), archive.opened(file):
        raise AssertionError("it was opened")


def one(folder: Path, name: str, accelerator: str, figure: str, cpu: str = "Z80") -> Path:
    clock = Metric.of(figure, "ms", [2.0, 3.0], [1.0, 2.0])
    Result(name, accelerator, {}, "./kz", [clock], host={"cpu": cpu}).save(folder / name)
    return folder


def test_it_is_set_beside_the_published_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever machine it comes from; what is unlike is named."""
    for name, accelerator, figure in (
        ("demo", "tcg", "thp.time"),
        ("demo-native", "pvm", "thp.time"),
        ("order0-native", "pvm", "order0.time"),
    ):
        one(tmp_path / "results", name, accelerator, figure)
    monkeypatch.setattr(publishing, "FOLDER", tmp_path / "results")
    file = tmp_path / "one.tar.gz"
    archive.pack(one(tmp_path / "run", "thp", "kvm", "thp.time", "6502"), ["thp"], file)
    done = CliRunner().invoke(reporting, ["compare", str(file)])
    assert done.exit_code == 0, done.exception
    title, _, *rows = done.output.splitlines()
    assert title == f"published, and thp of {file}"
    assert [row.split()[0] for row in rows[:3]] == ["thp.time"] * 3
    assert "job demo-native against thp" in done.output
    assert "host cpu Z80 against 6502" in done.output


@pytest.mark.parametrize(
    ("figure", "given", "fix"),
    [
        ("other.time", ["one.tar.gz"], "unpack the archive, and name both runs"),
        ("thp.time", ["one.tar.gz", "results/demo"], "leave out the run"),
        ("thp.time", ["results/demo"], "kz compare results/demo RUN"),
    ],
)
def test_what_cannot_be_set_beside_is_refused(
    figure: str, given: list[str], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one(tmp_path / "results", "demo", "tcg", "thp.time")
    monkeypatch.setattr(publishing, "FOLDER", tmp_path / "results")
    archive.pack(one(tmp_path / "run", "thp", "kvm", figure), ["thp"], tmp_path / "one.tar.gz")
    done = CliRunner().invoke(reporting, ["compare", *given])
    assert isinstance(done.exception, UsageError) and done.exception.fix == fix


@pytest.mark.parametrize("accel", ["tcg", "auto", "xen"])
def test_emulated_figures_are_refused(accel: str) -> None:
    done = CliRunner().invoke(app, ["evidence", "--accel", accel])
    assert isinstance(done.exception, UsageError)
    assert "use kvm or pvm" in done.exception.fix
