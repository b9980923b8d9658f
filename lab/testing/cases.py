# SPDX-License-Identifier: GPL-2.0
"""Tests as lines of JSON.

A pytest plugin that writes one as each test ends, and leaves out the tests that are there.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PASSED, FAILED, BROKEN, SKIPPED = "passed", "failed", "could not run", "skipped"


@dataclass
class Case:
    """A test that has ended. ``amounts``: figures that it recorded."""

    id: str
    state: str = PASSED
    message: str = ""
    amounts: dict[str, int] = field(default_factory=dict)


def read(file: Path) -> list[Case]:
    """The cases of a file; a line that an interruption cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        with contextlib.suppress(ValueError):
            found.append(Case(**json.loads(line)))
    return found


class _Writer:
    def __init__(self, file: Path) -> None:
        self.file = file
        self.running: dict[str, Case] = {}
        self.repeated: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = self.running.setdefault(report.nodeid, Case(report.nodeid))
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else str(report.longrepr or "").strip()
        if report.outcome == "rerun":  # type: ignore[comparison-overlap]  # of pytest-rerunfailures
            self.repeated.add(report.nodeid)
        elif report.failed:
            broken = ("machine", "broken") in report.user_properties
            case.state = BROKEN if broken and case.state != FAILED else FAILED
            # A test may fail in its body and again when it is taken down.
            case.message = f"{case.message}\n{message}".strip()
        elif report.skipped and case.state == PASSED:
            expected = f"is expected to fail: {getattr(report, 'wasxfail', '')}"
            said = report.longrepr[2] if isinstance(report.longrepr, tuple) else message
            case.message = (
                expected if hasattr(report, "wasxfail") else said.removeprefix("Skipped: ")
            )
            case.state = SKIPPED
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            if isinstance(value, int) and not isinstance(value, bool):
                case.amounts[name] = value
        if report.nodeid in self.repeated:  # another attempt follows
            self.repeated.remove(report.nodeid)
            return
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(self.running.pop(report.nodeid))) + "\n")


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
