# SPDX-License-Identifier: GPL-2.0
"""What passed is not done again, and what failed or changed is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core import paths
from tests.kernel import unchanged


def test_only_what_passed_with_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNOWNZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "REPO", tmp_path)
    (tmp_path / "lab").mkdir()
    file = tmp_path / "series" / "0001.patch"
    file.parent.mkdir()
    file.write_text("one", encoding="utf-8")

    def same() -> bool:
        with unchanged.since_it_passed("x", [tmp_path / "series"]) as found:
            return found

    with pytest.raises(AssertionError), unchanged.since_it_passed("x", [tmp_path / "series"]):
        raise AssertionError("fails")
    assert [same(), same()] == [False, True]
    file.write_text("two", encoding="utf-8")
    assert [same(), same()] == [False, True]
    (tmp_path / "lab" / "check.py").write_text("", encoding="utf-8")
    assert [same(), same()] == [False, True]
    monkeypatch.setenv("KNOWNZERO_AGAIN", "1")
    assert not same()
