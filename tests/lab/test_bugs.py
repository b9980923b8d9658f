# SPDX-License-Identifier: GPL-2.0
"""Bugs and their reproducers: the registry, the verdicts, and the parts for older kernels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.core import paths, run
from lab.core.paths import REPO
from lab.machine import fetch
from lab.patches import parts
from lab.patches.repo import commit_parts, small
from lab.series import bugs
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
            function, _, case = name.removesuffix("]").partition("[")
            text = (REPO / "tests" / file).read_text(encoding="utf-8")
            before, found, _ = text.partition(f"\ndef {function}(")
            assert found
            # One run of one case is judged.
            marks = f"{before}\n".rpartition("\n\n\n")[2]
            assert ("parametrize" in marks) == bool(case), bug.test
            assert not case or f'"{case}"' in marks


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


def needs(series: str, bug: Bug) -> bool:
    """Whether an older kernel has the bug, or needs the patch for that of another one."""
    if not bug.since:
        return bool(bug.needed_by)
    return fetch.order(bug.since) <= fetch.order(series)


@pytest.mark.parametrize("series", LTS)
def test_an_older_kernel_has_each_fix_that_it_needs(series: str) -> None:
    """With the same message: what differs stands in brackets."""
    fixed = {bug.part for bug in bugs.registry()}
    mine = [part for part in parts.lts(series).parts if part.name in fixed]
    stored = [patch for part in mine for patch in part.patches()]
    needed = [bug for bug in bugs.registry() if needs(series, bug)]
    assert [parts.subject(patch.read_bytes()) for patch in stored] == [b.subject for b in needed]
    note = re.compile(rf"\n\[ {re.escape(series)}: [^]]* \](?=\n|$)")
    for bug, patch in zip(needed, stored, strict=True):
        own, other = (
            re.sub(r"\n---\n.*", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
            for file in (bug.file, patch)
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
    source = fetch.Source(
        "linux", wanted.version, wanted.sha256, Path(wanted.file), from_debian=False
    )
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
