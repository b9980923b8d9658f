# SPDX-License-Identifier: GPL-2.0
"""A night: steps that run one after the other, and go on after a stop."""

import contextlib
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.core import errors, lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.testing import cases
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED, Case

WAITING, STOPPED = "not reached", "did not end"
ENDED = (PASSED, FAILED, BROKEN, SKIPPED)

# Stages with the mark of their tests (pyproject.toml). ``tests`` has all tests without a mark.
MARKS = {
    "hunts": "hunt",
    "fuzz": "fuzz",
    "matrix": "matrix",
    "packages": "packages",
    "native": "native",
}
# The series come last: they build after each patch, and take the rest of the night.
NAMES = ("tests", *MARKS, "bench", "series-linux", "series-qemu")
# Settings of the tests, unless the environment has others. Each leak hunt takes half an hour; the
# kernel's package gets the configuration of Debian's cloud kernels, which takes one or two hours to
# build.
SETTINGS = {
    "KNOWNZERO_STRESS_SECONDS": "1800",
    "KNOWNZERO_FUZZ_SECONDS": "600",
    "KNOWNZERO_TEST_KERNEL_PACKAGE": "cloud",
}
LAST_WORDS = 60.0  # seconds for an interrupted step to write its results


@dataclass
class Step:
    """A command of a stage, and its result."""

    stage: str
    name: str
    words: list[str]
    marks: str = ""  # of its tests
    state: str = WAITING
    why: str = ""
    seconds: float = 0.0


def steps(select: str = "", pytest_options: Sequence[str] = ()) -> list[Step]:
    """All steps. ``select`` (pytest's -k) and ``pytest_options`` are for those that run tests."""
    from lab.bench.table import BENCHES

    chosen = ["--select", select] if select else []
    others = " or ".join(MARKS.values())
    found = []
    for name, marks in {"tests": f"not ({others})", **MARKS}.items():
        kept = ["-p", "lab.testing.cases", f"--cases={{folder}}/{name}.jsonl"]
        words = ["test", *chosen, "--", *kept, "-m", marks, *pytest_options]
        found.append(Step(name, name, words, marks))
    for name in BENCHES:
        words = ["bench", name, "--strict", "--output", f"{{folder}}/bench/{name}"]
        found.append(Step("bench", f"bench-{name}", words))
    for name in ("linux", "qemu"):
        stage = f"series-{name}"
        found.append(Step(stage, stage, ["series", "check", name, "--each"]))
    return found


def choose(wanted: Sequence[str]) -> list[str]:
    """The names of the stages to run, in their order; UsageError for one that does not exist."""
    for name in wanted:
        if name not in NAMES:
            why, fix = "no stage has this name", f"use {', '.join(NAMES)}"
            raise UsageError(f"Bad --stage: {name}", why, fix)
    return [name for name in NAMES if not wanted or name in wanted]


@dataclass
class Night:
    """A run of steps, kept in a folder: state.json, report.txt, a log and the tests of each."""

    folder: Path
    steps: list[Step]
    command: str = "./kz test --nightly"
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def save(self) -> None:
        data = {**asdict(self), "folder": ""}
        lock.write_atomically(self.folder / "state.json", json.dumps(data, indent=1))
        lock.write_atomically(self.folder / "report.txt", "\n".join([*_report(self), ""]))

    def cases(self, step: Step) -> list[Case]:
        return cases.read(self.folder / f"{step.name}.jsonl")

    def log(self, step: Step) -> Path:
        return self.folder / f"{step.name}.log"

    def goes_on_as(self, other: "Night") -> bool:
        """Whether it has stopped, and ``other`` would run the same commands on the same code."""
        if all(step.state in ENDED for step in self.steps):
            return False
        mine, its = (
            ([step.words for step in one.steps], one.settings, one.facts) for one in (self, other)
        )
        return mine == its

    def exit_code(self) -> int:
        """1 after a failure; 3 when a step could not run, or nothing passed; else 0."""
        states = {step.state for step in self.steps}
        if FAILED in states:
            return errors.FAILED
        return errors.OK if PASSED in states and BROKEN not in states else errors.MACHINE


def load(folder: Path) -> Night:
    """A night from its folder."""
    data: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return Night(**{**data, "folder": folder, "steps": [Step(**one) for one in data["steps"]]})


def root() -> Path:
    return paths.out() / "night"


def last() -> Night | None:
    """The last night that can be read, if there is one."""
    for file in sorted(root().glob("*/state.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return load(file.parent)
    return None


# Running it.


def run_night(night: Night) -> int:
    """Run each step that has not ended. Returns the exit code."""
    for step in night.steps:
        if step.state not in ENDED:
            _run(night, step)
            progress.note(f"{step.name}: {step.state}")
    night.save()
    return night.exit_code()


def _run(night: Night, step: Step) -> None:
    began, before, log = time.monotonic(), step.seconds, night.log(step)
    step.state = STOPPED
    night.save()
    try:
        with progress.step(step.name, log):
            code = _execute(night, step, log)
        step.state, step.why = judge(step, code, night.cases(step), log)
    finally:
        step.seconds = before + time.monotonic() - began
        night.save()


def _execute(night: Night, step: Step, log: Path) -> int:
    """Run a step; its exit code."""
    words = [word.replace("{folder}", str(night.folder)) for word in step.words]
    environment = os.environ | night.settings | {"KNOWNZERO_NIGHTLY": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(paths.REPO)
    with log.open("ab") as out:
        out.write(f"$ ./kz {shlex.join(words)}\n".encode())
        out.flush()
        process: subprocess.Popen[bytes] | None = None
        try:
            with run.uninterrupted():
                process = subprocess.Popen(
                    [sys.executable, "-m", "lab", *words],
                    cwd=paths.REPO,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            return process.wait()
        except BaseException:
            if process:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORDS)
            raise
        finally:
            if process:
                run.end_group(process)


def judge(step: Step, code: int, found: list[Case], log: Path) -> tuple[str, str]:
    """The state of a step by its exit code and its tests, and the reason.

    Only a report of success counts as success.
    """
    why = "" if code == errors.OK else _ended(code, log)
    if not step.marks:
        return {errors.OK: PASSED, errors.FAILED: FAILED}.get(code, BROKEN), why
    states = {case.state for case in found}
    if FAILED in states or code == errors.FAILED:
        return FAILED, "" if FAILED in states else why
    if code == errors.USAGE:  # pytest had nothing to run
        if not found:
            return SKIPPED, "the selection has none of these tests"
        code = errors.OK  # everything had ended before the interruption
    if code not in (errors.OK, errors.MACHINE) or (code and BROKEN not in states):
        return BROKEN, why
    if not found or BROKEN in states:
        return BROKEN, "" if found else "no test was run"
    return (PASSED, "") if PASSED in states else (SKIPPED, "every test was skipped")


def _ended(code: int, log: Path) -> str:
    """The reason of an exit code: the last error in three parts, or the end of the log."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    text = run.tail(log, 40)
    at = [match.start() for match in re.finditer(r"^kz: .+\n  why: ", text, re.MULTILINE)]
    return f"{text[at[-1] :].removeprefix('kz: ') if at else run.tail(log, 8)}\n({how})"


def tested() -> str:
    """The code of a night: the last commit, the files changed since, and a hash of the changes."""
    questions = (["log", "-1", "--format=%h"], ["status", "--porcelain"], ["diff", "HEAD"])
    asked = [
        run.ask(["git", "-C", paths.REPO, *words, "--", ".", ":^docs"]).stdout
        for words in questions
    ]
    changes = [hashlib.sha256(asked[2].encode()).hexdigest()[:8]] if asked[2] else []
    return " ".join([*asked[0].split(), *asked[1].split(), *changes])


def facts() -> dict[str, str]:
    from lab.bench.runner import host_facts
    from lab.machine import fetch

    found = {"knownzero": tested()}
    for name in fetch.NAMES:
        try:
            found[name] = fetch.identify(name).version
        except LabError as error:
            found[name] = f"unknown: {error.why}"
    return {**found, **{f"machine: {key}": value for key, value in host_facts().items()}}


def main(wanted: Sequence[str], select: str, pytest_options: Sequence[str]) -> int:
    """Run the stages that are ``wanted`` (all when none is), or go on with such a night.

    Returns the lab's exit code.
    """
    names = choose(wanted)
    chosen = [step for step in steps(select, pytest_options) if step.stage in names]
    settings = {name: os.environ.get(name, usual) for name, usual in SETTINGS.items()}
    command = shlex.join(["./kz", *sys.argv[1:]])
    folder = root() / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    night = Night(folder, chosen, command, settings, facts())
    if (earlier := last()) and earlier.goes_on_as(night):
        progress.note(f"going on with the night in {earlier.folder}")
        night = earlier
    try:
        return run_night(night)
    finally:
        print("\n".join([*_rows(night), str(night.folder / "report.txt")]))


# The report.


def _rows(night: Night) -> Iterator[str]:
    """A line for each step: its state, its time, and its tests."""
    for step in night.steps:
        states = Counter(case.state for case in night.cases(step))
        tests = ", ".join(f"{number} {state}" for state, number in states.items())
        took = progress.duration(step.seconds) if step.seconds else ""
        yield f"{step.state:14}{step.name:20}{took:>8}  {tests}".rstrip()


def _report(night: Night) -> Iterator[str]:
    """The rows, each failure with the command that repeats it, remarks of tests, the machine."""
    yield f"Night of {time.strftime('%Y-%m-%d %H:%M', time.localtime(night.began))}"
    yield ""
    yield from _rows(night)
    for step in night.steps:
        again = f"Again: ./kz test --nightly --stage {step.stage}"
        if step.why:
            yield f"\n{step.name}: {step.state} (log: {night.log(step)})\n{step.why}\n{again}"
        for case in night.cases(step):
            if case.state in (FAILED, BROKEN):
                yield f"\n{case.id}: {case.state} (log: {night.log(step)})"
                yield f"{case.message}\n{again} -- {shlex.quote(case.id)}"
    yield "\nTests with figures, or a reason to be skipped"
    for step in night.steps:
        for case in night.cases(step):
            figures = [
                f"{number:,} {what.replace('_', ' ')}" for what, number in case.amounts.items()
            ]
            remarks = [*figures, *([case.message] if case.state == SKIPPED else [])]
            if remarks:
                yield f"{case.id}: {case.state}: {', '.join(remarks)}"
    yield ""
    for key, value in {"command": night.command, **night.facts, **night.settings}.items():
        yield f"{key}: {value}"
