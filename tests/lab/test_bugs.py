# SPDX-License-Identifier: GPL-2.0
"""Bugs and their reproducers: the registry, the verdicts, and the parts for older kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab.core import paths, run
from lab.core.paths import REPO
from lab.machine import fetch
from lab.patches import parts
from lab.patches.repo import Repo, commit_all, commit_parts, small
from lab.series import bugs, onto
from lab.series.bugs import Bug, Outcome, Row

SEEN = Outcome("fails"), Outcome("passes")
LTS = sorted(path.name for path in (REPO / "linux" / "lts").iterdir())


def test_each_fix_has_a_reproducer_or_a_reason() -> None:
    patches = [patch for part in bugs.fixes() for patch in part.patches()]
    assert [bug.file for bug in bugs.registry()] == patches


def test_each_reproducer_exists() -> None:
    series = "".join(p.read_text(encoding="utf-8") for p in parts.get("linux").patches())
    for bug in bugs.registry():
        if bug.mutant:
            assert f'+mutant "{bug.mutant}"' in series
        if bug.test:
            file, _, name = bug.test.partition("::")
            assert f"\ndef {name}(" in (REPO / "tests" / file).read_text(encoding="utf-8")


def test_each_cover_letter_has_the_table() -> None:
    """The letters claim that each reproducer was seen to fail and to pass."""
    rows = [Row(bug) if bug.none else Row(bug, *SEEN) for bug in bugs.registry()]
    for part in bugs.fixes():
        letter = (part.root / "cover-letter").read_text(encoding="utf-8")
        assert "\n".join(bugs.table(rows, part.name)) in letter


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (0, "===== 1 passed in 3.21s =====", "passes"),
        (0, "===== 1 skipped in 3.21s =====", "unclear"),
        (0, "===== 1 passed, 1 rerun in 3.21s =====", "passes"),
        (1, "E  kernel BUG at mm.h\n===== 1 failed in 3.21s =====", "fails"),
        (1, "E  another fault\n===== 1 failed in 3.21s =====", "unclear"),
        (3, "E  kernel BUG at mm.h", "unclear"),
    ],
)
def test_a_test_fails_only_in_the_way_that_the_bug_does(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, verdict: str
) -> None:
    monkeypatch.setattr(run, "ask", lambda *_: run.Done([], status, said, ""))
    found = bugs._test("guest/test_x.py::test_y", Path("bzImage"), "kernel BUG at", 0)
    assert found.verdict == verdict


def test_a_reproducer_that_passes_on_the_base_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(paths, "out", lambda: tmp_path)
    monkeypatch.setattr(bugs, "kernels", lambda: (Path("base"), Path("fixed")))
    for before, code in (("fails", 0), ("passes", 1), ("unclear", 1)):

        def judge(
            _test: str, kernel: Path, _shows: str, _try: int, before: str = before
        ) -> Outcome:
            return Outcome(before if kernel.name == "base" else "passes", "a reason")

        monkeypatch.setattr(bugs, "_test", judge)
        monkeypatch.setattr(bugs, "written", lambda part: tmp_path / part)
        (row,) = bugs.bugs(["fixes-pm"])
        assert row.holds == (code == 0)
        assert f"Base: {before}. Fixed: passes." in (tmp_path / "fixes-pm").read_text()


def test_a_bug_that_an_older_kernel_lacks_is_left_out() -> None:
    bug = Bug("fixes-mm", Path("0001-x.patch"), since="6.15")
    assert onto._needless(bug, "6.12") == "the bug is in Linux since 6.15"
    assert onto._needless(replace(bug, since="6.7"), "6.12") == ""
    assert onto._needless(replace(bug, since=""), "6.12") == "it fixes no bug"
    assert onto._needless(replace(bug, since="", needed_by="0002"), "6.12") == ""


def test_a_patch_is_applied_exactly_or_from_the_back_port_or_merged(tmp_path: Path) -> None:
    monkey, text = Repo(tmp_path / "tree"), [f"line {number}\n" for number in range(20)]
    file = monkey.path / "file.c"
    monkey.path.mkdir()
    monkey.git("init", "-q")

    def patch(name: str, line: int, new: str) -> Path:
        file.write_text("".join([*text[:line], f"{new}\n", *text[line + 1 :]]))
        monkey.git("commit", "-qam", name)
        made = tmp_path / f"{name}.patch"
        made.write_text(monkey.git("format-patch", "--stdout", "--full-index", "-1") + "\n")
        monkey.git("reset", "-q", "--hard", "HEAD~1")
        return made

    file.write_text("".join(text))
    commit_all(monkey, "base")
    own = patch("own", 10, "fixed")
    missing = REPO / "linux/lts/6.12/fixes-mm/none.patch"
    assert onto._apply(monkey, own, missing) == ("as it is", "")
    monkey.git("reset", "-q", "--hard", "HEAD~1")
    text[8] = "older\n"
    file.write_text("".join(text))
    monkey.git("commit", "-qam", "an older kernel")
    assert onto._apply(monkey, own, missing)[0] == "3-way"
    monkey.git("reset", "-q", "--hard", "HEAD~1")
    text[10] = "other\n"
    file.write_text("".join(text))
    monkey.git("commit", "-qam", "a still older kernel")
    assert onto._apply(monkey, own, missing)[0] == "conflict"
    ours = patch("ours", 10, "fixed")
    assert onto._apply(monkey, own, ours) == ("back-port", "")
    assert "fixed\n" in file.read_text()


@pytest.mark.parametrize("series", LTS)
def test_an_older_kernel_has_each_fix_that_it_needs(series: str) -> None:
    """With the same message: what differs stands in brackets."""
    fixed = {bug.part for bug in bugs.registry()}
    mine = [part for part in parts.lts(series).parts if part.name in fixed]
    stored = {patch.name: patch for part in mine for patch in part.patches()}
    needed = [bug for bug in bugs.registry() if not onto._needless(bug, series)]
    assert list(stored) == [bug.file.name for bug in needed]
    note = re.compile(rf"\n\[ {re.escape(series)}: [^]]* \](?=\n|$)")
    for bug in needed:
        own, other = (
            re.sub(r"\n---\n.*", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            for file in (bug.file, stored[bug.file.name])
        )
        assert note.sub("", other).split() == own.split()


@pytest.mark.parametrize("series", LTS)
def test_an_older_kernel_has_the_other_parts_in_the_same_order(series: str) -> None:
    """The same titles; a part may lack patches, such as tests that follow one kernel only."""
    fixed = {bug.part for bug in bugs.registry()}
    found = [part for part in parts.lts(series).parts if part.name not in fixed]
    assert found
    for part in found:
        titles = [parts.subject(patch.read_bytes()) for patch in part.patches()]
        own = [
            parts.subject(patch.read_bytes()) for patch in parts.get("linux", [part.name]).patches()
        ]
        assert [title for title in own if title in titles] == titles


@pytest.mark.parametrize("series", LTS)
def test_the_parts_of_an_older_kernel_apply(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, series: str
) -> None:
    """Plainly, without a fuzz. ``kz test --quick`` downloads nothing."""
    wanted = fetch.base("linux", series)
    source = fetch.Source("linux", wanted.version, wanted.sha256, Path(wanted.file), False)
    archive = paths.sub("downloads") / wanted.file
    monkeypatch.setenv(fetch.variable("linux"), str(archive))
    own = fetch.identify("linux") if archive.is_file() else source
    tree = next((one.tree for one in (source, own) if one.tree.is_dir()), None)
    if tree is None:
        pytest.skip(
            f"no {wanted.series} source in the cache; kz build linux --linux {series} makes one"
        )
    with small(parts.lts(series), tree) as repo:
        commit_parts(repo, parts.lts(series))
        assert repo.find("part/zeroed")
    assert parts.older() == series
    assert parts.get("linux").parts == parts.lts(series).parts
