# SPDX-License-Identifier: GPL-2.0
"""Where the daemon is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.build import daemon
from lab.core import errors
from lab.core.errors import LabError


def test_each_checkout_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOWNZERO_CACHE", str(tmp_path / "cache"))
    folders = []
    for name in ("one", "two"):
        checkout = tmp_path / name
        checkout.mkdir()
        monkeypatch.setattr(daemon, "WORKSPACE", checkout)
        folders.append(daemon.target_dir())
        assert daemon.target_dir() == folders[-1]
    assert folders[0] != folders[1] and all(folder.is_dir() for folder in folders)
    (tmp_path / "one").rmdir()
    third = tmp_path / "three"
    third.mkdir()
    monkeypatch.setattr(daemon, "WORKSPACE", third)
    daemon.target_dir()
    assert not folders[0].exists()
    assert folders[1].is_dir()


@pytest.mark.parametrize(("ends", "code"), [(2, errors.USAGE), (1, errors.MACHINE)])
def test_a_bad_option_of_the_daemon_is_bad_usage(tmp_path: Path, ends: int, code: int) -> None:
    program = tmp_path / "daemon"
    program.write_text(f"#!/bin/sh\necho unknown option >&2\nexit {ends}\n")
    program.chmod(0o755)
    with pytest.raises(LabError, match="unknown option") as caught:
        daemon.Daemon(program, ["--tagret=1"])
    assert caught.value.code == code
