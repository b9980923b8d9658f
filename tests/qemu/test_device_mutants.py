# SPDX-License-Identifier: GPL-2.0
"""Do QEMU's tests of the balloon find anything?

Devices with one mistake each, of which one case must fail.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from lab.build import qemu
from lab.core import paths, run
from lab.machine import fetch
from lab.testing import suite
from tests import hugepages
from tests.kernel import mutants
from tests.qemu.test_qtests import HUGE_PAGES

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(3600)]

PATCHES = {patch.stem: patch for patch in sorted((mutants.FOLDER / "qemu").glob("*.patch"))}
QTEST = "virtio-balloon-reporting-test"


def case_of(name: str) -> str:
    """The case that must fail, from the text above the diff."""
    head = PATCHES[name].read_text(encoding="utf-8").partition("\ndiff --git ")[0]
    found = re.findall(r"^Case: (\S+)$", head, re.MULTILINE)
    assert len(found) == 1, f"{name}: one line 'Case: NAME'"
    return f"/x86_64/virtio-balloon/{found[0]}"


def build(folder: Path, patch: Path | None = None) -> Path:
    """Our QEMU with the mistake of ``patch``, and its firmware, in ``folder``."""
    place = Path(shutil.copytree(qemu.build_qemu().parents[2], folder / "qemu"))
    obj = paths.sub("obj") / f"qemu-{fetch.obtain('qemu').key[:8]}-mutants"
    with mutants.tree_with(patch, "qemu") as tree:
        qemu.make_qemu(tree, obj, paths.log_file("mutants-qemu"), [qemu.PROGRAM.name])
        return Path(shutil.copy2(obj / qemu.PROGRAM.name, place / qemu.PROGRAM))


def run_cases(program: Path, cases: list[str]) -> run.Done:
    obj = suite.build_qtests()
    argv = [str(obj / "tests" / "qtest" / QTEST), "--tap", "-k"]
    argv += [word for case in cases for word in ("-p", case)]
    environment = {**os.environ, "QTEST_QEMU_BINARY": str(program), "G_TEST_DBUS_DAEMON": ""}
    with hugepages.reserved(HUGE_PAGES):
        return run.ask(argv, env=environment, cwd=obj)


def test_none(tmp_path: Path) -> None:
    """The control: without a mistake each of these cases passes."""
    cases = sorted(set(map(case_of, PATCHES)))
    done = run_cases(build(tmp_path), cases)
    assert done.returncode == 0, done.stdout
    for case in cases:
        assert re.search(rf"^ok \d+ {re.escape(case)}$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("name", PATCHES)
def test_mutant(name: str, tmp_path: Path) -> None:
    case = case_of(name)
    done = run_cases(build(tmp_path, PATCHES[name]), [case])
    # GLib's tests end at a failed assertion. Only this case has run.
    found = re.search(rf"^Bail out! ERROR:.*/{QTEST}\.c:\d+:.*$", done.stdout, re.MULTILINE)
    assert done.returncode and found, f"not found:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    print(found[0])
