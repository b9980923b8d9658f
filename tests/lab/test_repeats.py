# SPDX-License-Identifier: GPL-2.0
"""A test is repeated when it had no luck with an amount, and never for any other failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.paths import REPO

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

class EmulatorFault(Exception):
    pass

def test_emulator_the_second_time():
    if times("emulator") < 2:
        raise EmulatorFault("an emulated CPU ran code that was no longer there")

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


def test_only_luck_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            REPO / "pyproject.toml",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "3 failed, 2 passed, 4 rerun" in done.stdout, done.stdout
    assert {
        name: (tmp_path / name).stat().st_size for name in ("luck", "none", "emulator", "wrong", "worse")
    } == {
        "luck": 2,
        "emulator": 2,
        "none": 3,
        "wrong": 1,
        "worse": 1,
    }
