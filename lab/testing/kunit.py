# SPDX-License-Identifier: GPL-2.0
"""Run the kernel's own unit tests and read their results (KTAP) from the console."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from lab.boot import console, guest
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure

_RESULT = re.compile(
    r"^(?P<indent> *)(?P<state>ok|not ok) \d+(?: -)? (?P<name>[^#]*?)(?: *# *(?P<directive>.*))?$"
)
_PLAN = re.compile(r"^(?P<indent> *)1\.\.(?P<count>\d+)$")
_SUBTEST = re.compile(r"^(?P<indent> *)# Subtest: (?P<name>.+)$")
_COMMENT = re.compile(r"^ *# (?P<text>.+)$")


@dataclass(frozen=True)
class Case:
    """One test: ``state`` is passed, failed or skipped; ``text`` what it printed."""

    name: str
    state: str
    text: str = ""


@dataclass
class _Level:
    name: str
    plan: int | None = None
    seen: int = 0
    comments: list[str] = field(default_factory=list)


def parse(text: str) -> list[Case]:
    """The tests of a console log; a test that was announced and never ended has failed."""
    cases: list[Case] = []
    levels: list[_Level] = []
    started = False
    for raw in text.splitlines():
        line = console.unstamped(raw.rstrip())
        if re.match(r"^ *KTAP version \d+$", line):
            started = True
            depth = (len(line) - len(line.lstrip())) // 4
            del levels[depth:]
            levels.append(_Level(""))
        if not started or not levels:
            continue
        if plan := _PLAN.match(line):
            levels[-1].plan = int(plan["count"])
        elif subtest := _SUBTEST.match(line):
            levels[-1].name = subtest["name"].strip()
        elif result := _RESULT.match(line):
            _take(result, levels, cases)
        elif (comment := _COMMENT.match(line)) and levels:
            levels[-1].comments.append(comment["text"])
    for level in levels:
        cases += _unfinished(level, levels)
    return cases


def _path(levels: list[_Level], name: str) -> str:
    return ".".join([level.name for level in levels if level.name] + [name.strip()])


def _take(result: re.Match[str], levels: list[_Level], cases: list[Case]) -> None:
    depth = len(result["indent"]) // 4
    inner = levels[depth + 1 :]
    del levels[depth + 1 :]
    if not levels:
        return
    level = levels[-1]
    level.seen += 1
    if inner:  # the sum of a subtest, whose tests are listed already
        missing = _unfinished(inner[0], [*levels, inner[0]])
        cases += missing
        if result["state"] == "not ok" and not missing and inner[0].seen == 0:
            cases.append(Case(_path(levels, result["name"]), "failed", "\n".join(inner[0].comments)))
        return
    directive = result["directive"] or ""
    state = "failed" if result["state"] == "not ok" else "passed"
    if directive.upper().startswith("SKIP"):
        state = "skipped"
    cases.append(Case(_path(levels, result["name"]), state, "\n".join(level.comments) or directive))
    level.comments.clear()


def _unfinished(level: _Level, levels: list[_Level]) -> list[Case]:
    if level.plan is None or level.seen >= level.plan:
        return []
    return [
        Case(
            _path(levels, "(unfinished)"), "failed", f"{level.plan} tests were announced, {level.seen} ended"
        )
    ]


def run(
    arch: str, glob: str, kernel: str | Path = "debug", timeout: float = 240, mte: bool = False
) -> list[Case]:
    """Boot a kernel and run its built-in tests whose suite matches ``glob``; ``mte``: with memory tags.

    Raises TestFailure when there were none, and whatever ``boot`` raises.
    """
    append = f"kunit.enable=1 kunit.autorun=1 kunit.filter_glob={glob}"
    memory = "256M" if arch == "um" else "1G"
    result = guest.boot(
        BootSpec(
            kernel=kernel,
            arch=arch,
            memory=memory,
            append=append,
            timeout=timeout,
            command=["true"],
            mte=mte,
        )
    )
    cases = parse(result.console_text)
    if not cases:
        raise TestFailure(
            f"no unit test called {glob} ran ({arch})",
            f"the console has no KTAP result (console: {result.console})",
            "check that the kernel has CONFIG_KUNIT and the tests built in",
        )
    return cases
