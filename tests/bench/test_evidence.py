# SPDX-License-Identifier: GPL-2.0
"""What a run leaves beside its figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lab.bench import session
from lab.bench.plan import BenchOptions
from lab.boot.guest import Guest
from lab.boot.spec import BootSpec
from lab.report import evidence


def ended(folder: Path, label: str, stdout: str = "", kernel: Path | None = None) -> Guest:
    """A guest that has ended, with the logs of its boot."""
    folder.mkdir(exist_ok=True)
    (folder / "console.log").write_text("Linux version 7.3.4\n")
    (folder / "vmm.log").touch()
    (folder / "stdout").write_text(stdout)
    spec = BootSpec(label=label)
    return cast(Guest, SimpleNamespace(spec=spec, folder=folder, kernel=kernel, qemu=None))


def test_guests_of_one_name_and_one_kernel(tmp_path: Path) -> None:
    image = tmp_path / "linux-x86_64-base" / "bzImage"
    image.parent.mkdir()
    (image.parent / ".config").write_text("CONFIG_MMU=y\n")
    found = evidence.Evidence(tmp_path / "found")
    for label in ("base", "base", "ours", ""):
        found.take(ended(tmp_path / "boot", label, kernel=image))
    folder = tmp_path / "run"
    found.publish(folder)
    assert {place.name for place in (folder / "guests").iterdir()} == {
        "base",
        "base-2",
        "ours",
        "linux-x86_64-base",
    }
    for place in (folder / "guests").iterdir():
        assert (place / "config").read_text() == "CONFIG_MMU=y\n"


def test_a_run_in_the_same_folder_leaves_nothing_of_the_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number, labels in enumerate((("base", "ours"), ("base",))):
        found = evidence.Evidence(tmp_path / f"found{number}")
        for label in labels:
            found.take(ended(tmp_path / "boot", label))
        found.publish(folder)
    assert [place.name for place in (folder / "guests").iterdir()] == ["base"]


@pytest.mark.boots
def test_a_guest_of_a_bench(tmp_path: Path, qemu: Path) -> None:
    spec = session.spec_for(BenchOptions(memory="512M"), "knownzero", qemu)
    with evidence.collecting() as found:
        with session.guests([session.Wanted("ours", spec)], found.take):
            pass
        found.publish(tmp_path)
    place = tmp_path / "guests" / "ours"
    assert "Linux version 7.3" in (place / "console.log").read_text()
    command = (place / "command").read_text().splitlines()
    assert command[0] == str(qemu)
    assert "512M" in command
    assert "CONFIG_PAGE_ZEROED=y\n" in (place / "config").read_text()
