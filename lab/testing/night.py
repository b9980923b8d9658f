# SPDX-License-Identifier: GPL-2.0
"""A night: stages that run one after the other, and go on after a stop."""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.core import errors, lock, paths, progress, run
from lab.core.errors import LabError, UsageError
from lab.testing import cases, suite
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED, Case

WAITING, RUNNING, INTERRUPTED = "not reached", "running", "interrupted"
ENDED = (PASSED, FAILED, BROKEN, SKIPPED)
WORST = (RUNNING, INTERRUPTED, FAILED, BROKEN, WAITING, PASSED, SKIPPED)

# Stages by name: the mark of their tests (pyproject.toml) and a title. ``tests`` has all tests
# without a mark.
MARKED = {
    "hunts": ("hunt", "leak hunts"),
    "fuzz": ("fuzz", "fuzzers"),
    "matrix": ("matrix", "boot matrix: other configurations, processors and command lines"),
    "packages": ("packages", "packages, installed and booted"),
    "native": ("native", "a leak hunt without emulation, where /dev/kvm is of kvm_pvm"),
}
# The series come last: they build after each patch, and take the rest of the night.
NAMES = ("tests", *MARKED, "bench", "series-linux", "series-qemu")
# Settings of the tests, unless the environment has others. Each leak hunt takes half an hour; the
# kernel's package gets the configuration of Debian's cloud kernels, which takes one or two hours to
# build.
SETTINGS = {
    "KNOWNZERO_STRESS_SECONDS": "1800",
    "KNOWNZERO_FUZZ_SECONDS": "600",
    "KNOWNZERO_TEST_KERNEL_PACKAGE": "cloud",
}
LINES = 60  # of a failure in the report; the log has the rest
LAST_WORDS = 60.0  # seconds for an interrupted stage to write its results
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass
class Step:
    """A process of a stage and its result."""

    state: str = WAITING
    why: str = ""
    seconds: float = 0.0


@dataclass
class Stage:
    """A part of the night: commands by the names of their steps."""

    name: str
    title: str
    commands: dict[str, list[str]]
    marks: str = ""  # of its tests
    steps: dict[str, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.commands:
            self.steps.setdefault(name, Step())

    @property
    def state(self) -> str:
        return min((step.state for step in self.steps.values()), key=WORST.index, default=SKIPPED)

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps.values())


def stages(select: str = "", pytest_options: Sequence[str] = ()) -> list[Stage]:
    """All stages. ``select`` (pytest's -k) and ``pytest_options`` are for those that run tests."""
    from lab.bench.table import BENCHES

    chosen = ["--select", select] if select else []

    def tests(name: str, title: str, marks: str) -> Stage:
        words = ["test", *chosen, "--", "-m", marks, *pytest_options]
        return Stage(name, title, {name: words}, marks)

    others = " or ".join(mark for mark, _ in MARKED.values())
    benches = {
        name: ["bench", name, "--strict", "--output", f"{{folder}}/bench/{name}"]
        for name in BENCHES
    }
    found = [tests("tests", "all other tests", f"not ({others})")]
    found += [tests(name, title, mark) for name, (mark, title) in MARKED.items()]
    found.append(Stage("bench", "every bench", benches))
    for name in ("linux", "qemu"):
        words = ["series", "check", name, "--each"]
        found.append(Stage(f"series-{name}", f"{name}, built after each patch", {name: words}))
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
    """A run of stages, kept in a folder: state.json, and a log and the tests of each stage."""

    folder: Path
    stages: list[Stage]
    command: str = "./kz test --nightly"
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def save(self) -> None:
        data = {**asdict(self), "folder": ""}
        lock.write_atomically(self.folder / "state.json", json.dumps(data, indent=1))
        lock.write_atomically(self.folder / "report.txt", "\n".join([*_report(self), ""]))

    def cases(self, stage: Stage) -> list[Case]:
        return cases.read(self.folder / f"{stage.name}.jsonl")

    def states(self) -> set[str]:
        return {step.state for stage in self.stages for step in stage.steps.values()}

    def goes_on_as(self, other: "Night") -> bool:
        """Whether it has stopped, and ``other`` would run the same commands on the same code."""
        if self.states() <= {*ENDED}:
            return False
        mine, its = (
            ([(stage.name, stage.commands) for stage in one.stages], one.settings, one.facts)
            for one in (self, other)
        )
        return mine == its

    def exit_code(self) -> int:
        """1 after a failure; 3 when a step could not run, or nothing passed; else 0."""
        states = self.states()
        if FAILED in states:
            return errors.FAILED
        fine = BROKEN not in states and states & {PASSED, WAITING, INTERRUPTED}
        return errors.OK if fine else errors.MACHINE


def load(folder: Path) -> Night:
    """A night from its folder; UsageError when it holds none."""
    try:
        data: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for stage in data["stages"]:
            stage["steps"] = {name: Step(**step) for name, step in stage["steps"].items()}
        parts = [Stage(**stage) for stage in data.pop("stages")]
        return Night(**{**data, "folder": folder, "stages": parts})
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fix = "name a folder under out/night"
        raise UsageError(f"{folder} holds no night", f"state.json: {why}", fix) from None


def root() -> Path:
    return paths.out() / "night"


def all_nights() -> Iterator[Night]:
    """All nights, the last one first."""
    for folder in sorted(root().glob("*/state.json"), reverse=True):
        with contextlib.suppress(LabError):
            yield load(folder.parent)


def new_folder() -> Path:
    folder = root() / time.strftime("%Y%m%d-%H%M%S")
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


# Running it.


def run_night(night: Night) -> int:
    """Run each step that has not ended. Returns the exit code."""
    for stage in night.stages:
        for name, step in stage.steps.items():
            if step.state not in ENDED:
                _step(night, stage, name)
    night.save()
    return night.exit_code()


def _step(night: Night, stage: Stage, name: str) -> None:
    began, before = time.monotonic(), stage.steps[name].seconds
    stage.steps[name] = Step(RUNNING, seconds=before)
    night.save()
    log = night.folder / f"{stage.name}.log"
    try:
        with progress.step(f"{stage.name}: {stage.title if stage.marks else name}", log):
            code = _execute(night, stage, stage.commands[name], log)
        stage.steps[name] = judge(stage, code, night.cases(stage), log)
    except (LabError, OSError) as error:
        stage.steps[name] = Step(BROKEN, str(error))
    except BaseException:
        stage.steps[name] = Step(INTERRUPTED)
        raise
    finally:
        stage.steps[name].seconds = before + time.monotonic() - began
        night.save()
    progress.note(f"{stage.name}: {name}: {stage.steps[name].state}")


def _execute(night: Night, stage: Stage, words: list[str], log: Path) -> int:
    """Run a step; its exit code. No process of it is left, however it ends."""
    words = [word.format(folder=night.folder) if "{folder}" in word else word for word in words]
    environment = os.environ | night.settings | {"KNOWNZERO_NIGHTLY": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = str(paths.REPO)
    environment["KNOWNZERO_CASES"] = str(night.folder / f"{stage.name}.jsonl")
    before = _children()
    with log.open("ab") as out:
        out.write(f"$ ./kz {shlex.join(words)}\n".encode())
        out.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "lab", *words],
            cwd=paths.REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            raise
        finally:
            run.end_group(process)
            # Its orphans, and later theirs, become children of this process (see ``main``).
            late = time.monotonic() + 10
            while time.monotonic() < late and (left := _children() - before):
                for pid in left:
                    with contextlib.suppress(
                        ProcessLookupError, PermissionError, ChildProcessError
                    ):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def judge(stage: Stage, code: int, found: list[Case], log: Path) -> Step:
    """The verdict on a step by its exit code and its tests.

    Only a report of success counts as success.
    """
    why = "" if code == errors.OK else _ended(code, log)
    if not stage.marks:
        return Step({errors.OK: PASSED, errors.FAILED: FAILED}.get(code, BROKEN), why)
    states = cases.count(found)
    if states[FAILED] or code == errors.FAILED:
        return Step(FAILED, "" if states[FAILED] else why)
    if code == errors.USAGE:  # pytest had nothing to run
        if not found:
            return Step(SKIPPED, "the selection has none of these tests")
        code = errors.OK  # everything had ended before the interruption
    if code not in (errors.OK, errors.MACHINE) or (code and not states[BROKEN]):
        return Step(BROKEN, why)
    if not found or states[BROKEN]:
        return Step(BROKEN, "" if found else "no test was run")
    return Step(PASSED) if states[PASSED] else Step(SKIPPED, "every test was skipped")


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
    chosen = [stage for stage in stages(select, pytest_options) if stage.name in names]
    settings = {name: os.environ.get(name, usual) for name, usual in SETTINGS.items()}
    if select or pytest_options:
        marks = " or ".join(f"({stage.marks})" for stage in chosen if stage.marks)
        suite.check_selection(select, marks, pytest_options, {**settings, "KNOWNZERO_NIGHTLY": "1"})
    command = shlex.join(["./kz", *sys.argv[1:]])
    night = Night(new_folder(), chosen, command, settings, facts())
    last = next(all_nights(), None)
    if last and last.goes_on_as(night):
        progress.note(f"going on with the night in {last.folder}")
        night = last
    # Processes whose parents have ended become children of this one, so that they can be ended with
    # their step.
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        return run_night(night)
    finally:
        print(text(night))


# The report.


def _row(night: Night, stage: Stage) -> str:
    found = night.cases(stage)
    numbers = dict(cases.amounts(found))
    numbers["repeated"] = sum(bool(case.repeats) for case in found)
    numbers["started again"] = sum(bool(case.started_again) for case in found)
    parts = [f"{number} {state}" for state, number in cases.count(found).items()]
    parts += [f"{number:,} {name.replace('_', ' ')}" for name, number in numbers.items() if number]
    took = progress.duration(stage.seconds) if stage.seconds else ""
    return f"{stage.state:14}{stage.name:14}{took:>8}  {', '.join(parts)}".rstrip()


def text(night: Night) -> str:
    """The table for the terminal; its last line is the path of the report."""
    rows = [_row(night, stage) for stage in night.stages]
    return "\n".join([*rows, str(night.folder / "report.txt")])


def _cut(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


def _report(night: Night) -> Iterator[str]:
    """The table, each failure with the command that repeats it, remarks of tests, the machine."""
    yield f"Night of {time.strftime('%Y-%m-%d %H:%M', time.localtime(night.began))}"
    yield ""
    for stage in night.stages:
        yield _row(night, stage)
    for stage in night.stages:
        again = f"Again: ./kz test --nightly --stage {stage.name}"
        for name, step in stage.steps.items():
            if step.why:
                yield f"\n{stage.name}: {name}: {step.state}\n{_cut(step.why)}\n{again}"
        for case in night.cases(stage):
            if case.state in (FAILED, BROKEN):
                head = f"{case.id}: {case.state}: {case.message.splitlines()[0]}"
                yield f"\n{head}\n{_cut(case.detail)}\n{again} -- {shlex.quote(case.id)}"
    yield "\nTests with figures, repeats, or a reason to be skipped"
    for stage in night.stages:
        for case in night.cases(stage):
            amounts = case.amounts.items()
            remarks = [f"{number:,} {what.replace('_', ' ')}" for what, number in amounts]
            remarks += [case.message] if case.state == SKIPPED else []
            remarks += [f"repeated: {why}" for why in case.repeats]
            remarks += [f"a guest was started again: {_cut(why)}" for why in case.started_again]
            if remarks:
                head = f"{case.id}: {case.state}, {progress.duration(case.seconds)}"
                yield "\n    ".join([head, *remarks])
    yield ""
    for key, value in {"command": night.command, **night.facts, **night.settings}.items():
        yield f"{key}: {value}"
