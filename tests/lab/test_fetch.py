# SPDX-License-Identifier: GPL-2.0
"""Downloads are whole or thrown away; other sources are taken as they are."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from lab.core.errors import MACHINE, USAGE, LabError
from lab.machine import apt, fetch

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


@pytest.mark.usefixtures("wanted")
def test_no_network_is_an_error_of_three_parts(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(
        monkeypatch,
        Mirror(
            GOOD, fail=LabError("cannot fetch the package lists", "no route", "check the network")
        ),
    )
    with pytest.raises(LabError) as caught:
        fetch.obtain("linux")
    assert (caught.value.why, caught.value.code) == ("no route", MACHINE)


def test_real_apt_without_a_network(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "sources.list").write_text("deb http://127.0.0.1:9/debian stable main\n")
    monkeypatch.setattr(apt, "codename", lambda: "bookworm")
    private = apt.PrivateApt("bookworm", "deb", etc)
    with pytest.raises(LabError, match="cannot fetch the package lists") as caught:
        private.update()
    assert caught.value.code == MACHINE
    assert "127.0.0.1" in caught.value.why


def test_a_tarball_instead(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linux-7.3.9.tar.xz").write_bytes(GOOD)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(tmp_path / "linux-7.3.9.tar.xz"))
    source = fetch.obtain("linux")
    assert source.version == "7.3.9"
    assert (fetch.pristine(source) / "mm/a.c").is_file()


def test_a_tarball_cut_short_leaves_nothing(
    repo: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "linux-7.3.4.tar.xz").write_bytes(GOOD[:-30])
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(tmp_path / "linux-7.3.4.tar.xz"))
    with pytest.raises(LabError, match="cannot unpack"):
        fetch.pristine(fetch.obtain("linux"))
    assert list((cache / "src").iterdir()) == []


def test_a_tarball_of_something_else(
    repo: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hello-1.0.tar.xz").write_bytes(tarball({"README": b"hello"}))
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(tmp_path / "hello-1.0.tar.xz"))
    with pytest.raises(LabError, match="holds no linux source"):
        fetch.pristine(fetch.obtain("linux"))
    assert list((cache / "src").iterdir()) == []


@pytest.mark.parametrize("content", [None, {}, {"Makefile": MAKEFILE, ".config": b""}])
def test_a_folder_that_will_not_do(
    content: dict[str, bytes] | None, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    if content is not None:
        folder.mkdir()
        for name, data in content.items():
            (folder / name).write_bytes(data)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    with pytest.raises(LabError) as caught:
        fetch.identify("linux")
    assert caught.value.code == USAGE


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


def test_versions() -> None:
    assert fetch.upstream("1:10.0.13+ds-0+deb13u1") == "10.0.13"
    assert fetch.upstream("7.3.4-1~bpo13+1") == "7.3.4"
    assert fetch.order("7.3.9") < fetch.order("7.3.10")


def test_the_tarball_of_a_source_package() -> None:
    record = {"checksums-sha256": "aa 1 q_1.dsc\nbb 2 q_1.orig.tar.xz\ncc 3 q_1.debian.tar.xz"}
    assert fetch.record_file(record, "deb-src") == ("q_1.orig.tar.xz", "bb")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("linux-source-6.12_6.12.117-1_all.deb", "6.12.117"),
        ("linux-7.4-rc1.tar.xz", "7.4-rc1"),
        ("qemu_10.2.2+ds.orig.tar.xz", "10.2.2"),
        ("sources.tar", "unknown"),
    ],
)
def test_the_version_of_an_archive_is_in_its_name(tmp_path: Path, name: str, version: str) -> None:
    (tmp_path / name).touch()
    assert fetch.local("linux", tmp_path / name, "source").version == version
