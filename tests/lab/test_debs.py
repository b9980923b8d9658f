# SPDX-License-Identifier: GPL-2.0
"""A program of a package, with the libraries it needs from the packages it depends on."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core.errors import LabError
from lab.machine import debs

DEPENDS = {"tool": ["libone", "libc"], "libone": ["libc"], "libc": []}
NEEDED = {
    "tool": ["libone.so.1", "libc.so.6"],
    "libone.so.1": ["libc.so.6"],
    "libc.so.6": ["ld-linux-x86-64.so.2"],
    "ld-linux-x86-64.so.2": [],
}


@pytest.fixture
def packages(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Three packages, unpacked."""
    files = {
        "tool": "tool/usr/bin/tool",
        "libone.so.1": f"libone/usr/lib/{debs.TRIPLET}/libone.so.1",
        "libc.so.6": f"libc/lib/{debs.TRIPLET}/libc.so.6",
        "ld-linux-x86-64.so.2": f"libc/lib/{debs.TRIPLET}/ld-linux-x86-64.so.2",
    }
    found = {name: tmp_path / place for name, place in files.items()}
    for file in found.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    monkeypatch.setattr(debs, "unpacked", lambda package: tmp_path / package)
    monkeypatch.setattr(debs, "depends", lambda package: DEPENDS[package])
    monkeypatch.setattr(debs, "needed", lambda file: NEEDED[file.name])
    return found


def test_every_library_once_and_the_loader_in_its_place(packages: dict[str, Path]) -> None:
    found = debs.with_libraries("tool", "usr/bin/tool")
    assert found[0] == (packages["tool"], "/usr/bin/tool")
    assert dict(found[1:]) == {
        packages["libone.so.1"]: f"/lib/{debs.TRIPLET}/libone.so.1",
        packages["libc.so.6"]: f"/lib/{debs.TRIPLET}/libc.so.6",
        packages["ld-linux-x86-64.so.2"]: "/lib64/ld-linux-x86-64.so.2",
    }
    assert len(found) == 4


def test_it_is_remembered_as_long_as_the_files_are_there(
    packages: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = debs.with_libraries("tool", "usr/bin/tool")
    monkeypatch.setattr(debs, "needed", lambda file: [])
    assert debs.with_libraries("tool", "usr/bin/tool") == found
    packages["libc.so.6"].unlink()
    assert debs.with_libraries("tool", "usr/bin/tool") == found[:1]


def test_a_library_that_nobody_has(packages: dict[str, Path]) -> None:
    packages["libone.so.1"].unlink()
    with pytest.raises(LabError, match=r"libone\.so\.1"):
        debs.with_libraries("tool", "usr/bin/tool")


def test_a_program_that_is_not_there(packages: dict[str, Path]) -> None:
    with pytest.raises(LabError, match="usr/bin/other"):
        debs.with_libraries("tool", "usr/bin/other")
