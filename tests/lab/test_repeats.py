# SPDX-License-Identifier: GPL-2.0
"""A test is repeated when it had no luck with an amount, and never for any other failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.core.paths import REPO
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED, read

TESTS = """
from pathlib import Path
from tests.guest.guests import OutOfLuck

def times(name):
    with Path(__file__).with_name(name).open("a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())

def test_luck_the_second_time():
    if times("luck") < 2:
        raise OutOfLuck("10 is less than 20")

def test_no_luck():
    times("none")
    raise OutOfLuck("10 is less than 20")

def test_half_of_the_time():
    if times("half") % 2:
        raise OutOfLuck("10 is less than 20")

def test_half_of_the_time_is_fine():
    if times("fine") % 2:
        raise OutOfLuck("10 is less than 20", 0.5)

class EmulatorFault(Exception):
    pass

def test_emulator_the_second_time():
    if times("emulator") < 2:
        raise EmulatorFault("an emulated CPU ran code that had been replaced")

def test_emulator_each_time():
    from lab.boot import verdict
    times("each")
    raise verdict.EmulatorFault("an emulated CPU ran code that had been replaced", "", "")

from lab.boot import guest as boot
from lab.boot.spec import BootSpec
from lab.boot.verdict import Ending
from tests.lab.test_console import STALE

class Guest(boot.Guest):
    says = ""

    def __init__(self, spec, images):
        self.spec, self.accel, self.console = spec, "tcg", Path("console.log")

    def comes_up(self):
        return True

    def ending(self):
        return Ending(self.spec, "tcg", self.says, self.console, self.console)

    def close(self):
        pass

def test_emulator_behind_a_failure(monkeypatch):
    first = times("behind") < 2
    monkeypatch.setattr(boot, "Guest", Guest)
    monkeypatch.setattr(boot.resolve, "images", lambda spec: None)
    monkeypatch.setattr(Guest, "says", STALE if first else "")
    with boot.running(BootSpec(kernel="debug", cpus=2)):
        assert not first

def test_kernel_behind_a_failure(monkeypatch):
    times("kernel")
    monkeypatch.setattr(boot, "Guest", Guest)
    monkeypatch.setattr(boot.resolve, "images", lambda spec: None)
    monkeypatch.setattr(Guest, "says", STALE.replace("<1f>", "<cc>"))
    with boot.running(BootSpec(kernel="debug", cpus=2)):
        raise OutOfLuck("10 is less than 20")

def test_skipped():
    '''Reads a pool of huge pages.'''
    import pytest
    pytest.skip("nothing to see")

def test_machine():
    from lab.core.errors import LabError
    raise LabError("no kernel", "the disk is full", "free some space")

def test_guest():
    from lab.boot import guest as boot
    boot.started_again.append("a guest hung")

import pytest

@pytest.fixture
def untidy():
    yield
    raise ValueError("left a mess")

def test_twice_wrong(untidy):
    assert 0, "in its body"

def test_amount(record_property):
    record_property("skips_checked", 7)
    if times("amount") < 2:
        raise OutOfLuck("7 is less than 8")

def test_wrong():
    times("wrong")
    assert 0, "OutOfLuck: in the text of another failure counts for nothing"

def test_worse():
    times("worse")
    try:
        raise OutOfLuck("10 is less than 20")
    except OutOfLuck as luck:
        raise AssertionError("the kernel reported a leak") from luck
"""


def played(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(tests, encoding="utf-8")
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tests.conftest",
            "-p",
            "lab.testing.cases",
            f"--cases={folder / 'cases'}",
            "-c",
            REPO / "pyproject.toml",
            "--rootdir",
            folder,
            folder,
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("starts", "code"), [(10, 0), (11, 1)])
def test_guests_that_are_started_again_too_often_fail_the_run(
    tmp_path: Path, starts: int, code: int
) -> None:
    """A kernel that hangs in one boot of ten would pass else."""
    done = played(
        tmp_path,
        f"""
import pytest
from lab.boot import guest as boot

@pytest.mark.parametrize("start", range({starts}))
def test_guest(start):
    boot.started_again.append("a guest hung")
""",
    )
    assert done.returncode == code, done.stdout
    assert ("guests were started again" in done.stdout) == bool(code)


def test_only_luck_is_tried_again_and_the_results_tell(tmp_path: Path) -> None:
    done = played(tmp_path, TESTS)
    assert "8 failed, 6 passed, 1 skipped, 1 error, 16 rerun" in done.stdout, done.stdout
    assert "test_it.py::test_skipped (Reads a pool of huge pages.): nothing to see" in done.stdout
    assert "started again, test_it.py::test_guest: a guest hung" in done.stdout
    assert {
        name: (tmp_path / name).stat().st_size
        for name in (
            "luck",
            "half",
            "fine",
            "none",
            "emulator",
            "each",
            "behind",
            "kernel",
            "wrong",
            "worse",
        )
    } == {
        "luck": 5,
        "half": 3,
        "fine": 2,
        "emulator": 2,
        "each": 3,
        "behind": 2,
        "kernel": 1,
        "none": 2,
        "wrong": 1,
        "worse": 1,
    }
    cases = {case.id.partition("::test_")[2]: case for case in read(tmp_path / "cases")}
    assert {name: case.state for name, case in cases.items()} == {
        "luck_the_second_time": PASSED,
        "no_luck": FAILED,
        "half_of_the_time": FAILED,
        "half_of_the_time_is_fine": PASSED,
        "emulator_the_second_time": PASSED,
        "emulator_each_time": FAILED,
        "emulator_behind_a_failure": PASSED,
        "kernel_behind_a_failure": FAILED,
        "skipped": SKIPPED,
        "machine": BROKEN,
        "guest": PASSED,
        "twice_wrong": FAILED,
        "amount": PASSED,
        "wrong": FAILED,
        "worse": FAILED,
    }
    assert cases["amount"].amounts == {"skips_checked": 7}
    assert "10 is less than 20" in cases["no_luck"].message
    assert "nothing to see" in cases["skipped"].message
    assert "the disk is full" in cases["machine"].message
    assert (
        "in its body" in cases["twice_wrong"].message
        and "left a mess" in cases["twice_wrong"].message
    )
