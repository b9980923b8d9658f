# SPDX-License-Identifier: GPL-2.0
"""Parts of a series.

Into a tree and back without a difference, alone and together, on other sources, as mails.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lab.core import paths
from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.patches import apply, parts, repo
from lab.report.results import Metric, Result
from lab.series import against, check, checkpatch, export, letter, steps, tree
from tests.sets import sets

LINES = [f"line {i}\n" for i in range(60)]
BASE = {
    "Makefile": "VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\nEXTRAVERSION =\n",
    "mm/Makefile": "obj-y := page_alloc.o\n",
    "mm/page_alloc.c": "".join(LINES),
    "mm/other.c": "int other;\n",
    "scripts/checkpatch.pl": "exit 0;\n",
}
TOML = """
[parts.fixes]
title = "fixes"
[parts.zeroed]
title = "zeroed"
on = ["fixes"]
configs = ["THING"]
[parts.prezero]
title = "prezero"
on = ["zeroed"]
[parts.refpage]
title = "refpage"
on = ["zeroed"]
"""


def lines(**changes: str) -> str:
    """page_alloc.c with lines replaced: ``n7="seven"``."""
    text = list(LINES)
    for name, new in changes.items():
        text[int(name[1:])] = new + "\n"
    return "".join(text)


def git(folder: Path, *arguments: str) -> str:
    who = {
        f"GIT_{role}_{field}": "a@example.org"
        for role in ("AUTHOR", "COMMITTER")
        for field in ("NAME", "EMAIL")
    }
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env={**os.environ, **who},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path, message: str, **files: str | None) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink() if text is None else path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


@pytest.fixture
def source(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small source that the lab takes for linux, and a series of four parts without patches."""
    folder = tmp_path / "source"
    for name, text in BASE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    (repo / "linux/parts.toml").write_text(TOML)
    parts._all.cache_clear()
    yield folder
    parts._all.cache_clear()


@pytest.fixture
def developed(source: Path, repo: Path) -> Path:
    """A tree with commits in every part, saved once: new files grow, one is deleted."""
    made = tree.make("linux", None)
    commit(made, "mm: fix a line\n\nIt was wrong.", mm__page_alloc_DOT_c=lines(n7="seven"))
    git(made, "branch", "-f", "part/fixes")
    commit(
        made,
        "mm: add the thing",
        mm__thing_DOT_c="/* SPDX-License-Identifier: GPL-2.0 */\nint thing;\n",
        mm__Kconfig="config THING\n\tbool\n",
        mm__Makefile="obj-y := page_alloc.o\nobj-y += thing.o\n",
    )
    commit(made, "mm: remove other.c", mm__other_DOT_c=None)
    git(made, "branch", "-f", "part/zeroed")
    commit(made, "mm: prezero", mm__page_alloc_DOT_c=lines(n7="seven", n20="prezero"))
    git(made, "branch", "-f", "part/prezero")
    commit(
        made, "mm: refpage", mm__page_alloc_DOT_c=lines(n7="seven", n20="prezero", n40="refpage")
    )
    git(made, "branch", "-f", "part/refpage")
    tree.save(parts.get("linux"), made)
    return made


def kept(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted((root / "linux/parts").rglob("*"))
        if p.is_file()
    }


def test_each_commit_is_saved_in_its_part_and_saving_again_changes_nothing(
    developed: Path, repo: Path
) -> None:
    names = {part.name: [p.name for p in part.patches()] for part in parts.get("linux").parts}
    assert names == {
        "fixes": ["0001-mm-fix-a-line.patch"],
        "zeroed": ["0001-mm-add-the-thing.patch", "0002-mm-remove-other.c.patch"],
        "prezero": ["0001-mm-prezero.patch"],
        "refpage": ["0001-mm-refpage.patch"],
    }
    before = kept(repo)
    assert b"int thing;" in before["linux/parts/zeroed/0001-mm-add-the-thing.patch"]
    assert tree.save(parts.get("linux"), developed) == []
    again = tree.make("linux", repo / "again")
    assert tree.save(parts.get("linux"), again) == [] and kept(repo) == before
    assert git(again, "rev-parse", "HEAD^{tree}") == git(developed, "rev-parse", "HEAD^{tree}")


def test_a_rebase_carries_the_parts_along(developed: Path, repo: Path) -> None:
    commit(
        developed,
        "fixup! mm: add the thing",
        mm__thing_DOT_c="/* SPDX-License-Identifier: GPL-2.0 */\nint better;\n",
    )
    subprocess.run(
        [
            "git",
            "-C",
            str(developed),
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
            "-c",
            "sequence.editor=true",
            "rebase",
            "-q",
            "-i",
            "base",
        ],
        check=True,
    )
    assert tree.save(parts.get("linux"), developed) == ["parts/zeroed/0001-mm-add-the-thing.patch"]


def test_nothing_is_saved_from_a_dirty_or_disordered_tree(developed: Path, repo: Path) -> None:
    before = kept(repo)
    (developed / "mm/page_alloc.c").write_text("junk")
    with pytest.raises(UsageError, match="uncommitted"):
        tree.save(parts.get("linux"), developed)
    git(developed, "checkout", "mm/page_alloc.c")
    git(developed, "branch", "-f", "part/zeroed", "part/fixes~1")
    with pytest.raises(UsageError, match="part/zeroed is not between"):
        tree.save(parts.get("linux"), developed)
    git(developed, "branch", "-D", "part/zeroed")
    with pytest.raises(UsageError, match="has no branch part/zeroed"):
        tree.save(parts.get("linux"), developed)
    assert kept(repo) == before


def test_unsaved_commits_survive_a_changed_series(developed: Path, repo: Path) -> None:
    commit(developed, "mm: more", mm__more_DOT_c="int more;\n")
    patch = repo / "linux/parts/refpage/0001-mm-refpage.patch"
    patch.write_text(patch.read_text().replace("+refpage", "+other"))
    with pytest.raises(UsageError, match="not saved"):
        tree.make("linux", developed)
    tree.make("linux", developed, force=True)
    assert "mm: more" in git(developed, "log", "--format=%s", "-1", tree.PREVIOUS)


def test_a_part_that_was_saved_on_older_parts_is_merged(developed: Path, repo: Path) -> None:
    series, pristine = parts.get("linux"), fetch.pristine(fetch.obtain("linux"))
    git(developed, "checkout", "-q", "part/zeroed")
    commit(developed, "mm: beside prezero", mm__page_alloc_DOT_c=lines(n7="seven", n18="zeroed"))
    folder, name = repo / "linux/parts/zeroed", "0003-mm-beside-prezero.patch"
    (folder / name).write_text(git(developed, "format-patch", "-1", "--full-index", "--stdout"))
    with (folder / "series").open("a") as listing:
        listing.write(f"{name}\n")
    assert check.applies(series, pristine)
    whole = tree.make("linux", repo / "whole")
    assert "parts/prezero/0001-mm-prezero.patch" in tree.save(series, whole)
    assert check.applies(series, pristine) == []


def test_unknown_parts_and_wrong_tables_are_named(developed: Path, repo: Path) -> None:
    with pytest.raises(UsageError, match="zeroe"):
        parts.get("linux", ["zeroe"])
    assert [p.name for p in parts.get("linux", ["refpage"]).parts] == ["fixes", "zeroed", "refpage"]
    assert ("fixes", "zeroed", "refpage") in sets(parts.get("linux"))
    (repo / "linux/parts.toml").write_text('[parts.a]\ntitle = "a"\non = ["b"]\n')
    parts._all.cache_clear()
    with pytest.raises(LabError, match="stands on b"):
        parts.get("linux")


def test_a_set_of_parts_has_no_other_patch(developed: Path) -> None:
    with apply.working_copy(parts.get("linux", ["zeroed"]), fetch.obtain("linux")) as copy:
        assert (copy / "mm/page_alloc.c").read_text() == lines(n7="seven")
        assert not (copy / "mm/other.c").exists()


def test_a_bare_tree_is_the_patched_one_without_its_patches(developed: Path) -> None:
    """A compiler cache knows a file by its place, so base is built where the floor kernel is."""
    series, linux = parts.get("linux", ["zeroed"]), fetch.obtain("linux")
    kept = None
    for bare, text in ((True, lines()), (False, lines(n7="seven")), (True, lines())):
        with apply.working_copy(series, linux, bare=bare) as copy:
            assert (copy / "mm/page_alloc.c").read_text() == text
            now = copy, (copy / "Makefile").stat().st_mtime_ns
        kept = kept or now
        assert now == kept
    assert (fetch.pristine(linux) / "mm/page_alloc.c").read_text() == lines()


def test_check_finds_what_does_not_apply_alone_and_what_saves_otherwise(
    developed: Path, repo: Path, source: Path
) -> None:
    pristine = fetch.pristine(fetch.obtain("linux"))
    series = parts.get("linux")
    assert check.applies(series, pristine) == []
    spare = series.root / "parts/zeroed/0009-spare.patch"
    spare.write_text("")
    found = [(p.check, p.where) for p in check.check("linux")]
    assert ("save", "parts/zeroed/0009-spare.patch") in found
    spare.unlink()
    commit(
        developed,
        "mm: touch prezero's line",
        mm__page_alloc_DOT_c=lines(n7="seven", n20="both", n40="refpage"),
    )
    tree.save(series, developed)
    assert [p.where for p in check.applies(series, pristine)] == ["fixes + zeroed + refpage"]


def test_reports_of_checkpatch_are_accepted_by_type_and_file(developed: Path) -> None:
    rule = {"type": "ONE,TWO", "only": "mm/", "reason": "it is tested"}
    series = replace(parts.get("linux"), rules={"checkpatch": [rule]})
    lines = [
        "mm/a.c:1: CHECK:TWO: x",
        "fs/a.c:1: CHECK:TWO: x",
        "mm/a.c:1: CHECK:TW: x",
        "WARNING:ONE: x",
    ]
    assert [checkpatch.accepted(series, line) for line in lines] == [True, False, False, False]
    del rule["reason"]
    with pytest.raises(LabError, match="no reason"):
        checkpatch.accepted(series, lines[0])


def test_each_patch_is_built_once(developed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    series, built = parts.get("linux"), []

    def make(tree: Path, log: Path) -> None:
        built.append((tree / "mm/thing.c").exists())
        if len(built) == 2:
            raise LabError("it does not build", "a reason", "")

    monkeypatch.setattr(steps, "builds", lambda series: [steps.Build("um off", [], make)])
    monkeypatch.setattr("lab.machine.tools.need", lambda name: None)
    assert list(steps.build_each(series)) == [
        ("zeroed/0001-mm-add-the-thing.patch", "um off: a reason")
    ]
    assert built == [False, True, True, True, True]
    assert list(steps.build_each(series)) == [] and len(built) == 6
    assert steps.targets(series) == ["mm/"]


def test_another_source_is_clean_merged_or_a_conflict(
    developed: Path, source: Path, tmp_path: Path
) -> None:
    pristine = fetch.pristine(fetch.obtain("linux"))
    other = tmp_path / "other"
    for name, text in BASE.items():
        (other / name).parent.mkdir(parents=True, exist_ok=True)
        (other / name).write_text(text)
    series = parts.get("linux")
    assert set(against.attempt(series, pristine, other).values()) == {"clean"}
    (other / "mm/page_alloc.c").write_text(lines(n5="changed", n22="changed", n40="taken"))
    assert against.attempt(series, pristine, other) == {
        "fixes": "3-way (1 of 1)",
        "zeroed": "clean",
        "prezero": "3-way (1 of 1)",
        "refpage": "conflict: 1 of 1, first 0001 (mm/page_alloc.c)",
    }
    (other / "mm/page_alloc.c").write_text(lines(n7="taken"))
    found = against.attempt(series, pristine, other)
    assert found["fixes"] == "conflict: 1 of 1, first 0001 (mm/page_alloc.c)"
    assert found["zeroed"] == "clean"


def test_of_the_offers_each_series_has_its_newest() -> None:
    versions = ["7.3.4", "7.2.13", "7.3-rc7", "7.3.11", "7.4-rc1"]
    offers = [replace(fetch.base("linux"), version=version) for version in versions]

    def chosen(wanted: str) -> list[str]:
        return [one.version for one in against.choose("linux", wanted, offers)]

    assert chosen("all") == ["7.2.13", "7.3-rc7", "7.3.11", "7.4-rc1"]
    assert chosen("newest") == ["7.4-rc1"]
    assert chosen("7.3.4") == ["7.3.4"]
    with pytest.raises(UsageError, match="has no linux"):
        chosen("7.9")


@pytest.mark.parametrize(
    ("version", "wanted"), [("7.3~rc7-1~exp1", "7.3-rc7"), ("1:10.0.13+ds-0+deb13u1", "10.0.13")]
)
def test_upstream_versions_sort(version: str, wanted: str) -> None:
    assert fetch.upstream(version) == wanted
    assert fetch.order("7.3.9") < fetch.order("7.4-rc1") < fetch.order("7.4")


def test_an_export_has_sender_letter_and_base(
    developed: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repo, "init", "-q")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    with pytest.raises(UsageError, match="no sender"):
        export.sender()
    for name, value in (("user.name", "A Sender"), ("user.email", "s@example.org")):
        git(repo, "config", name, value)
    text = repo / "linux/parts/zeroed/cover-letter"
    text.write_text("mm: a subject\n\nText.\n\n{{ base }}\n")
    made = export.export("linux", "zeroed", tmp_path / "mails", strict=True)
    letter_, first, second = (mail.read_text() for mail in made.mails)
    assert (
        "[PATCH 0/2] mm: a subject" in letter_
        and "Linux 7.3.4" in letter_
        and "prerequisite-patch-id" in letter_
    )
    assert "Signed-off-by: A Sender <s@example.org>" in first and "From: A Sender" in second
    assert "Assisted-by" not in first + second
    git(repo, "config", "knownzero.assistedBy", "A tool's name")
    for mail in export.export("linux", "zeroed", tmp_path / "assisted").mails[1:]:
        tags = [line for line in mail.read_text().splitlines() if "-by: " in line]
        assert tags == ["Assisted-by: A tool's name", "Signed-off-by: A Sender <s@example.org>"]
    git(repo, "config", "--unset", "knownzero.assistedBy")
    again = export.export("linux", "zeroed", tmp_path / "again", since=tmp_path / "mails")
    assert "Range-diff" in again.mails[0].read_text()
    text.write_text(
        "mm: a subject\n\n{{ table('time', ('populate', 'thp.populate.task_clock')) }}\n"
    )
    with pytest.raises(LabError, match="kz bench thp"):
        export.export("linux", "zeroed", tmp_path / "third", strict=True)
    assert not (tmp_path / "third").exists()
    with pytest.raises(UsageError, match="not empty"):
        export.export("linux", "zeroed", tmp_path / "mails")


def test_recipients_are_of_the_files_and_of_sections_that_a_part_names(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    script = r"print 'David <d@example.org> (maintainer:CORE)', qq{\nlist (open list)\n};"
    (tmp_path / "scripts/get_maintainer.pl").write_text(script)
    sections = (
        "CORE\nM:\tDavid <d@example.org>\n",
        "CACHE\nM:\tA. B (C) <b@example.org>\nR:\tX <x@y>\n",
    )
    (tmp_path / "MAINTAINERS").write_text("\n".join(sections))
    mails = [tmp_path / "0000", tmp_path / "0001"]
    of_files = "David <d@example.org> (maintainer:CORE)"
    assert export.recipients(mails, tmp_path) == [of_files]
    assert export.recipients(mails, tmp_path, ["CACHE", "CORE"]) == [
        of_files,
        '"A. B (C)" <b@example.org> (maintainer:CACHE)',
    ]
    with pytest.raises(LabError, match="no such section"):
        export.recipients(mails, tmp_path, ["CACH"])


def test_a_letter_names_missing_figures() -> None:
    figures = letter.Figures([])
    assert "[no figures]" in figures.table("time", ("populate", "order0.populate.task_clock"))
    assert (
        figures.gaps == ["order0.populate.task_clock"]
        and letter.bench_of(figures.gaps[0]) == "order0"
    )
    assert repo.branch_of("zeroed") == "part/zeroed"


def test_a_letter_takes_no_figure_older_than_its_part() -> None:
    """Whatever has changed in other parts meanwhile."""
    clock = Metric.of("thp.populate.task_clock", "ms", [2.0], [1.0])
    of = {"linux/zeroed": "now", "linux/prezero": "old"}
    made = Result("thp", "tcg", {}, "", [clock], parts=of)
    for part, key, found in (
        ("linux/zeroed", "now", True),
        ("linux/zeroed", "later", False),
        ("linux/prezero", "now", False),
        ("linux/unheard-of", "now", False),
    ):
        figures = letter.Figures([made], part, key)
        assert bool(figures.find("thp.populate.task_clock")) is found, (part, key)


def test_a_letter_takes_a_figure_from_its_bench() -> None:
    def run(name: str, ours: float) -> Result:
        metric = Metric.of("thp.populate.task_clock", "ms", [2.0], [ours])
        return Result(name, "tcg", {}, "", [metric])

    stock, own = run("thp-stock", 3.0), run("thp", 5.0)
    for results, expected in (([stock, own], own), ([stock], stock)):
        found = letter.Figures(results).find("thp.populate.task_clock")
        assert found and found[0] is expected


def test_a_letter_takes_native_figures_if_each_row_has_one() -> None:
    def run(name: str, accelerator: str, *modes: str) -> Result:
        metrics = [Metric.of(f"thp.{mode}.task_clock", "ms", [2.0], [1.0]) for mode in modes]
        return Result(name, accelerator, {}, f"./kz {name}", metrics)

    emulated = run("thp", "tcg", "populate", "touch_all")
    both = (("one", "thp.populate.task_clock"), ("two", "thp.touch_all.task_clock"))
    native = run("thp-native", "pvm", "populate", "touch_all")
    assert "[NATIVE (PVM), n = 1: kz thp-native]" in letter.Figures([emulated, native]).table(
        "time", *both
    )
    half = run("thp-native", "pvm", "populate")
    assert "[TCG, n = 1: kz thp]" in letter.Figures([emulated, half]).table("time", *both)


def test_parts_are_sent_after_those_that_they_stand_on() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` ", (paths.REPO / "linux/README.md").read_text(), re.MULTILINE
    )
    on = {part.name: part.on for part in parts._all("linux").parts}
    assert rows and set(rows) <= set(on)
    for number, name in enumerate(rows):
        assert set(on[name]) <= set(rows[:number]), name


POSTED = {
    "mm/virtio: skip redundant zeroing of host-zeroed pages",
    "mm: pre zero out free pages to speed up page allocation for __GFP_ZERO",
    "mm: introduce reference pages",
}


def test_letters_fit_a_mail_and_name_other_series_by_their_subjects() -> None:
    folders = [part.root for part in parts._all("linux").parts]
    files = [file for folder in folders if (file := folder / "cover-letter").is_file()]
    texts = {file.parent.name: file.read_text(encoding="utf-8") for file in files}
    subjects = {text.partition("\n")[0] for text in texts.values()}
    for name, text in texts.items():
        prose = re.sub(r"\{\{.*?\}\}", "", text, flags=re.DOTALL)
        assert [line for line in prose.splitlines() if len(line) > letter.WIDTH] == [], name
        named = re.findall(r'"((?:mm|virtio_balloon)[\w/, ]*: [^"]+)"', " ".join(prose.split()))
        assert set(named) - subjects - POSTED == set(), name
