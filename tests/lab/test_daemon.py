# SPDX-License-Identifier: GPL-2.0
"""Where the daemon is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.build import daemon


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
