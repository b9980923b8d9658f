# SPDX-License-Identifier: GPL-2.0
"""Building after each patch: which of them, which parts, and what the parts are linked with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.core.errors import LabError, UsageError
from lab.machine import tools
from lab.post import steps
from lab.series import series

PATCH = """From: A B <a@b>
Subject: {name}

---
diff --git a/{name} b/{name}
--- a/{name}
+++ b/{name}
@@ -1 +1 @@
-a
+b
"""


def a_series(root: Path, touched: list[str], new: list[str]) -> series.Series:
    (root / "patches").mkdir()
    names = []
    for number, name in enumerate(touched, start=1):
        names.append(f"{number:04d}-x.patch")
        (root / "patches" / names[-1]).write_text(PATCH.format(name=name), encoding="utf-8")
    (root / "patches" / "series").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    for name in new:
        (root / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "new" / name).write_text("", encoding="utf-8")
    return series.Series("linux", root)


def test_texts_and_tools_are_no_step(tmp_path: Path) -> None:
    what = a_series(
        tmp_path,
        ["mm/a.c", "Documentation/a.rst", "tools/a.c", "MAINTAINERS", "mm/Kconfig", "include/a.h"],
        [],
    )
    assert [step.of_the_kernel for step in steps.steps_of(what)] == [True, False, False, False, True, True]


def test_parts_are_folders_or_what_is_alone_above_others(tmp_path: Path) -> None:
    touched = ["mm/a.c", "mm/b.c", "kernel/sys_ni.c", "kernel/power/a.c", "include/linux/a.h", "tools/x.c"]
    what = a_series(tmp_path, [*touched, "arch/arm/mm/a.c", "arch/x86/lib/a.c"], ["mm/tests/a.c", "mm/c.c"])
    assert steps.parts(what) == ["arch/x86/lib/", "kernel/power/", "kernel/sys_ni.o", "mm/"]


@pytest.mark.slow
def test_a_symbol_that_nobody_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "mm").mkdir()
    code = {"a": "int here(void); int gone_end(void); int base(void); int a(void) { return here() + gone_end() + base(); }",
            "b": "int here(void) { return 1; }",
            "stale": "int never_there(void); int c(void) { return never_there(); }"}  # fmt: skip
    for name, text in code.items():
        subprocess.run(
            ["cc", "-xc", "-c", "-", "-o", tmp_path / "mm" / f"{name}.o"], input=text, text=True, check=True
        )
    members = sorted(f"mm/{name}.o" for name in code if name != "stale")
    subprocess.run(["ar", "cDPrST", "mm/built-in.a", *members], cwd=tmp_path, check=True)
    assert steps.missing_symbols(tmp_path, ["mm/"], {"base"}) == {"gone_end": "mm/a.o"}
    assert steps.missing_symbols(tmp_path, ["mm/stale.o"], {"base"}) == {"never_there": "mm/stale.o"}
    (tmp_path / "fs").mkdir()
    assert steps.missing_symbols(tmp_path, ["fs/"], {"base"}) == {}
    shutil.copy(tmp_path / "mm/a.o", tmp_path / "fs/a.o")
    with pytest.raises(LabError, match=r"cannot read fs/built-in\.a"):
        steps.missing_symbols(tmp_path, ["fs/"], {"base"})


class Fake:
    """Notes what it would build, and what of the new files is there; fails where it is told to."""

    kind = "fake"
    builds = (("x86_64", "knownzero"), ("x86_64", "off"))

    def __init__(self) -> None:
        self.built: list[str] = []
        self.fails = ""

    def inputs(self, arch: str, variant: str) -> list[str]:
        return []

    def __call__(self, tree: Path, step: steps.Step, title: str, arch: str, variant: str) -> list[str]:
        there = "+" if (tree / "mm/new.c").is_file() else ""
        self.built.append(f"{step.name[:4]} {variant} {(tree / 'mm/a.c').read_text().strip()}{there}")
        return ["broken"] if self.fails and self.built[-1].startswith(self.fails) else []


@pytest.fixture
def fake(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    source = tmp_path / "source"
    for name in ("mm/a.c", "mm/b.c", "mm/Makefile", "Documentation/x.rst", "mm/Kconfig"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("a\n", encoding="utf-8")
    (source / "Makefile").write_text("VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\n", encoding="utf-8")
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(source))
    monkeypatch.delenv(steps.AGAIN, raising=False)
    monkeypatch.setattr(tools, "need", lambda *names: None)
    made = Fake()
    monkeypatch.setattr(steps, "_Parts", lambda what: made)
    return made


@pytest.fixture
def short(tmp_path: Path) -> series.Series:
    """Code, a text, then an option with a new file."""
    root = tmp_path / "series"
    root.mkdir()
    what = a_series(root, ["mm/a.c", "Documentation/x.rst", "mm/Kconfig"], ["mm/new.c"])
    third = what.patches()[2]
    text = third.read_text(encoding="utf-8").replace("+b\n", "+config PAGE_ZEROED # new.o\n")
    third.write_text(text, encoding="utf-8")
    return what


ALL = ["0001 knownzero b", "0003 knownzero b+", "0003 off b+"]


def test_each_step_has_its_own_new_files_and_is_built_once(fake: Fake, short: series.Series) -> None:
    assert list(steps.build_each(short, whole=False)) == []
    assert fake.built == ALL
    assert list(steps.build_each(short, whole=False)) == []
    assert fake.built == ALL


def test_what_failed_or_changed_is_built_again(fake: Fake, short: series.Series) -> None:
    fake.fails = "0003 off"
    assert list(steps.build_each(short, whole=False)) == [("0003-x.patch", "x86_64, off, broken")]
    fake.built.clear()
    fake.fails = ""
    assert list(steps.build_each(short, whole=False)) == []
    assert fake.built == ALL[2:]
    fake.built.clear()
    (short.new_root / "mm/new.c").write_text("int x;\n", encoding="utf-8")
    assert list(steps.build_each(short, whole=False)) == []
    assert fake.built == ALL[1:]


def test_a_number_beyond_the_last_patch_is_refused(fake: Fake, short: series.Series) -> None:
    with pytest.raises(UsageError, match="Bad --from"):
        list(steps.build_each(short, whole=False, first=4))
    assert fake.built == []


def test_it_says_how_much_was_built(
    fake: Fake, short: series.Series, capsys: pytest.CaptureFixture[str]
) -> None:
    list(steps.build_each(short, whole=False, first=3))
    assert "linux: 2 builds now, 0 had passed before" in capsys.readouterr().err
    list(steps.build_each(short, whole=False))
    assert "linux: 1 builds now, 2 had passed before" in capsys.readouterr().err


def test_everything_is_built_again_when_asked(
    fake: Fake, short: series.Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(steps.build_each(short, whole=False)) == []
    monkeypatch.setenv(steps.AGAIN, "1")
    assert list(steps.build_each(short, whole=False, first=3)) == []
    assert fake.built == ALL + ALL[1:]
