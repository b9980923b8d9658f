# SPDX-License-Identifier: GPL-2.0
"""A cache and a repository of their own for each test of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core import paths


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KNOWNZERO_CACHE", str(folder))
    monkeypatch.delenv("KNOWNZERO_LINUX_SOURCE", raising=False)
    monkeypatch.delenv("KNOWNZERO_QEMU_SOURCE", raising=False)
    return folder


@pytest.fixture
def repo(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository with the base files of both sources."""
    folder = tmp_path / "repo"
    for name, kind in (("linux", "deb"), ("qemu", "deb-src")):
        (folder / name).mkdir(parents=True)
        (folder / name / "base.toml").write_text(
            f'version = "7.3.4"\nseries = "7.3"\n[debian]\nsuite = "s"\nkind = "{kind}"\npackage = '
            '"p"\n'
            f'version = "7.3.4-1"\nfile = "p.tar"\nsha256 = "00"\n'
        )
    monkeypatch.setattr(paths, "REPO", folder)
    return folder
