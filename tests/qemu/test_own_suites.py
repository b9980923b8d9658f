# SPDX-License-Identifier: GPL-2.0
"""QEMU's qtests for x86_64, and its iotests of balloon and migration, end as they do without the
series.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.boot import accel
from lab.build import images, qemu
from lab.core import paths, run
from lab.machine import debs, fetch

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.slow, pytest.mark.timeout(14400)]

TOOLS = ("qemu-img", "qemu-io", "qemu-nbd", "storage-daemon/qemu-storage-daemon")
TEST = re.compile(r"^build (tests/qtest/[\w-]+): c_LINKER", re.MULTILINE)
CASE = re.compile(r"^(ok|not ok) (?:\d+ )?(?:- )?(.+?)(?: # (SKIP).*)?$", re.MULTILINE)


def build(monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The object folder of QEMU's tools and tests, and its source."""
    source, log = fetch.obtain("qemu"), paths.log_file("qemu-suites")
    obj = paths.sub("obj") / f"qemu-{source.key[:8]}-suites"
    with images.tree_of("qemu", "knownzero", source) as tree, monkeypatch.context() as patch:
        patch.setattr(qemu, "QEMU_OPTIONS", (*qemu.QEMU_OPTIONS, "--enable-tools"))
        qemu.make_qemu(tree, obj, log, [*TOOLS])
        tests = TEST.findall((obj / "build.ninja").read_text(encoding="utf-8"))
        qemu.make_qemu(tree, obj, log, tests)
    for package, place in qemu.FIRMWARE.items():
        shutil.copytree(
            debs.unpacked(package) / place, obj / "qemu-bundle" / place, dirs_exist_ok=True
        )
    for rom in (obj / "optionrom").glob("*.bin"):
        shutil.copy2(rom, obj / "qemu-bundle" / "usr" / "share" / "qemu")
    return obj, tree


def cases(text: str, of: str) -> dict[str, str]:
    """How the cases of a test ended that prints TAP."""
    return {f"{of}: {name}": skipped or state for state, name, skipped in CASE.findall(text)}


def left_out() -> set[str]:
    """Of qtests: migration-test waits for a guest under KVM where KVM opens, and runs no guest."""
    works = accel.choose("auto", qemu.build_qemu()).name == "kvm"
    return set() if works or not Path("/dev/kvm").exists() else {"qtest-x86_64/migration-test"}


def qtests(obj: Path, _: Path) -> dict[str, str]:
    """How each test and each of its cases ended."""
    meson = Path(sys.executable).parent / "meson"
    words = "--suite qtest-x86_64 --no-rebuild --num-processes 2 --timeout-multiplier 4"
    every = json.loads((obj / "meson-info" / "intro-tests.json").read_text(encoding="utf-8"))
    names = {
        test["name"] for test in every if "qtest-x86_64" in " ".join(test["suite"])
    } - left_out()
    run.ask([meson, "test", "-C", obj, *words.split(), *sorted(names)])
    found: dict[str, str] = {}
    for line in (obj / "meson-logs" / "testlog.json").read_text(encoding="utf-8").splitlines():
        test = json.loads(line)
        name = test["name"].split("/")[-1]
        found |= {name: test["result"]} | cases(test["stdout"], name)
    return found


def iotests(obj: Path, tree: Path) -> dict[str, str]:
    """How each test ended that names balloon or migration."""
    folder = tree / "tests" / "qemu-iotests"
    files = [*folder.glob("[0-9][0-9][0-9]"), *(folder / "tests").iterdir()]
    about = re.compile("balloon|migrat")
    names = [
        one.name
        for one in sorted(files)
        if not one.suffix and about.search(one.read_text(encoding="utf-8"))
    ]
    done = run.ask(
        [sys.executable, "check", "-tap", "-qcow2", *names], cwd=obj / "tests" / "qemu-iotests"
    )
    found = cases(done.stdout, "iotest")
    assert len(found) == len(names), done.stdout[-2000:] + done.stderr[-2000:]
    return found


def by_series(case: str, tree: Path) -> bool:
    """Whether the series adds or changes this qtest, which needs it then."""
    file = Path("tests", "qtest", f"{case.split(':')[0]}.c")
    old, new = fetch.pristine(fetch.obtain("qemu")) / file, tree / file
    return new.is_file() and not (old.is_file() and old.read_bytes() == new.read_bytes())


Suite = Callable[[Path, Path], dict[str, str]]


@pytest.mark.parametrize("suite", [qtests, iotests])
def test_own_suite(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    obj, tree = build(monkeypatch)
    # Both run the same tests. QEMU finds its firmware from where it is.
    program = obj / qemu.PROGRAM.name
    programs = {"base": qemu.build_qemu("base"), "ours": qemu.build_qemu()}
    ended = {}
    for name, one in programs.items():
        program.unlink(missing_ok=True)
        shutil.copy2(one, program)
        ended[name] = suite(obj, tree)
        print(f"{name}: {dict(Counter(ended[name].values()))}")
    both = sorted(ended["base"].keys() | ended["ours"].keys())
    states = {case: tuple(one.get(case, "missing") for one in ended.values()) for case in both}
    changed = {
        case: how for case, how in states.items() if len(set(how)) > 1 and not by_series(case, tree)
    }
    print(
        *(f"{case}: {states[case]}" for case in both if not {"ok", "OK"} & set(states[case])),
        sep="\n",
    )
    assert Counter(ended["base"].values())["ok"] > 10
    assert not changed, f"with the series and without: {changed}"
