# SPDX-License-Identifier: GPL-2.0
"""What a Debian to boot is made of, without making one: that is in tests/guest/test_debian.py."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from lab.build import deb
from lab.core import run
from lab.core.errors import LabError
from lab.machine import apt, stock
from tests.guest import debian

SIMULATED = """\
Reading package lists...
Inst libc6 (2.36-9 Debian:12.15/oldstable [amd64]) []
Inst mawk [1.0] (1.3.4-3.1 Debian:12.15/oldstable, Other:1 [amd64])
Conf libc6 (2.36-9 Debian:12.15/oldstable [amd64])
"""


def made(folder: Path, name: str, *depends: str) -> Path:
    """A package with nothing in it."""
    return deb.write(deb.Deb(name, "1.0", "a", "a", [], depends=depends), folder)


def inside(image: Path, command: str) -> str:
    """What debugfs prints for a request to a file system."""
    tool = shutil.which("debugfs", path=stock.SBIN) or "debugfs"
    return run.output([tool, "-R", command, str(image)], "no file system", "make it again")


def archive(target: Path, files: Mapping[str, str]) -> None:
    with tarfile.open(target, "w") as out:
        for name, text in files.items():
            about = tarfile.TarInfo(f"./{name}")
            about.size = len(text)
            out.addfile(about, io.BytesIO(text.encode()))


def test_what_packages_need_is_found_in_them(tmp_path: Path, cache: Path) -> None:
    first = made(
        tmp_path,
        "kz-first",
        "libc6 (>= 2.36)",
        "initramfs-tools | linux-initramfs-tool",
        "kz-second",
    )
    second = made(tmp_path, "kz-second", "libc6", "python3:any")
    assert debian.needs([first, second]) == ["initramfs-tools", "libc6", "python3"]
    assert debian.needs([second]) == ["libc6", "python3"]
    assert debian.needs([made(tmp_path, "kz-third")]) == []


def test_what_is_no_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.deb").write_text("no package", encoding="utf-8")
    with pytest.raises(LabError, match=r"a\.deb is no package"):
        debian.needs([tmp_path / "a.deb"])


def test_a_newer_version_is_another_system() -> None:
    keys = {
        debian._key("bookworm", {"libc6": "1", "mawk": "2"}),
        debian._key("bookworm", {"libc6": "1", "mawk": "3"}),
        debian._key("bookworm", {"libc6": "1"}),
        debian._key("trixie", {"libc6": "1", "mawk": "2"}),
    }
    assert len(keys) == 4
    assert debian._key("bookworm", {"mawk": "2", "libc6": "1"}) in keys


def test_versions_are_what_apt_would_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def told(argv: list[str], *_: str) -> str:
        asked.append(argv)
        return SIMULATED

    source = apt.PrivateApt("bookworm")
    monkeypatch.setattr(run, "output", told)
    found = debian.closure(source, ["mawk"])
    assert found == {"libc6": "2.36-9", "mawk": "1.3.4-3.1"}
    # Not what this machine lacks, but what an empty one does; and nothing is installed.
    assert "Dir::State::status=/dev/null" in asked[0]
    assert "--simulate" in asked[0]


def test_lists_that_were_never_fetched_are_not_there(cache: Path) -> None:
    source = apt.PrivateApt("bookworm")
    assert not debian.has_lists(source)
    (source.root / "lists" / "mirror.invalid_dists_bookworm_main_binary-amd64_Packages").touch()
    assert debian.has_lists(source)


def test_old_systems_go(cache: Path) -> None:
    folder = cache / "debian"
    ages = {"new": 0, "used": 2, "old": 3, "older": 4, ".left.part": 5, ".works.part": 0.5}
    for name, days in ages.items():
        (folder / name).mkdir(parents=True)
        os.utime(folder / name, (time.time() - days * 86400,) * 2)
    debian._prune(keep=3)
    assert {path.name for path in folder.iterdir()} == {"new", "used", ".works.part"}


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose the files are does not matter here."""
    monkeypatch.setattr(debian, "_fakeroot", lambda work, option: [])


@pytest.mark.usefixtures("unprivileged")
def test_the_disk_has_what_the_archive_has(tmp_path: Path, cache: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    folder.mkdir()
    files = {
        "boot/vmlinuz-7.3-x": "kernel",
        "boot/initrd.img-7.3-x": "initramfs",
        "etc/hostname": "a-name",
    }
    archive(work / "root.tar", files)
    system = debian._published(work, folder, tmp_path / "log")
    assert system.release == "7.3-x"
    assert (system.kernel.read_text(), system.initrd.read_text()) == ("kernel", "initramfs")
    assert inside(system.disk, "cat /etc/hostname") == "a-name"
    assert "Type: directory" in inside(system.disk, "stat /dev")
    # It has room, and does not take it.
    assert system.disk.stat().st_size == 3 << 30
    assert system.disk.stat().st_blocks * 512 < 200 << 20


@pytest.mark.usefixtures("unprivileged")
@pytest.mark.parametrize(
    "names",
    [
        ["boot/config-1"],
        ["boot/vmlinuz-1"],
        ["boot/vmlinuz-1", "boot/initrd.img-1", "boot/vmlinuz-2"],
    ],
    ids=["no kernel", "no initramfs", "two kernels"],
)
def test_a_system_that_cannot_be_booted_is_an_error(
    names: list[str], tmp_path: Path, cache: Path
) -> None:
    archive(tmp_path / "root.tar", dict.fromkeys(names, "x"))
    with pytest.raises(LabError, match="cannot be booted") as caught:
        debian._published(tmp_path, tmp_path, tmp_path / "log")
    assert Path(names[0]).name in caught.value.why
    assert not (tmp_path / "root.ext4").exists()


def test_a_job_is_on_a_disk_of_its_own(tmp_path: Path, cache: Path) -> None:
    system = debian.System(tmp_path / "a,b.ext4", tmp_path / "vmlinuz-1", tmp_path / "initrd.img-1")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    command = ["sh", "-ec", "echo 'two  words'"]
    spec = debian.boot_spec(
        system,
        command,
        tmp_path,
        add=[(program, "renamed")],
        append="quiet",
        extra_qemu=["-S"],
        memory="1G",
    )
    assert (spec.kernel, spec.initrd, spec.memory) == (system.kernel, system.initrd, "1G")
    assert "root=LABEL=kz-root" in spec.append and spec.append.endswith(" quiet")
    assert spec.extra_qemu[-1] == "-S"
    drives = [spec.extra_qemu[i + 1] for i, word in enumerate(spec.extra_qemu) if word == "-drive"]
    # Nothing that a guest writes stays.
    assert "snapshot=on" in drives[0] and drives[0].endswith(
        "file=" + str(system.disk).replace(",", ",,")
    )
    assert "read-only=on" in drives[1]
    job = tmp_path / "job.ext4"
    script = inside(job, "cat /run")
    assert "sh -ec 'echo '\"'\"'two  words'\"'\"'' </dev/null" in script
    assert inside(job, "cat /bin/renamed") == "#!/bin/sh\n"
    mode = inside(job, "stat /bin/renamed")
    assert f"Mode:  {stat.S_IMODE(0o755):04o}" in mode
