# SPDX-License-Identifier: GPL-2.0
"""A night: its stages and their steps, the folder that keeps them, and its report."""

import contextlib
import io
import json
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.core import errors, lock, paths, progress
from lab.core.errors import LabError, UsageError
from lab.testing import cases
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
LINES = 60  # of a failure in the report; the log has the rest


@dataclass
class Step:
    """A process of a stage and its result."""

    state: str = WAITING
    why: str = ""
    seconds: float = 0.0


@dataclass
class Stage:
    """A part of the night: commands by the names of their steps.

    ``keys``: of what its files of tests, or else its steps, read (``lab.testing.inputs``).
    """

    name: str
    title: str
    commands: dict[str, list[str]]
    marks: str = ""  # of its tests
    steps: dict[str, Step] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

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
        return Stage(
            name, title, {name: ["test", *chosen, "--", "-m", marks, *pytest_options]}, marks
        )

    series = {name: {name: ["series", "check", name, "--each"]} for name in ("linux", "qemu")}
    others = " or ".join(mark for mark, _ in MARKED.values())
    benches = {
        name: ["bench", name, "--strict", "--output", f"{{folder}}/bench/{name}"]
        for name in BENCHES
    }
    return [
        tests("tests", "all other tests", f"not ({others})"),
        *(tests(name, title, mark) for name, (mark, title) in MARKED.items()),
        Stage("bench", "every bench", benches),
        *(
            Stage(f"series-{name}", f"{name}, built after each patch", each)
            for name, each in series.items()
        ),
    ]


def choose(wanted: Sequence[str]) -> list[str]:
    """The names of the stages to run, in their order; UsageError for one that does not exist."""
    for name in wanted:
        if name not in NAMES:
            raise UsageError(
                f"Bad --stage: {name}", "no stage has this name", f"use {', '.join(NAMES)}"
            )
    return [name for name in NAMES if not wanted or name in wanted]


@dataclass
class Night:
    """A run of stages, kept in a folder: state.json, and a log and the tests of each stage."""

    folder: Path
    stages: list[Stage]
    command: str = "./kz test --nightly"
    shard: str = ""
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        for stage in self.stages:
            for name in stage.commands:
                if cases.mine(name, "" if stage.marks else self.shard):
                    stage.steps.setdefault(name, Step())

    def save(self) -> None:
        data = {**asdict(self), "folder": ""}
        lock.write_atomically(self.folder / "state.json", json.dumps(data, indent=1))
        reports = [line(self, stage) for stage in self.stages]
        lock.write_atomically(
            self.folder / "report.jsonl", "".join(json.dumps(one) + "\n" for one in reports)
        )
        lock.write_atomically(self.folder / "index.html", _page(self, reports))

    def cases(self, stage: Stage) -> list[Case]:
        return cases.read(self.folder / f"{stage.name}.jsonl")

    def same_as(self, shard: str, settings: dict[str, str], wants: Sequence[object]) -> bool:
        commands = [(stage.name, stage.commands) for stage in self.stages]
        return (commands, self.shard, self.settings) == (wants, shard, settings)

    def renew(self, keys: dict[str, dict[str, str]]) -> None:
        """Drop the cases and steps whose keys are others than those in ``keys``, by stage.

        A stage of tests runs again as one step, which leaves out the cases that are kept.
        """
        for stage in self.stages:
            new, found = keys[stage.name], self.cases(stage)
            same = {name for name, key in new.items() if stage.keys.get(name) == key}
            if stage.marks:
                kept = [case for case in found if case.id.partition("::")[0] in same]
                if kept != found:
                    file = self.folder / f"{stage.name}.jsonl"
                    lock.write_atomically(file, cases.lines(kept))
                same = {*stage.steps} if (kept, new) == (found, stage.keys) else set()
            for name in stage.steps.keys() - same:
                stage.steps[name] = Step(seconds=stage.steps[name].seconds)
            stage.keys = new

    def states(self) -> set[str]:
        return {step.state for stage in self.stages for step in stage.steps.values()}

    def unfinished(self) -> bool:
        return not self.states() <= {*ENDED}

    def exit_code(self) -> int:
        """1 after a failure; 3 when a step could not run, or nothing passed; else 0."""
        states = self.states()
        if FAILED in states:
            return errors.FAILED
        fine = BROKEN not in states and states & {PASSED, WAITING, INTERRUPTED}
        return errors.OK if fine else errors.MACHINE


def load(folder: Path) -> Night:
    """A night from its folder; LabError when it holds none."""
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
    for folder in sorted(root().glob("*/state.json"), reverse=True):
        with contextlib.suppress(LabError):
            yield load(folder.parent)


def merge(folders: Sequence[Path]) -> Night:
    nights = [load(folder) for folder in folders]
    merged = Night(new_folder("-merged"), [], nights[0].command, facts=nights[0].facts)
    merged.began = min(night.began for night in nights)
    merged.folder.mkdir(parents=True)
    for night in nights:
        for stage in night.stages:
            own = next((one for one in merged.stages if one.name == stage.name), None)
            if own is None:
                own = Stage(stage.name, stage.title, {}, stage.marks)
                merged.stages.append(own)
            own.steps |= {
                f"{name} in {night.folder.name}": step for name, step in stage.steps.items()
            }
            with (merged.folder / f"{stage.name}.jsonl").open("a", encoding="utf-8") as out:
                out.write(cases.lines(night.cases(stage)))
    merged.save()
    return merged


def new_folder(suffix: str = "") -> Path:
    folder = root() / (time.strftime("%Y%m%d-%H%M%S") + suffix)
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")


# The report.


def line(night: Night, stage: Stage) -> dict[str, Any]:
    """The report of a stage as JSON: its findings have the command that repeats them."""
    again = f"./kz test --nightly --stage {stage.name}"
    found = night.cases(stage)
    findings = []
    for case in (case for case in found if case.state in (FAILED, BROKEN)):
        more = {"why": case.message, "again": f"{again} -- {shlex.quote(case.id)}"}
        findings.append({"test": case.id, "state": case.state, **more})
    findings += [
        {"step": name, "state": step.state, "why": step.why, "again": again}
        for name, step in stage.steps.items()
        if step.why
    ]
    return {
        **{"stage": stage.name, "title": stage.title, "state": stage.state},
        "seconds": round(stage.seconds, 1),
        "tests": cases.count(found),
        "repeated": sum(bool(case.repeats) for case in found),
        "started_again": sum(bool(case.started_again) for case in found),
        "amounts": cases.amounts(found),
        "findings": findings,
    }


def _row(report: dict[str, Any]) -> str:
    parts = [f"{number} {state}" for state, number in report["tests"].items()]
    numbers = report["amounts"] | {name: report[name] for name in ("repeated", "started_again")}
    parts += [f"{number:,} {name.replace('_', ' ')}" for name, number in numbers.items() if number]
    if not report["tests"] and report["findings"]:
        parts.append(report["findings"][0]["why"].partition("\n")[0])
    took = progress.duration(report["seconds"]) if report["seconds"] else ""
    return f"{report['state']:14}{report['stage']:14}{took:>8}  {', '.join(parts)}".rstrip()


def text(night: Night) -> str:
    """The table for the terminal; its last line is the path of the page."""
    rows = [_row(line(night, stage)) for stage in night.stages]
    return "\n".join([*rows, str(night.folder / "index.html")])


def _cut(text: str) -> str:
    return "\n".join(text.splitlines()[-LINES:])


def _page(night: Night, reports: list[dict[str, Any]]) -> str:
    """The report as a page of its own.

    Each stage with a link to its log, the findings, and all tests with a remark.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, file=io.StringIO(), width=150, highlight=False)

    def show(words: str, link: Path | None = None) -> None:
        there = link is not None and (night.folder / link).exists()
        console.print(Text(words, style=f"link {link}" if there else ""))

    show(f"Night of {time.strftime('%Y-%m-%d %H:%M', time.localtime(night.began))}\n")
    for stage, report in zip(night.stages, reports, strict=True):
        show(_row(report), Path(f"{stage.name}.log"))
        for name, step in stage.steps.items() if len(stage.steps) > 1 else ():
            show(f"    {step.state:14}{name}", Path(stage.name, name, "report.html"))
    for report in reports:
        for found in report["findings"]:
            console.rule(
                Text(f"{report['stage']}: {found.get('test') or found['step']}: {found['state']}")
            )
            show(f"{_cut(found['why'])}\nAgain: {found['again']}")
    for stage in night.stages:
        console.rule(f"{stage.name}: tests with figures, repeats, or a reason")
        for case in night.cases(stage):
            remarks = [
                f"{number:,} {name.replace('_', ' ')}" for name, number in case.amounts.items()
            ]
            remarks += [case.message] if case.state == SKIPPED else []
            remarks += [f"repeated: {why}" for why in case.repeats]
            remarks += [f"a guest was started again: {_cut(why)}" for why in case.started_again]
            remarks += [_cut(case.detail)] if case.state == FAILED else []
            if remarks:
                head = f"{case.id}: {case.state}, {progress.duration(case.seconds)}"
                show("\n    ".join([head, *remarks]))
    console.rule("where it ran")
    about = {"command": night.command, **night.facts, **night.settings}
    show("\n".join(f"{key}: {value}" for key, value in about.items()))
    return console.export_html()
