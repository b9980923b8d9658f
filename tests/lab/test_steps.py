# SPDX-License-Identifier: GPL-2.0
"""Building after each patch: which of them, which parts, and what the parts are linked with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab import series, steps

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
            "b": "int here(void) { return 1; }"}  # fmt: skip
    for name, text in code.items():
        subprocess.run(
            ["cc", "-xc", "-c", "-", "-o", tmp_path / "mm" / f"{name}.o"], input=text, text=True, check=True
        )
        (tmp_path / "mm" / f".{name}.o.cmd").touch()
    assert steps.missing_symbols(tmp_path, ["mm/"], {"base"}) == {"gone_end": "mm/a.o"}
