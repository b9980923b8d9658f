# SPDX-License-Identifier: GPL-2.0
"""A night: its stages, their steps and verdicts, and the folder that keeps them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab.core import errors, lock, paths
from lab.core.errors import LabError, UsageError
from lab.testing import cases
from lab.testing.cases import BROKEN, FAILED, PASSED, SKIPPED, Case

WAITING, RUNNING, INTERRUPTED = "not reached", "running", "interrupted"
ENDED = (PASSED, FAILED, BROKEN, SKIPPED)
WORST = (RUNNING, INTERRUPTED, FAILED, BROKEN, WAITING, PASSED, SKIPPED)

# Stages by name: the mark of their tests (pyproject.toml) and a title. ``tests`` has all tests without a mark.
MARKED = {
    "hunts": ("hunt", "leak hunts"),
    "fuzz": ("fuzz", "fuzzers"),
    "matrix": ("matrix", "boot matrix: other configurations, processors and command lines"),
    "packages": ("packages", "packages, installed and booted"),
}
# The series come last: they build after each patch, and take the rest of the night.
NAMES = ("tests", *MARKED, "bench", "series-linux", "series-qemu")


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

    @property
    def state(self) -> str:
        """The worst state of its steps."""
        return min((step.state for step in self.steps.values()), key=WORST.index, default=SKIPPED)

    @property
    def seconds(self) -> float:
        """The time that its steps took."""
        return sum(step.seconds for step in self.steps.values())


def stages(select: str = "", pytest_options: Sequence[str] = ()) -> list[Stage]:
    """All stages. ``select`` (pytest's -k) and ``pytest_options`` are for those that run tests."""
    from lab.bench import BENCHES

    chosen = ["--select", select] if select else []

    def tests(name: str, title: str, marks: str) -> Stage:
        return Stage(name, title, {name: ["test", *chosen, "--", "-m", marks, *pytest_options]}, marks)

    others = " or ".join(mark for mark, _ in MARKED.values())
    benches = {name: ["bench", name, "--strict", "--output", f"{{folder}}/bench/{name}"] for name in BENCHES}
    return [
        tests("tests", "all other tests", f"not ({others})"),
        *(tests(name, title, mark) for name, (mark, title) in MARKED.items()),
        Stage("bench", "every bench", benches),
        *(
            Stage(f"series-{name}", f"the {name} series, built after each patch",
                  {name: ["series", "check", name, "--each"]})
            for name in ("linux", "qemu")
        ),
    ]  # fmt: skip


def choose(wanted: Sequence[str]) -> list[str]:
    """The names of the stages to run, in their order; UsageError for one that does not exist."""
    for name in wanted:
        if name not in NAMES:
            raise UsageError(f"Bad --stage: {name}", "no stage has this name", f"use {', '.join(NAMES)}")
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
        """Write state.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        data = {**asdict(self), "folder": ""}
        lock.write_atomically(self.folder / "state.json", json.dumps(data, indent=1))

    def cases(self, stage: Stage) -> list[Case]:
        """The tests of a stage that have ended."""
        return cases.read(self.folder / f"{stage.name}.jsonl")

    def same_as(
        self, facts: dict[str, str], shard: str, settings: dict[str, str], wants: Sequence[object]
    ) -> bool:
        """Whether it runs the same commands, of the same commit."""
        commands = [(stage.name, stage.commands) for stage in self.stages]
        same = (self.facts.get("knownzero"), self.shard, self.settings)
        return commands == wants and same == (facts.get("knownzero"), shard, settings)

    def unfinished(self) -> bool:
        """Whether a step is left to run."""
        return any(step.state not in ENDED for stage in self.stages for step in stage.steps.values())

    def exit_code(self) -> int:
        """1 after a failure; 3 when a step could not run, or nothing passed; else 0."""
        states = {step.state for stage in self.stages for step in stage.steps.values()}
        if FAILED in states:
            return errors.FAILED
        waits = states & {WAITING, INTERRUPTED}
        return errors.OK if BROKEN not in states and (PASSED in states or waits) else errors.MACHINE


def load(folder: Path) -> Night:
    """A night from its folder; LabError when it holds none."""
    try:
        data: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        for stage in data["stages"]:
            stage["steps"] = {name: Step(**step) for name, step in stage["steps"].items()}
        parts = [Stage(**stage) for stage in data.pop("stages")]
        return Night(**{**data, "folder": folder, "stages": parts})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LabError(
            f"{folder} holds no night", f"state.json: {error}", "name a folder under out/night"
        ) from None


def root() -> Path:
    """The folder of all nights."""
    return paths.out() / "night"


def all_nights() -> Iterator[Night]:
    """Every night in the folder, the newest first."""
    for folder in sorted(root().glob("*/state.json"), reverse=True):
        with contextlib.suppress(LabError):
            yield load(folder.parent)


def merge(folders: Sequence[Path]) -> Night:
    """One night from the shards of several machines."""
    nights = [load(folder) for folder in folders]
    merged = Night(new_folder("-merged"), [], nights[0].command, facts=nights[0].facts)
    merged.began = min(night.began for night in nights)
    merged.save()
    for night in nights:
        for stage in night.stages:
            own = next((one for one in merged.stages if one.name == stage.name), None)
            if own is None:
                own = Stage(stage.name, stage.title, {}, stage.marks)
                merged.stages.append(own)
            own.steps |= {f"{name} in {night.folder.name}": step for name, step in stage.steps.items()}
            with (merged.folder / f"{stage.name}.jsonl").open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(asdict(case)) + "\n" for case in night.cases(stage))
    merged.save()
    return merged


def new_folder(suffix: str = "") -> Path:
    """A folder for a new night, named by the time."""
    folder = root() / (time.strftime("%Y%m%d-%H%M%S") + suffix)
    return folder if not folder.exists() else folder.with_name(f"{folder.name}-{os.getpid()}")
