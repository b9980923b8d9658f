# SPDX-License-Identifier: GPL-2.0
"""A series goes into a tree and back without a difference, and never with fuzz."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from lab.core import lock
from lab.core.errors import LabError
from lab.machine import fetch
from lab.post import export
from lab.series import against, series, tree

BASE = {
    "Makefile": "VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\n",
    "mm/Makefile": "obj-y := page_alloc.o\n",
    "mm/page_alloc.c": "".join(f"line {i}\n" for i in range(40)),
    "mm/other.c": "int other;\n",
    "script.sh": "#!/bin/sh\n",
}


def git(folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "GIT_AUTHOR_NAME": "A Person", "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "A Person", "GIT_COMMITTER_EMAIL": "a@example.org",
    }  # fmt: skip
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit(folder: Path, message: str, number: str = "", **files: str | None) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    if number:
        git(folder, "notes", "--ref=knownzero", "add", "-m", number, "HEAD")


@pytest.fixture
def source(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small kernel-like source that the lab takes for linux."""
    folder = tmp_path / "source"
    for name, text in BASE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "script.sh").chmod(0o755)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    return folder


@pytest.fixture
def developed(source: Path, repo: Path) -> Path:
    """A tree with work in it: new files together with what hooks them, one deletion, one mode."""
    made = tree.make("linux", None)
    commit(
        made,
        "mm: fix a line\n\nBecause it was wrong.",
        "0001",
        mm__page_alloc_DOT_c=BASE["mm/page_alloc.c"].replace("line 7\n", "line seven\n"),
    )
    commit(
        made,
        "mm: add the thing",
        "0101",
        mm__thing_DOT_h="int thing;\n",
        mm__thing_DOT_c='#include "thing.h"\n',
        mm__Makefile="obj-y := page_alloc.o\nobj-y += thing.o\n",
    )
    commit(made, "mm: only new files here", mm__thing_DOT_c='#include "thing.h"\nint thing;\n')
    commit(
        made,
        "mm: remove what is dead",
        mm__other_DOT_c=None,
        mm__page_alloc_DOT_c=BASE["mm/page_alloc.c"]
        .replace("line 7\n", "line seven\n")
        .replace("line 30\n", ""),
    )
    return made


def kept_files(repo: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(repo)): p.read_bytes() for p in sorted((repo / "linux").rglob("*")) if p.is_file()
    }


def test_save_separates_new_files_from_patches(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    what = series.get("linux")
    assert what.new_files() == ["mm/thing.c", "mm/thing.h"]
    assert (what.new_root / "mm/thing.c").read_text() == '#include "thing.h"\nint thing;\n'
    assert [p.name for p in what.patches()] == [
        "0001-mm-fix-a-line.patch",
        "0101-mm-add-the-thing.patch",
        "0102-mm-remove-what-is-dead.patch",
    ]
    assert series.touched(what.patches()[1].read_bytes()) == ["mm/Makefile"]
    first = what.patches()[0].read_text()
    assert first.startswith("From 0000000000000000000000000000000000000000 ")
    assert "Because it was wrong." in first


def test_saving_again_changes_nothing(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    before = kept_files(repo)
    assert tree.save(series.get("linux"), developed) == []
    assert kept_files(repo) == before


def test_a_fresh_tree_saves_to_the_same_files(developed: Path, repo: Path, tmp_path: Path) -> None:
    tree.save(series.get("linux"), developed)
    before = kept_files(repo)
    fresh = tree.make("linux", tmp_path / "fresh")
    assert tree.save(series.get("linux"), fresh) == []
    assert kept_files(repo) == before
    assert git(fresh, "rev-parse", "HEAD^{tree}") == git(developed, "rev-parse", "HEAD^{tree}")


def test_the_users_git_configuration_does_not_matter(
    developed: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.save(series.get("linux"), developed)
    before = kept_files(repo)
    configuration = tmp_path / "gitconfig"
    configuration.write_text(
        "[diff]\n\tnoprefix = true\n\tcontext = 9\n\talgorithm = patience\n\tmnemonicPrefix = true\n\trenames = copies\n"
        "[format]\n\tsignature = hello\n\tsubjectPrefix = RFC\n\tnumbered = true\n\tthread = true\n\tsignOff = true\n\tuseAutoBase = true\n"
        "[core]\n\tabbrev = 7\n[commit]\n\tgpgSign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(configuration))
    for name in ("noprefix", "mnemonicPrefix"):
        git(developed, "config", f"diff.{name}", "true")
    git(developed, "config", "diff.context", "0")
    assert tree.save(series.get("linux"), developed) == []
    assert kept_files(repo) == before


def test_the_small_tree_agrees(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    what = series.get("linux")
    pristine = fetch.pristine(fetch.obtain("linux"))
    with tree.small(what, pristine) as small:
        tip = tree.commit_series(small, tree.BASE, what)
        assert tree.differences(what, tree.kept(small, tree.BASE, tip, {})) == []


def test_the_working_copy_holds_what_the_tree_holds(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    with series.working_copy(series.get("linux"), fetch.obtain("linux")) as copy:
        listed = git(developed, "ls-files").splitlines()
        assert {n: (copy / n).read_bytes() for n in listed} == {
            n: (developed / n).read_bytes() for n in listed
        }
        assert not (copy / "mm/other.c").exists()


def test_a_changed_series_touches_only_what_changed(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    source = fetch.obtain("linux")
    with series.working_copy(series.get("linux"), source) as copy:
        before = {p: p.stat().st_mtime_ns for p in copy.rglob("*") if p.is_file()}
    thing = repo / "linux/new/mm/thing.c"
    thing.write_text(thing.read_text() + "/* more */\n")
    with series.working_copy(series.get("linux"), source) as copy:
        changed = {
            str(p.relative_to(copy))
            for p in copy.rglob("*")
            if p.is_file() and before.get(p) != p.stat().st_mtime_ns
        }
    assert changed == {"mm/thing.c", series.APPLIED}


def test_taking_a_patch_out_restores_the_file_with_a_new_time(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    source = fetch.obtain("linux")
    with series.working_copy(series.get("linux"), source) as copy:
        patched = (copy / "mm/Makefile").stat().st_mtime_ns
    listing = repo / "linux/patches/series"
    listing.write_text(
        "".join(line + "\n" for line in listing.read_text().split() if not line.startswith("0101"))
    )
    with series.working_copy(series.get("linux"), source) as copy:
        assert (copy / "mm/Makefile").read_text() == BASE["mm/Makefile"]
        assert (copy / "mm/Makefile").stat().st_mtime_ns > patched


def test_the_pristine_tree_is_never_changed(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    source = fetch.obtain("linux")
    with series.working_copy(series.get("linux"), source):
        pass
    for name, text in BASE.items():
        assert (source.tree / name).read_text() == text


def test_fuzz_is_rejected(developed: Path, repo: Path, tmp_path: Path) -> None:
    tree.save(series.get("linux"), developed)
    patch = next((repo / "linux/patches").glob("0001-*"))
    # A context line at the edge of the hunk, which patch(1) would forgive.
    patch.write_text(patch.read_text().replace("\n line 4\n", "\n line four\n"))
    source = fetch.obtain("linux")
    with pytest.raises(LabError, match="0001") as caught, series.working_copy(series.get("linux"), source):
        pass
    assert "mm/page_alloc.c" in caught.value.why
    with pytest.raises(LabError):
        tree.make("linux", tmp_path / "fresh")


def test_a_new_file_may_not_hide_an_old_one(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    (repo / "linux/new/mm/other.c").write_text("x\n")
    with (
        pytest.raises(LabError, match="exists already"),
        series.working_copy(series.get("linux"), fetch.obtain("linux")),
    ):
        pass


def test_uncommitted_work_is_not_saved_and_not_lost(developed: Path, repo: Path) -> None:
    (developed / "mm/page_alloc.c").write_text("work in progress\n")
    with pytest.raises(LabError, match="not committed"):
        tree.save(series.get("linux"), developed)
    with pytest.raises(LabError, match="not committed"):
        _change_series(repo)
        tree.make("linux", None)
    assert (developed / "mm/page_alloc.c").read_text() == "work in progress\n"


def _change_series(repo: Path) -> None:
    lock.write_atomically(repo / "linux/new/mm/from_elsewhere.c", "int x;\n")


def test_commits_that_are_not_saved_survive_an_update(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    commit(developed, "mm: precious", mm__thing_DOT_c="precious\n")
    precious = git(developed, "rev-parse", "HEAD")
    tree.make("linux", None)  # the series did not change: the tree is the user's
    assert git(developed, "rev-parse", "HEAD") == precious
    _change_series(repo)
    with pytest.raises(LabError, match="not saved") as caught:
        tree.make("linux", None)
    assert "--force" in caught.value.fix
    assert git(developed, "rev-parse", "HEAD") == precious
    tree.make("linux", None, force=True)
    assert (developed / "mm/from_elsewhere.c").exists()
    assert git(developed, "rev-parse", tree.PREVIOUS) == precious


def test_an_update_takes_over_a_changed_series(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    _change_series(repo)
    tree.make("linux", None)
    assert (developed / "mm/from_elsewhere.c").read_text() == "int x;\n"
    assert tree.save(series.get("linux"), developed) == []


def test_numbers_come_from_notes_subjects_and_order(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    commit(developed, "mm: at the end", "0920", mm__Makefile="obj-y := page_alloc.o thing.o\n")
    commit(developed, "mm: after the end", mm__Makefile="obj-y := thing.o page_alloc.o\n")
    tree.save(series.get("linux"), developed)
    assert [tree.number_of(p.name) for p in series.get("linux").patches()] == [1, 101, 102, 920, 921]
    # Without notes the subjects remember.
    git(developed, "update-ref", "-d", tree.NOTES)
    assert tree.save(series.get("linux"), developed) == []


def test_a_tree_made_by_hand_can_be_saved(source: Path, repo: Path, tmp_path: Path) -> None:
    hand = tmp_path / "hand"
    hand.mkdir()
    git(hand, "init", "-q")
    commit(hand, "base", **{n.replace("/", "__").replace(".", "_DOT_"): t for n, t in BASE.items()})
    git(hand, "tag", "base")
    commit(hand, "mm: by hand", mm__hand_DOT_c="int hand;\n", mm__Makefile="obj-y := page_alloc.o hand.o\n")
    tree.save(series.get("linux"), hand)
    assert series.get("linux").new_files() == ["mm/hand.c"]
    assert [p.name for p in series.get("linux").patches()] == ["0001-mm-by-hand.patch"]


def test_a_merge_is_refused(developed: Path) -> None:
    git(developed, "checkout", "-q", "-b", "side", "base")
    commit(developed, "side", mm__side_DOT_c="x\n")
    git(developed, "checkout", "-q", "knownzero")
    git(developed, "merge", "-q", "--no-edit", "side")
    with pytest.raises(LabError, match="merges"):
        tree.save(series.get("linux"), developed)


def test_what_is_gone_from_the_tree_goes_from_the_repository(developed: Path, repo: Path) -> None:
    tree.save(series.get("linux"), developed)
    git(developed, "reset", "-q", "--hard", "base")
    commit(
        developed,
        "mm: fix a line",
        mm__page_alloc_DOT_c=BASE["mm/page_alloc.c"].replace("line 7\n", "line seven\n"),
    )
    tree.save(series.get("linux"), developed)
    assert not (repo / "linux/new").exists()
    assert [p.name for p in (repo / "linux/patches").iterdir() if p.suffix == ".patch"] == [
        "0001-mm-fix-a-line.patch"
    ]


def test_export_puts_new_files_where_they_are_first_used(developed: Path, repo: Path, tmp_path: Path) -> None:
    tree.save(series.get("linux"), developed)
    (repo / "linux/cover-letter.txt").write_text("mm: the thing\n\nWhy there is a thing.\n\n{{ base }}\n")
    done = export.export("linux", tmp_path / "mails")
    mails = done.mails
    assert [m.name[:4] for m in mails] == ["0000", "0001", "0002", "0003"]
    letter = mails[0].read_text()
    assert "Subject: [PATCH 0/3] mm: the thing" in letter
    assert "Why there is a thing." in letter
    assert "\nThe series is for Linux 7.3.4.\n" in letter
    # A commit that nobody else has tells nobody anything.
    assert "base-commit: " not in letter
    assert set(series.touched(mails[2].read_bytes())) == {"mm/Makefile", "mm/thing.c", "mm/thing.h"}
    # They apply with git am, and give the same tree.
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(developed), str(clone))
    git(clone, "checkout", "-q", "base")
    # As the README has it: the cover letter changes nothing.
    git(clone, "am", "-q", "--empty=drop", *[str(m) for m in mails])
    assert git(clone, "rev-parse", "HEAD^{tree}") == git(developed, "rev-parse", "HEAD^{tree}")
    with pytest.raises(LabError, match="not empty"):
        export.export("linux", tmp_path / "mails")
    # The commits of this test are signed by nobody; nothing else is to be said of these mails.
    assert {p.check for p in done.problems} - {"sender"} == {"sign-off"}
    assert len([p for p in done.problems if p.check == "sign-off"]) == 3
    assert any("not tried on other sources" in remark for remark in export.remarks(done, "linux"))


def test_the_letter_says_what_was_found_on_other_sources(developed: Path, repo: Path, tmp_path: Path) -> None:
    tree.save(series.get("linux"), developed)
    (repo / "linux/cover-letter.txt").write_text("mm: the thing\n\n{{ base }}\n")
    newer = tmp_path / "newer"
    for name, text in {**BASE, "Makefile": BASE["Makefile"].replace("4", "7")}.items():
        (newer / name).parent.mkdir(parents=True, exist_ok=True)
        (newer / name).write_text(text)
    against.against("linux", str(newer))
    done = export.export("linux", tmp_path / "mails")
    words = " ".join(done.mails[0].read_text().split())
    assert "The series is for Linux 7.3.4. On 7.3.7 (newer) all 3 patches apply as they are." in words
    assert "on linux 7.3.7 (newer): all 3 patches apply as they are" in export.remarks(done, "linux")


@pytest.mark.usefixtures("source")
def test_a_placeholder_that_is_wrong_is_told_before_anything_is_written(repo: Path, tmp_path: Path) -> None:
    (repo / "linux/cover-letter.txt").write_text("mm: the thing\n\n{{ tabel() }}\n")
    with pytest.raises(LabError, match="cannot fill in"):
        export.export("linux", tmp_path / "mails")
    assert not (tmp_path / "mails").exists()
