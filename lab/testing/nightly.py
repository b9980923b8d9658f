# SPDX-License-Identifier: GPL-2.0
"""``kz test --nightly``: what takes hours, stage by stage, with one page that says how it went.

Each stage is a ``kz`` of its own, with its output in a log. One that fails does not stop the others, and the
page is written anew before each and in the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core import errors, paths, progress, run
from lab.core.errors import LabError, UsageError

if TYPE_CHECKING:
    from lab.testing.summary import Benched, Entry, Found, Summary

# What the tests are told, unless the environment says otherwise: each leak hunt half an hour, and the kernel's
# package with the configuration of Debian's own for clouds, which takes one or two hours to build.
SETTINGS = {
    "KNOWNZERO_STRESS_SECONDS": "1800",
    "KNOWNZERO_FUZZ_SECONDS": "600",
    "KNOWNZERO_TEST_KERNEL_PACKAGE": "cloud",
}
# Seconds that an interrupted stage has to write what it knows; pytest takes most of them.
LAST_WORDS = 60.0
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True)
class Place:
    """Where a stage leaves what it has to say."""

    folder: Path
    name: str

    @property
    def log(self) -> Path:
        """Its output."""
        return self.folder / f"{self.name}.log"

    @property
    def results(self) -> Path:
        """JUnit's XML of tests."""
        return self.folder / f"{self.name}.xml"

    @property
    def stdout(self) -> Path:
        """Its standard output, of a stage whose output is not all in the log."""
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Stage:
    """A part of the night: a command, and how to tell what came of it (given its exit code)."""

    name: str
    title: str
    argv: Callable[[Place], list[str]]
    judge: Callable[[Place, int], Found]
    marks: str = ""  # of the tests that it runs
    lists_cases: bool = False
    keeps_stdout: bool = False


# The marks of tests (pyproject.toml) that make a stage of their own, in the order of the night.
MARKED = {
    "hunts": ("hunt", "leak hunts"),
    "fuzz": ("fuzz", "fuzzers"),
    "matrix": ("matrix", "boot matrix: other configurations, processors and command lines"),
    "packages": ("packages", "packages, installed and booted"),
}
# Building after each patch goes on where it was interrupted: it comes last, and takes what is left of the night.
NAMES = ("tests", *MARKED, "bench", "series-linux", "series-qemu")


def stages(select: str = "", pytest_options: Sequence[str] = ()) -> list[Stage]:
    """All stages. ``select`` (pytest's -k) and ``pytest_options`` are for those that run tests."""
    others = " or ".join(mark for mark, _ in MARKED.values())
    found = [_tests("tests", "all other tests", f"not ({others})", select, pytest_options)]
    found += [_tests(name, title, mark, select, pytest_options) for name, (mark, title) in MARKED.items()]
    found.append(
        Stage(
            "bench",
            "every bench",
            lambda place: _kz("bench", "all", "--output", str(place.folder / place.name)),
            judge_benches,
        )
    )
    return [*found, _series("linux"), _series("qemu")]


def _kz(*words: str) -> list[str]:
    return [sys.executable, "-m", "lab", *words]


def _series(name: str) -> Stage:
    return Stage(
        f"series-{name}",
        f"the {name} series, built after each patch",
        lambda place: _kz("series", "check", name, "--each", "--json"),
        judge_series,
        keeps_stdout=True,
    )


def _tests(name: str, title: str, marks: str, select: str, options: Sequence[str]) -> Stage:
    def argv(place: Place) -> list[str]:
        chosen = ["--select", select] if select else []
        return _kz("test", "--junit", str(place.results), *chosen, "--", "-m", marks, *options)

    return Stage(
        name,
        title,
        argv,
        lambda place, code: judge_tests(place, code, bool(select)),
        marks=marks,
        lists_cases=name != "tests",
    )


def judge_tests(place: Place, code: int, selected: bool = False) -> Found:
    """How tests went, by their results and the exit code: nothing has passed that does not say so itself."""
    from lab.testing import junit
    from lab.testing.junit import State
    from lab.testing.summary import Found

    try:
        cases = junit.read(place.results)
    except LabError as error:
        state = State.FAILED if code == errors.FAILED else State.BROKEN
        return Found(state, f"{_ended(code, place.log)}\n{error.what}: {error.why}")
    if junit.count(cases, State.FAILED):
        return Found(State.FAILED, cases=cases)
    if code == errors.FAILED:
        return Found(State.FAILED, _ended(code, place.log), cases)
    if not cases and selected and code == errors.USAGE:
        return Found(State.SKIPPED, "none of these tests matches --select")
    if junit.count(cases, State.BROKEN) and code in (errors.OK, errors.MACHINE):
        return Found(State.BROKEN, cases=cases)
    if code != errors.OK:
        return Found(State.BROKEN, _ended(code, place.log), cases)
    if not cases:
        return Found(State.BROKEN, "no test was run")
    if not junit.count(cases, State.PASSED):
        return Found(State.SKIPPED, "every test was skipped", cases)
    return Found(State.PASSED, cases=cases)


def judge_series(place: Place, code: int) -> Found:
    """How the check of a series went."""
    from lab.testing.junit import State
    from lab.testing.summary import Found

    built = len(_lines(place.log, r"^kz: \d+/\d+ .+: done in "))
    notes = [f"{built} step{'s' * (built != 1)} built"]
    try:
        told = json.loads(place.stdout.read_text(encoding="utf-8"))["problems"]
        problems = [f"{one['check']}: {one['where']}: {one['text']}" for one in told]
    except (OSError, ValueError, KeyError, TypeError):
        state = State.FAILED if code == errors.FAILED else State.BROKEN
        return Found(state, _ended(code, place.log), notes=notes)
    if problems or code == errors.FAILED:
        return Found(State.FAILED, problems=problems, notes=notes)
    if code != errors.OK:
        return Found(State.BROKEN, _ended(code, place.log), notes=notes)
    return Found(
        State.PASSED, notes=[*notes, "what had passed before and has not changed was not built again"]
    )


def judge_benches(place: Place, code: int, names: Sequence[str] = ()) -> Found:
    """How the benches (``names``: all there are) went, by what each has left in a folder of its own."""
    from lab.bench import BENCHES
    from lab.testing.junit import State
    from lab.testing.summary import Found

    benches = [_benched(place, name, code) for name in names or BENCHES]
    states = [bench.state for bench in benches]
    if State.FAILED in states:
        return Found(State.FAILED, benches=benches)
    if any(state is not State.PASSED for state in states):
        return Found(State.BROKEN, "" if State.BROKEN in states else _ended(code, place.log), benches=benches)
    if code != errors.OK:
        return Found(State.BROKEN, _ended(code, place.log), benches=benches)
    return Found(State.PASSED, benches=benches)


def _benched(place: Place, name: str, code: int) -> Benched:
    from lab.core.units import human, percent
    from lab.report import results
    from lab.testing.junit import State
    from lab.testing.summary import Benched, Figure, Progress

    folder = place.folder / place.name / name
    try:
        why = results.load_error(folder)
        if why:
            state = State.FAILED if why.code == errors.FAILED else State.BROKEN
            return Benched(name, state, f"{why.what}: {why.why}")
        if not (folder / results.FILE_NAME).exists():
            if code == errors.INTERRUPTED:
                return Benched(name, Progress.WAITING)
            return Benched(name, State.BROKEN, "it has left no result: the log says why")
        result = results.load(folder)
    except LabError as error:
        return Benched(name, State.BROKEN, f"{error.what}: {error.why}")
    figures = tuple(
        Figure(
            metric.name,
            human(metric.base.median, metric.unit),
            human(metric.ours.median, metric.unit),
            percent(metric.change_percent),
            metric.target.text,
            metric.target.met,
        )
        for metric in result.metrics
        if metric.target
    )
    return Benched(
        name,
        State.PASSED if all(figure.met for figure in figures) else State.FAILED,
        "" if figures else "measured; it has no targets",
        f"{place.name}/{name}/report.html" if (folder / "report.html").exists() else "",
        result.accelerator,
        result.seconds,
        figures,
    )


def _lines(log: Path, pattern: str) -> list[str]:
    try:
        return re.findall(pattern, log.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return []


def _ended(code: int, log: Path) -> str:
    """Why a stage ended as it did: its last error in three parts, or the end of its log."""
    how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
    if code == errors.INTERRUPTED:
        how = "it was interrupted"
    text = run.tail(log, 40)
    at = [match.start() for match in re.finditer(r"^kz: .+\n  why: ", text, re.MULTILINE)]
    said = text[at[-1] :].removeprefix("kz: ") if at else run.tail(log, 8)
    return f"{said}\n({how})" if at else f"{how}\n{said}"


@dataclass
class Night:
    """A run of some stages: ``everything`` is listed, what is ``chosen`` runs; ``facts`` describe the machine."""

    folder: Path
    everything: Sequence[Stage]
    chosen: Sequence[str]
    command: str
    facts: Callable[[], dict[str, str]]
    settings: dict[str, str] = field(default_factory=dict)

    def run(self) -> int:
        """Run them; the exit code of the night. The page is up to date also when this is interrupted."""
        from lab.testing.summary import Entry, Progress, Summary, judged

        self.folder.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        entries = [
            Entry(
                stage.name,
                stage.title,
                Progress.WAITING if stage.name in self.chosen else Progress.LEFT_OUT,
                lists_cases=stage.lists_cases,
            )
            for stage in self.everything
        ]
        self.summary = Summary(time.time(), self.command, entries)
        try:
            for stage, entry in zip(self.everything, entries, strict=True):
                if entry.state is Progress.WAITING:
                    self._one(stage, entry)
        except BaseException:
            for entry in entries:
                if entry.state is Progress.RUNNING:
                    entry.state = Progress.INTERRUPTED
            self.summary.state = Progress.INTERRUPTED
            self._write(look=False)
            raise
        self.summary.state = judged(entries)
        self._write()
        return exit_code(self.summary)

    def page(self) -> Path:
        """Where the page is."""
        return self.folder / "summary.html"

    def _write(self, look: bool = True) -> None:
        from lab.testing import summary

        self.summary.seconds = time.monotonic() - self._began
        if look:
            self.summary.facts = self.facts()
        summary.write(self.summary, self.folder)

    def _one(self, stage: Stage, entry: Entry) -> None:
        from lab.testing.junit import State
        from lab.testing.summary import Found, Progress

        place = Place(self.folder, stage.name)
        entry.state = Progress.RUNNING
        entry.log = place.log.name
        self._write()
        began = time.monotonic()
        try:
            with progress.step(f"{stage.name}: {stage.title}", place.log):
                code = _execute(stage, place, self.settings)
            entry.found = stage.judge(place, code)
            entry.state = entry.found.state
        except (LabError, OSError) as error:
            entry.found = Found(State.BROKEN, str(error))
            entry.state = State.BROKEN
        except BaseException:
            with contextlib.suppress(LabError, OSError):
                entry.found = stage.judge(place, errors.INTERRUPTED)
                # What it found until then counts; that it did not come to its end does not need a reason.
                entry.found.why = ""
            entry.state = Progress.INTERRUPTED
            raise
        finally:
            entry.seconds = time.monotonic() - began
        progress.note(f"{stage.name}: {entry.state}{': ' * bool(entry.brief)}{entry.brief}")


def _execute(stage: Stage, place: Place, settings: dict[str, str]) -> int:
    """Run a stage; its exit code. Nothing that it started is left, however it ends."""
    before = _children()
    environment = {**os.environ, **settings, "PYTHONPATH": str(paths.REPO), "PYTHONUNBUFFERED": "1"}
    argv = stage.argv(place)
    with contextlib.ExitStack() as files:
        log = files.enter_context(place.log.open("wb"))
        log.write(f"$ {shlex.join(argv)}\n".encode())
        log.flush()
        stdout = files.enter_context(place.stdout.open("wb")) if stage.keeps_stdout else log
        process = subprocess.Popen(
            argv,
            cwd=paths.REPO,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=log,
            start_new_session=True,
        )
        try:
            return process.wait()
        except BaseException:
            # It ends what it started, and writes what it knows.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            raise
        finally:
            run.end_group(process)
            _end_orphans(before)


def _parents() -> dict[int, int]:
    """The parent of each process there is."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            found[int(file.parent.name)] = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
    return found


def _children() -> set[int]:
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def _end_orphans(before: set[int]) -> None:
    """Kill what a stage has left behind: by now it is ours (see ``adopt_orphans``), all but ``before``."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = _children() - before
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def adopt_orphans() -> None:
    """Have processes whose parents ended become ours, and not those of process 1."""
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)


def exit_code(summary: Summary) -> int:
    """1 when something failed; 3 when something could not run, or nothing was tested; else 0."""
    from lab.testing.junit import State

    return {State.PASSED: errors.OK, State.FAILED: errors.FAILED}.get(State(summary.state), errors.MACHINE)


def facts() -> dict[str, str]:
    """This repository, what guests are made of as far as it is built, and the machine."""
    from lab.bench.session import commit, host_facts
    from lab.boot import accel
    from lab.build import linux as build
    from lab.machine import fetch

    found = {"knownzero": commit()}
    for name in fetch.NAMES:
        try:
            found[name] = fetch.identify(name).version
        except LabError as error:
            found[name] = f"unknown: {error.why}"
    try:
        qemu, kernel = build.find_qemu(), build.find_linux("knownzero")
    except LabError as error:
        qemu = kernel = None
        found["images"] = f"unknown: {error.why}"
    found["QEMU's image"] = qemu.parents[2].name if qemu else "not built"
    found["kernel's image"] = kernel.parent.name if kernel else "not built"
    if qemu and kernel:
        works, why = accel.kvm_works(qemu, kernel)
        found["accelerator"] = "kvm" if works else f"tcg: {why}"
    else:
        found["accelerator"] = "not known before a kernel and QEMU are built"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        **found,
        **{f"machine: {k}": v for k, v in host_facts().items()},
        "machine: memory": f"{memory:.0f} GB",
    }


def choose(wanted: Sequence[str]) -> list[str]:
    """The names of the stages to run, in their order; UsageError for one that does not exist."""
    for name in wanted:
        if name not in NAMES:
            raise UsageError(
                f"no stage is called {name!r}", "there are: " + ", ".join(NAMES), "choose one of them"
            )
    return [name for name in NAMES if not wanted or name in wanted]


def main(wanted: Sequence[str], select: str, pytest_options: Sequence[str], command: str) -> int:
    """Run the stages that are ``wanted`` (all when none is); the lab's exit code."""
    from lab.testing import suite as testing

    chosen = choose(wanted)
    everything = stages(select, pytest_options)
    settings = {
        "KNOWNZERO_NIGHTLY": "1",
        **{name: os.environ.get(name, usual) for name, usual in SETTINGS.items()},
    }
    if select or pytest_options:
        marks = [f"({stage.marks})" for stage in everything if stage.marks and stage.name in chosen]
        testing.check_selection(select, " or ".join(marks), pytest_options, settings)
    root = paths.out() / "nightly"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = root / stamp if not (root / stamp).exists() else root / f"{stamp}-{os.getpid()}"

    def described() -> dict[str, str]:
        return {**facts(), **{f"${name}": value for name, value in settings.items()}}

    adopt_orphans()
    night = Night(folder, everything, chosen, command, described, settings)
    try:
        code = night.run()
    except BaseException:
        if night.page().exists():
            progress.note(f"how far it came: {night.page()}")
        raise

    def line(entry: Entry) -> str:
        took = progress.duration(entry.seconds) if entry.seconds else ""
        return f"{entry.state:14}{entry.name:14}{took:>8}  {entry.brief}".rstrip()

    print("\n".join([*map(line, night.summary.entries), str(night.page())]))
    return code
