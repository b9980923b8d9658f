# SPDX-License-Identifier: GPL-2.0
"""The machine's Debian mirror, by apt's own reading of its sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core import run
from lab.core.errors import MACHINE, LabError
from lab.machine import apt

ONE_LINE = """
# a comment
deb cdrom:[Debian]/ bookworm main
deb http://security.invalid/debian-security bookworm-security main
deb [arch=amd64 signed-by=/k/a.gpg] https://mirror.invalid/debian bookworm main contrib
deb-src http://source.invalid/debian bookworm main
"""
DEB822 = """
Types: deb
URIs: https://vendor.invalid/apt
Suites: nodistro
Components: main

# the archive
Types: deb deb-src
URIs: mirror+file:/etc/apt/mirrors/debian.list
Suites: bookworm bookworm-updates
Components: main

Enabled: no
Types: deb
URIs: https://disabled.invalid/debian
Suites: bookworm
Components: main
"""


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        ("sources.list", ONE_LINE, "https://mirror.invalid/debian"),
        ("sources.list.d/debian.sources", DEB822, "mirror+file:/etc/apt/mirrors/debian.list"),
        ("sources.list", "deb http://x.invalid/ nodistro main", ""),
        ("sources.list.d/old.list.save", ONE_LINE, ""),
    ],
)
def test_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, mirror: str
) -> None:
    monkeypatch.setattr(apt, "codename", lambda: "bookworm")
    file = tmp_path / name
    (tmp_path / "sources.list.d").mkdir()
    file.write_text(text)
    if mirror:
        assert apt.mirrors(tmp_path) == [mirror]
        return
    with pytest.raises(LabError) as caught:
        apt.mirrors(tmp_path)
    assert caught.value.code == MACHINE
    assert "KNOWNZERO_LINUX_SOURCE" in caught.value.fix


@pytest.mark.usefixtures("cache")
def test_another_apt_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unattended upgrades hold dpkg's lock for minutes."""
    commands: list[list[str]] = []

    def logged(argv: list[str], *_: object, **__: object) -> None:
        commands.append(argv)
        if argv[1] == "install" and len(commands) == 1:
            raise LabError("Could not get lock", "held by another process", "wait")

    monkeypatch.setattr(run, "logged", logged)
    monkeypatch.setattr(apt, "may_install", lambda: [])
    apt.install(["flex"], "cannot compile")
    assert [words[0] for words in commands] == ["apt-get"] * 3
    assert all("DPkg::Lock::Timeout=600" in words for words in commands)
