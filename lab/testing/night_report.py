# SPDX-License-Identifier: GPL-2.0
"""The report of a night: a page, a line of JSON per stage, and a table for the terminal."""

from __future__ import annotations

import functools
import json
import shlex
import time
from pathlib import Path
from typing import Any

import jinja2

from lab.core import lock
from lab.core.progress import duration
from lab.testing import cases
from lab.testing.cases import BROKEN, FAILED, Case
from lab.testing.night import Night, Stage

LINES = 60  # of a failure on the page; the log has the rest


def again(stage: Stage, case: Case | None = None) -> str:
    """The command that repeats a stage, or one of its tests."""
    words = ["./kz", "test", "--nightly", "--stage", stage.name]
    return shlex.join([*words, "--", case.id] if case else words)


def line(night: Night, stage: Stage) -> dict[str, Any]:
    """A stage as JSON."""
    found = night.cases(stage)
    findings = [
        {"test": case.id, "state": case.state, "why": case.message, "again": again(stage, case)}
        for case in found
        if case.state in (FAILED, BROKEN)
    ]
    findings += [
        {"step": name, "state": step.state, "why": step.why, "again": again(stage)}
        for name, step in stage.steps.items()
        if step.why
    ]
    return {
        "stage": stage.name, "title": stage.title, "state": stage.state, "seconds": round(stage.seconds, 1),
        "tests": cases.count(found), "repeated": sum(bool(case.repeats) for case in found),
        "started_again": sum(bool(case.started_again) for case in found),
        "amounts": cases.amounts(found), "findings": findings,
    }  # fmt: skip


def brief(report: dict[str, Any]) -> str:
    """The result of a stage in a line."""
    parts = [f"{number} {state}" for state, number in report["tests"].items()]
    parts += [f"{number:,} {name.replace('_', ' ')}" for name, number in report["amounts"].items()]
    parts += [
        f"{report[name]} {name.replace('_', ' ')}" for name in ("repeated", "started_again") if report[name]
    ]
    if not report["tests"] and report["findings"]:
        parts.append(report["findings"][0]["why"].partition("\n")[0])
    return ", ".join(parts)


@functools.cache
def _template() -> jinja2.Template:
    text = Path(__file__).with_name("night.html.j2").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def write(night: Night) -> None:
    """Write index.html and report.jsonl into the night's folder."""
    report = [line(night, stage) for stage in night.stages]
    text = "".join(json.dumps(one) + "\n" for one in report)
    lock.write_atomically(night.folder / "report.jsonl", text)
    page = _template().render(
        night=night, told=report, stages=list(zip(night.stages, report, strict=True)), brief=brief, duration=duration,
        cut=lambda text: "\n".join(text.splitlines()[-LINES:]),
        began=time.strftime("%Y-%m-%d %H:%M", time.localtime(night.began)),
        headline=headline(night),
        logs={stage.name for stage in night.stages if (night.folder / f"{stage.name}.log").exists()},
        reports={
            name for stage in night.stages for name in stage.steps
            if (night.folder / stage.name / name / "report.html").exists()
        },
    )  # fmt: skip
    lock.write_atomically(night.folder / "index.html", page)


def headline(night: Night) -> str:
    """The night in a sentence."""
    by_state: dict[str, list[str]] = {}
    for stage in night.stages:
        by_state.setdefault(stage.state, []).append(stage.name)
    return "; ".join(f"{state}: {', '.join(names)}" for state, names in by_state.items())


def text(night: Night) -> str:
    """The table for the terminal; its last line is the path of the page."""
    rows = []
    for stage in night.stages:
        took = duration(stage.seconds) if stage.seconds else ""
        rows.append(f"{stage.state:14}{stage.name:14}{took:>8}  {brief(line(night, stage))}".rstrip())
    return "\n".join([*rows, str(night.folder / "index.html")])
