# SPDX-License-Identifier: GPL-2.0
"""The page about a nightly run: what is known of each of its stages so far, as HTML and as Markdown."""

from __future__ import annotations

import enum
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup, escape

from lab.core import lock
from lab.core.progress import duration
from lab.report.page import environment
from lab.testing import junit
from lab.testing.junit import Case, State

NAMES = ("summary.html", "summary.md")
# Of what a test printed when it failed; the log of the stage has the rest.
MESSAGE_LINES = 12
DETAIL_LINES = 60


class Progress(enum.StrEnum):
    """How far a stage is that has not ended by itself."""

    WAITING = "not reached"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    LEFT_OUT = "not chosen"


@dataclass(frozen=True)
class Figure:
    """What a bench was meant to show, and the figures it showed."""

    metric: str
    base: str
    ours: str
    change: str
    target: str
    met: bool


@dataclass(frozen=True)
class Benched:
    """A bench; ``report`` is the path of its page from ours, if there is one."""

    name: str
    state: State | Progress
    why: str = ""
    report: str = ""
    accelerator: str = ""
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()

    @property
    def met(self) -> int:
        """How many of its targets are met."""
        return sum(figure.met for figure in self.figures)


@dataclass
class Found:
    """What a stage has found; ``notes`` say what its state does not."""

    state: State
    why: str = ""
    cases: list[Case] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    benches: list[Benched] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Entry:
    """A stage on the page; ``log`` is its path from the page."""

    name: str
    title: str
    state: State | Progress = Progress.WAITING
    seconds: float = 0.0
    log: str = ""
    # Tests that are worth a line each, and not only those that went wrong.
    lists_cases: bool = False
    found: Found = field(default_factory=lambda: Found(State.SKIPPED))

    @property
    def brief(self) -> str:
        """What came out, in a line."""
        found = self.found
        parts = [counts(found.cases)] if found.cases else []
        if found.benches:
            figures = [figure for bench in found.benches for figure in bench.figures]
            parts.append(f"{sum(figure.met for figure in figures)} of {len(figures)} targets met")
            for state in (State.BROKEN, State.FAILED):
                named = [bench.name for bench in found.benches if bench.state is state]
                if named:
                    parts.append(f"{state}: {', '.join(named)}")
        if found.problems:
            parts.append(f"{len(found.problems)} problem{'s' * (len(found.problems) != 1)}")
        parts += found.notes
        if found.why:
            parts.append(found.why.strip().splitlines()[0])
        return "; ".join(parts)

    @property
    def told_more(self) -> bool:
        """Whether there is something to say that ``brief`` has no room for."""
        return bool(self.found.problems) or "\n" in self.found.why.strip()


@dataclass
class Summary:
    """A run: when it began (seconds since 1970), its stages in their order, and what it ran on."""

    began: float
    command: str
    entries: list[Entry]
    facts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    state: State | Progress = Progress.RUNNING

    @property
    def cases(self) -> list[Case]:
        """The tests of all stages."""
        return [case for entry in self.entries for case in entry.found.cases]

    @property
    def hunts(self) -> list[Case]:
        """Leak hunts that passed."""
        return [case for case in self.cases if case.state is State.PASSED and "skips_checked" in case.told]

    @property
    def benches(self) -> list[Benched]:
        """The benches of all stages."""
        return [bench for entry in self.entries for bench in entry.found.benches]

    @property
    def benched(self) -> str:
        """How many targets of benches are met, and how many benches tell nothing of theirs."""
        figures = [figure for bench in self.benches for figure in bench.figures]
        text = f"{sum(figure.met for figure in figures)} of {len(figures)} targets met"
        lost = sum(bench.state in (State.BROKEN, Progress.WAITING) for bench in self.benches)
        return f"{text}, {lost} bench{'es' * (lost != 1)} without a result" if lost else text

    @property
    def worst(self) -> State | Progress:
        """The worst of what is known, also before the end."""
        so_far = judged(self.entries)
        return so_far if so_far in (State.FAILED, State.BROKEN) else self.state

    @property
    def headline(self) -> str:
        """How it went, or goes, in a few words."""
        if self.state is State.PASSED:
            told = ["all that ran passed"]
        elif self.state is State.SKIPPED:
            told = ["nothing was tested"]
        else:
            told = []
        order = (Progress.RUNNING, State.FAILED, State.BROKEN, Progress.INTERRUPTED, State.SKIPPED)
        for state in order:
            names = ", ".join(entry.name for entry in self.entries if entry.state is state)
            if names:
                told.append(f"{state}: {names}")
        text = "; ".join(told) or self.state
        return text[0].upper() + text[1:]


def judged(entries: Sequence[Entry]) -> State:
    """What the stages that ended amount to: a failure first, then what could not run."""
    states = [entry.state for entry in entries]
    for state in (State.FAILED, State.BROKEN, State.PASSED):
        if state in states:
            return state
    return State.SKIPPED


def counts(cases: Sequence[Case]) -> str:
    """How many tests there are of each kind; what there is none of is left out, but those that passed."""
    parts = [f"{junit.count(cases, State.PASSED)} passed"]
    for state in (State.FAILED, State.BROKEN, State.SKIPPED):
        if number := junit.count(cases, state):
            parts.append(f"{number} {state}")
    if number := sum(bool(case.repeats) for case in cases):
        parts.append(f"{number} repeated")
    if number := sum(bool(case.started_again) for case in cases):
        parts.append(f"{number} with guests started again")
    return ", ".join(parts)


def hunted(cases: Sequence[Case]) -> str:
    """What leak hunts have read."""
    total = {
        name: sum(case.told.get(name, 0) for case in cases)
        for name in ("hunted_ms", "pages_hunted", "skips_checked")
    }
    return (
        f"{len(cases)} leak hunt{'s' * (len(cases) != 1)}, {duration(total['hunted_ms'] / 1000)}: "
        f"{total['pages_hunted'] / 1e6:.2f} million pages read by the hunter, "
        f"{total['skips_checked'] / 1e6:.2f} million that were not zeroed and checked"
    )


AMOUNTS = {
    "pages_hunted": "pages read",
    "skips_checked": "not zeroed and checked",
    "fuzz_inputs": "inputs",
    "fuzz_edges": "ways through the code",
    "fuzz_calls": "system calls",
    "fuzz_pages": "pages checked",
}


def amounts(case: Case) -> str:
    """What a test recorded of how much it did."""
    return ", ".join(f"{case.told[name]:,} {words}" for name, words in AMOUNTS.items() if name in case.told)


def _breakable(text: str) -> Markup:
    """A name, which may be broken after slashes, dots, colons and underscores."""
    return Markup(re.sub(r"(::|[/._])", r"\1<wbr>", str(escape(text))))


def _first_lines(text: str, lines: int = MESSAGE_LINES) -> str:
    every = text.strip().splitlines()
    more = [f"(and {len(every) - lines} more lines)"] if len(every) > lines else []
    return "\n".join([*every[:lines], *more])


def _last_lines(text: str, lines: int = DETAIL_LINES) -> str:
    every = text.strip().splitlines()
    more = [f"({len(every) - lines} lines before)"] if len(every) > lines else []
    return "\n".join([*more, *every[-lines:]])


def _cell(text: str) -> str:
    """A text as a cell of a table in Markdown."""
    return " ".join(text.replace("|", "\\|").split())


def _grade(state: State | Progress) -> str:
    """The class of a state on the page."""
    if state is State.PASSED:
        return "good"
    if state is State.FAILED:
        return "bad"
    return "warn" if state in (State.BROKEN, Progress.INTERRUPTED) else "soft"


def render(summary: Summary) -> tuple[str, str]:
    """The page and its Markdown."""
    context = {
        "summary": summary,
        "cases": summary.cases,
        "State": State,
        "Progress": Progress,
        "began": time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(summary.began)),
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
        "amounts": amounts,
        "breakable": _breakable,
        "cell": _cell,
        "count": junit.count,
        "duration": duration,
        "first_lines": _first_lines,
        "grade": _grade,
        "hunted": hunted,
        "last_lines": _last_lines,
    }
    html, markdown = (environment().get_template(f"{name}.j2").render(context) for name in NAMES)
    return html, markdown


def write(summary: Summary, folder: Path) -> Path:
    """Write both into a folder, each whole or not at all; the path of the page."""
    for name, text in zip(NAMES, render(summary), strict=True):
        lock.write_atomically(folder / name, text)
    return folder / NAMES[0]
