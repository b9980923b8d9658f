# SPDX-License-Identifier: GPL-2.0
"""What passed is not done again, and what failed or changed is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.core import paths
from tests.kernel import unchanged


def test_only_what_passed_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNOWNZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "REPO", tmp_path)
    lab = tmp_path / "lab" / "series"
    lab.mkdir(parents=True)
    for name, text in (("check", "from lab.series import steps"), ("steps", ""), ("other", "")):
        (lab / f"{name}.py").write_text(text, encoding="utf-8")
    test = tmp_path / "test_it.py"
    test.write_text("def test():\n    from lab.series.check import check\n", encoding="utf-8")
    file = tmp_path / "series" / "0001.patch"
    file.parent.mkdir()
    file.write_text("one", encoding="utf-8")

    def same() -> bool:
        with unchanged.since_it_passed("x", [tmp_path / "series", test]) as found:
            return found

    with pytest.raises(AssertionError), unchanged.since_it_passed("x", [tmp_path / "series", test]):
        raise AssertionError("fails")
    assert [same(), same()] == [False, True]
    file.write_text("two", encoding="utf-8")
    assert [same(), same()] == [False, True]
    (lab / "steps.py").write_text("changed = 1", encoding="utf-8")
    assert [same(), same()] == [False, True]
    (lab / "other.py").write_text("changed = 1", encoding="utf-8")
    assert same()
    monkeypatch.setenv("KNOWNZERO_AGAIN", "1")
    assert not same()
