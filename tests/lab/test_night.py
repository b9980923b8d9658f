# SPDX-License-Identifier: GPL-2.0
"""The night: steps that pass, fail, cannot run, are interrupted and resumed, and its report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from lab.core import errors, paths
from lab.core.errors import UsageError
from lab.core.paths import REPO
from lab.patches.repo import Repo
from lab.testing import cases, night
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED
from lab.testing.night import STOPPED, WAITING, Night, Step, run_night

GOOD = {"id": "t::good[kasan]", "amounts": {"skips_checked": 1500000}}
BAD = {"id": "t::bad", "state": FAILED, "message": "2 bytes leaked <here>"}
FULL = {"id": "t::full", "state": BROKEN, "message": "the disk is full"}
LEFT = {"id": "t::left", "state": SKIPPED, "message": "no cargo"}


@pytest.fixture(autouse=True)
def no_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the lab, ``python -m lab`` runs a few lines of Python."""
    (tmp_path / "repo" / "lab").mkdir(parents=True)
    program = "import os, sys, time\nFILE = sys.argv[2]\nexec(sys.argv[1])\n"
    (tmp_path / "repo" / "lab" / "__main__.py").write_text(program)
    monkeypatch.setattr(paths, "REPO", tmp_path / "repo")


def step(name: str, script: str, marks: str = "") -> Step:
    return Step(name, name, [script, f"{{folder}}/{name}.jsonl"], marks)


def suite_of(name: str, code: int, *found: Mapping[str, object]) -> Step:
    text = "".join(json.dumps(one) + "\n" for one in found)
    return step(name, f"open(FILE, 'a').write({text!r}); raise SystemExit({code})", marks=name)


def test_a_step_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = "sys.exit(print('kz: it broke\\n  why: a bug\\n  fix: look') or 3)"
    one = Night(
        tmp_path / "n",
        [
            suite_of("tests", 1, GOOD, BAD),
            suite_of("hunts", 3, FULL),
            suite_of("fuzz", 0, LEFT),
            suite_of("matrix", 0, GOOD, LEFT),
            step("thp", ""),
            step("order0", broken),
            step("boot", "raise SystemExit(1)"),
        ],
    )
    assert run_night(one) == errors.FAILED
    states = [FAILED, BROKEN, SKIPPED, PASSED, PASSED, BROKEN, FAILED]
    assert [part.state for part in one.steps] == states
    page = (tmp_path / "n" / "report.txt").read_text()
    for text in (
        "2 bytes leaked <here>\nAgain: ./kz test --nightly --stage tests -- t::bad",
        "the disk is full",
        "t::left: skipped: no cargo",
        "t::good[kasan]: passed: 1,500,000 skips checked",
        "it broke",
        "1 passed, 1 failed",
    ):
        assert text in page
    assert night.load(one.folder).steps == one.steps


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([suite_of("tests", 0, GOOD), suite_of("fuzz", 0, LEFT)], errors.OK),
        ([suite_of("fuzz", 0, LEFT)], errors.MACHINE),
        ([suite_of("fuzz", 0, GOOD, FULL)], errors.MACHINE),
    ],
)
def test_the_exit_code(tmp_path: Path, steps: list[Step], code: int) -> None:
    assert run_night(Night(tmp_path / "n", steps)) == code


@pytest.mark.parametrize(
    ("script", "state", "why"),
    [
        ("print('all fine')", BROKEN, "no test was run"),
        ("open(FILE, 'w').write('half of')", BROKEN, "no test was run"),
        (
            f"open(FILE, 'w').write({json.dumps(GOOD)!r}); raise SystemExit(1)",
            FAILED,
            "exit code 1",
        ),
        (
            f"open(FILE, 'w').write({json.dumps(GOOD)!r}); raise SystemExit(3)",
            BROKEN,
            "exit code 3",
        ),
        (
            f"open(FILE, 'w').write({json.dumps(GOOD)!r}); raise SystemExit(130)",
            BROKEN,
            "exit code 130",
        ),
        (f"open(FILE, 'w').write({json.dumps(BAD)!r})", FAILED, ""),
        ("os.kill(os.getpid(), 9)", BROKEN, "signal 9"),
        ("raise SystemExit(2)", SKIPPED, "none of these tests"),
    ],
)
def test_only_a_report_of_success_counts(tmp_path: Path, script: str, state: str, why: str) -> None:
    one = Night(tmp_path / "n", [step("hunts", script, marks="hunt")])
    run_night(one)
    (found,) = one.steps
    assert (found.state, why in found.why) == (state, True)


def test_a_report_names_the_code() -> None:
    repo = Repo(paths.REPO)
    repo.git("init", "-q")
    seen: list[str] = []
    steps = (
        ("code", True),
        ("docs/nights.md", True),
        ("code", True),
        ("code", False),
        ("code", False),
    )
    for name, commit in steps:
        file = paths.REPO / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{len(seen)}\n")
        if commit:
            repo.git("add", ".")
            repo.git("commit", "-qm", f"change {name}")
        seen.append(night.tested())
    assert seen[0] == seen[1] != seen[2]
    assert seen[3].startswith(f"{seen[2]} M code ") and seen[4].startswith(f"{seen[2]} M code ")
    assert seen[3] != seen[4]


SLOW = (
    "print('runs', flush=True); "
    "os.path.exists(FILE) or os.kill(os.getppid(), open(FILE, 'w') and 2) or time.sleep(10_000)"
)


def test_a_stopped_night_goes_on(tmp_path: Path) -> None:
    """On the same code, with the same settings; what has ended does not run again."""
    one = Night(tmp_path / "n", [step("bench", SLOW), step("series", "raise SystemExit(1)")])
    with pytest.raises(KeyboardInterrupt):
        run_night(one)
    assert [part.state for part in one.steps] == [STOPPED, WAITING]
    two = night.load(one.folder)
    assert two.goes_on_as(one)
    assert not two.goes_on_as(replace(one, steps=one.steps[:1]))
    assert not two.goes_on_as(replace(one, settings={"KNOWNZERO_FUZZ_SECONDS": "60"}))
    assert not two.goes_on_as(replace(one, facts={"knownzero": "another commit"}))
    assert run_night(two) == errors.FAILED
    assert [part.state for part in two.steps] == [PASSED, FAILED]
    assert two.steps[0].seconds > one.steps[0].seconds
    log = (two.folder / "bench.log").read_text()
    assert log.count("\nruns\n") == 2
    assert run_night(two) == errors.FAILED
    assert (two.folder / "bench.log").read_text() == log
    assert not two.goes_on_as(two)


def test_another_night_begins_when_the_code_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Night] = []
    commits = ["one", "one", "two"]
    monkeypatch.setattr(night, "facts", lambda: {"knownzero": commits[len(begun)]})
    monkeypatch.setattr(night, "steps", lambda *_: [step("fuzz", "", marks="fuzz")])

    def stop(one: Night) -> int:
        begun.append(one)
        # The time, which begins the name of a folder, has seconds only.
        one.folder = one.folder.with_name(f"{commits.index(one.facts['knownzero'])}")
        one.save()
        return errors.OK

    monkeypatch.setattr(night, "run_night", stop)
    for _ in commits:
        night.main([], "", [])
    first, second, third = (one.folder for one in begun)
    assert first == second != third


INTERRUPT = """
import signal, sys
from pathlib import Path
from lab import cli
from lab.core import paths
from lab.testing import night
paths.REPO = Path(sys.argv[1])
slow = "import subprocess; print('sleeps', flush=True); subprocess.run(['sleep', '312'])"
signal.signal(signal.SIGTERM, cli._terminate)
step = night.Step("hunts", "hunts", [slow, "-"])
night.run_night(night.Night(Path(sys.argv[2]), [step]))
"""


def words_of(cmdline: Path) -> bytes:
    """The command of a process; empty for one that has ended, of another run perhaps."""
    try:
        return cmdline.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_a_report_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "n"
    # No other process sleeps for so long.
    program = INTERRUPT.replace("312", f"312.{os.getpid()}")
    argv = [sys.executable, "-c", program, str(tmp_path / "repo"), str(folder)]
    with subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(REPO)}, stderr=subprocess.PIPE
    ) as process:
        while not (
            (folder / "hunts.log").exists() and "sleeps\n" in (folder / "hunts.log").read_text()
        ):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(number)
        process.communicate(timeout=60)
    ours = b"sleep\x00312.%d\x00" % os.getpid()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if words_of(path) == ours]
    assert night.load(folder).steps[0].state == STOPPED
    assert STOPPED in (folder / "report.txt").read_text()


def test_every_test_belongs_to_one_stage() -> None:
    """The first stage has all tests without the others' marks, which are declared and in use."""
    first, *others = (part.marks for part in night.steps() if part.marks)
    assert first == f"not ({' or '.join(others)})"
    declared = (REPO / "pyproject.toml").read_text(encoding="utf-8")
    for mark in others:
        assert f'"{mark}: ' in declared
        assert any(
            f"pytest.mark.{mark}" in file.read_text()
            for file in (REPO / "tests").rglob("test_*.py")
        )


def test_what_a_stage_runs() -> None:
    found = night.steps("up or down", ["-x"])
    assert list(dict.fromkeys(one.stage for one in found)) == list(night.NAMES)
    words = {one.name: " ".join(one.words) for one in found}
    assert words["fuzz"] == (
        "test --select up or down -- -p lab.testing.cases --cases={folder}/fuzz.jsonl -m fuzz -x"
    )
    assert words["bench-thp"] == "bench thp --strict --output {folder}/bench/thp"
    assert words["series-qemu"] == "series check qemu --each"
    assert night.choose(["series-qemu", "fuzz", "fuzz"]) == ["fuzz", "series-qemu"]
    with pytest.raises(UsageError, match="nonsense"):
        night.choose(["nonsense"])


SUITE = """
import pytest
def test_good(record_property): record_property("skips_checked", 7)
@pytest.mark.parametrize("x", range(8))
def test_many(x): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="no cargo")
def test_skipped(): pass
@pytest.mark.xfail(reason="not yet")
def test_expected(): assert 0
"""


def run_suite(tmp_path: Path, *options: str) -> str:
    (tmp_path / "test_it.py").write_text(SUITE)
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "lab.testing.cases",
        f"--cases={tmp_path / 'c'}",
        "-n2",
        "--rootdir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [*argv, *options, str(tmp_path)], cwd=REPO, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_pytest_writes_cases_and_leaves_out_those_that_have_ended(tmp_path: Path) -> None:
    first = run_suite(tmp_path, "-k", "good or bad or skipped or expected")
    found = {case.id.partition("::")[2]: case for case in cases.read(tmp_path / "c")}
    states = {
        "test_good": PASSED,
        "test_bad": FAILED,
        "test_skipped": SKIPPED,
        "test_expected": SKIPPED,
    }
    assert {name: case.state for name, case in found.items()} == states, first
    assert found["test_good"].amounts == {"skips_checked": 7}
    assert "assert 1 == 2" in found["test_bad"].message
    assert (found["test_skipped"].message, found["test_expected"].message) == (
        "no cargo",
        "is expected to fail: not yet",
    )
    assert "8 passed" in run_suite(tmp_path)
    assert len(cases.read(tmp_path / "c")) == 12
