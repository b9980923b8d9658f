# SPDX-License-Identifier: GPL-2.0
"""Downloads are whole or thrown away; other sources are taken as they are."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from lab.core.errors import MACHINE, LabError
from lab.machine import fetch

MAKEFILE = b"VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\n"


def tarball(files: dict[str, bytes], top: str = "linux-7.3.4") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


GOOD = tarball({"Makefile": MAKEFILE, "mm/a.c": b"int a;\n"})


class Mirror:
    """Stands for apt: serves ``data`` under one version, or fails."""

    def __init__(self, data: bytes, version: str = "7.3.4-1", fail: LabError | None = None) -> None:
        self.data, self.version, self.fail = data, version, fail
        self.claimed = hashlib.sha256(GOOD).hexdigest()
        self.downloads = 0

    def __call__(self, suite: str, kind: str) -> Mirror:
        return self

    def update(self) -> None:
        if self.fail:
            raise self.fail

    def show(self, package: str) -> list[dict[str, str]]:
        return [
            {
                "version": self.version,
                "filename": f"pool/p_{self.version}.tar.xz",
                "sha256": self.claimed,
            }
        ]

    def download(self, package: str, folder: Path, version: str = "") -> list[Path]:
        self.downloads += 1
        path = folder / f"p_{version}.tar.xz"
        path.write_bytes(self.data)
        return [path]


@pytest.fixture
def wanted(repo: Path) -> None:
    """base.toml asks for exactly GOOD."""
    text = (repo / "linux/base.toml").read_text()
    text = text.replace('"00"', f'"{hashlib.sha256(GOOD).hexdigest()}"').replace(
        "p.tar", "p_7.3.4-1.tar.xz"
    )
    (repo / "linux/base.toml").write_text(text)


def serve(monkeypatch: pytest.MonkeyPatch, mirror: Mirror) -> Mirror:
    monkeypatch.setattr(fetch, "PrivateApt", mirror)
    return mirror


@pytest.mark.usefixtures("wanted")
def test_a_good_download_is_kept_and_unpacked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror = serve(monkeypatch, Mirror(GOOD))
    tree = fetch.pristine(fetch.obtain("linux"))
    assert (tree / "mm/a.c").read_text() == "int a;\n"
    fetch.pristine(fetch.obtain("linux"))
    assert mirror.downloads == 1


@pytest.mark.usefixtures("wanted")
@pytest.mark.parametrize(
    "data", [GOOD[:-7], GOOD[:100], b"", GOOD.replace(GOOD[50:60], b"0123456789")]
)
def test_a_corrupt_download_is_thrown_away(
    data: bytes, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, Mirror(data))
    with pytest.raises(LabError, match="is corrupt") as caught:
        fetch.obtain("linux")
    assert caught.value.code == MACHINE
    assert list((cache / "downloads").iterdir()) == []
    # The next try, with a mirror in order, is not spoiled.
    serve(monkeypatch, Mirror(GOOD))
    assert fetch.pristine(fetch.obtain("linux")).is_dir()


@pytest.mark.usefixtures("wanted")
def test_a_file_that_rotted_in_the_cache_is_fetched_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = serve(monkeypatch, Mirror(GOOD))
    archive = fetch.obtain("linux").archive
    archive.write_bytes(GOOD[:-9])
    assert fetch.obtain("linux").archive.read_bytes() == GOOD
    assert mirror.downloads == 2


@pytest.mark.usefixtures("wanted")
def test_a_newer_point_release_is_taken_and_remembered(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = tarball({"Makefile": MAKEFILE.replace(b"= 4", b"= 5")}, "linux-7.3.5")
    mirror = Mirror(newer, "7.3.5-1")
    mirror.claimed = hashlib.sha256(newer).hexdigest()
    serve(monkeypatch, mirror)
    source = fetch.obtain("linux")
    assert source.version == "7.3.5"
    assert "instead of 7.3.4-1" in capsys.readouterr().err
    assert fetch.identify("linux") == source
    assert fetch.obtain("linux") == source
    assert mirror.downloads == 1


@pytest.mark.usefixtures("wanted")
def test_another_series_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, Mirror(GOOD, "7.4.1-1"))
    with pytest.raises(LabError, match=r"no longer has p 7\.3\.x"):
        fetch.obtain("linux")


def test_a_changed_folder_is_another_source(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "Makefile").write_bytes(MAKEFILE)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    before = fetch.identify("linux")
    (folder / "more.c").write_text("int more;\n")
    after = fetch.identify("linux")
    assert before.key != after.key
    assert (fetch.pristine(after) / "more.c").is_file()
