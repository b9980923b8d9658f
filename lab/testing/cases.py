# SPDX-License-Identifier: GPL-2.0
"""Tests as lines of JSON.

A pytest plugin that writes one as each test ends, and resumes from what is there.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PASSED, FAILED, BROKEN, SKIPPED = "passed", "failed", "could not run", "skipped"


@dataclass
class Case:
    """A test that has ended.

    ``repeats``: why earlier attempts failed. ``amounts``: figures that it recorded.
    """

    id: str
    state: str = PASSED
    seconds: float = 0.0
    message: str = ""
    detail: str = ""
    repeats: list[str] = field(default_factory=list)
    started_again: list[str] = field(default_factory=list)
    amounts: dict[str, int] = field(default_factory=dict)


def read(file: Path) -> list[Case]:
    """The cases of a file; a line that an interruption cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(Case(**json.loads(line)))
    return found


def lines(cases: Iterable[Case]) -> str:
    return "".join(json.dumps(asdict(case)) + "\n" for case in cases)


def count(cases: Iterable[Case]) -> Counter[str]:
    return Counter(case.state for case in cases)


def amounts(cases: Iterable[Case]) -> Counter[str]:
    """The sum of every recorded figure over the tests that passed."""
    total: Counter[str] = Counter()
    for case in cases:
        if case.state == PASSED:
            total.update(case.amounts)
    return total


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.running: dict[str, Case] = {}
        self.repeated: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.running.setdefault(report.nodeid, Case(report.nodeid))
        case.seconds = round(case.seconds + report.duration, 3)
        text = str(report.longrepr or "")
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else text.strip()
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # of pytest-rerunfailures
            case.repeats.append(message.partition("\n")[0])
            self.repeated.add(report.nodeid)
        elif report.failed:
            broken = ("machine", "broken") in report.user_properties
            case.state = BROKEN if broken and case.state != FAILED else FAILED
            # A test may fail in its body and again when it is taken down.
            case.message, case.detail = (
                f"{case.message}\n{message}".strip(),
                f"{case.detail}\n{text}".strip(),
            )
        elif report.skipped and case.state == PASSED:
            reason = (
                f"is expected to fail: {report.wasxfail}" if hasattr(report, "wasxfail") else ""
            )
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else message
            case.state, case.message = SKIPPED, reason or said.removeprefix("Skipped: ")
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            if name == "started_again":
                case.started_again.append(str(value))
            elif name != "attempt" and isinstance(value, int) and not isinstance(value, bool):
                case.amounts[name] = value
        if report.nodeid in self.repeated:  # another attempt follows
            self.repeated.remove(report.nodeid)
            return
        with self.file.open("a", encoding="utf-8") as out:
            out.write(lines([self.running.pop(report.nodeid)]))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", help="append a line of JSON per test; tests that are there are left out"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Write in the controlling process only, which sees the reports of all workers."""
    if config.getoption("--cases") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(config.getoption("--cases"))))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that have ended before the interruption."""
    ended = {case.id for case in read(Path(config.getoption("--cases") or os.devnull))}
    late = [item for item in items if item.nodeid in ended]
    if late:
        config.hook.pytest_deselected(items=late)
        items[:] = [item for item in items if item not in late]
