# SPDX-License-Identifier: GPL-2.0
"""Data races that KCSAN finds while the leak hunter runs: none in our code that has no reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from lab.build import linux as build
from lab.core import paths
from lab.patches import parts
from tests.guest.guests import (
    BALLOON,
    DELAY,
    HUGE_PAGES,
    KZEROPAGED,
    STALE_MEMMAP,
    STRESS_SECONDS,
    STRESS_SEED,
    Record,
    hunted,
    run,
)

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.matrix]

SECONDS = max(120, STRESS_SECONDS)
TITLE = re.compile(r"BUG: KCSAN: (\S+) in (.+)$")
# A function of a trace: its name and offset.
FRAME = re.compile(r"^\s*(?:\[[^\]]*\])?\s+([\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+")
# The line above a trace.
ACCESS = re.compile(r"(?:read|write|assert no \w+)(?:-write)?(?: \(\w+\))? to 0x[0-9a-f]+ of")
END = "Reported by Kernel Concurrency Sanitizer"
# A function that one of our patches adds, in a new file or an old one.
ADDED = re.compile(r"(?m)^\+(?:[a-z]\w*[\s*]+)+(\w+)\([^;]*$")


# A function of Linux that one of our patches changes, by the header of a hunk.
CHANGED = re.compile(r"(?m)^@@ .* @@ (?:[a-z]\w*[\s*]+)+(\w+)\(")
DEEP = 2
# All of the series, and a patch with which KCSAN does not leave the page allocator out.
PARTS = (*(part.name for part in parts.get("linux").parts), "kcsan")
# Reports in our functions, as KCSAN calls them, that are meant: the expression, and why.
REASONS: dict[str, str] = {}


@dataclass(frozen=True)
class Race:
    """A report: what KCSAN calls it, and where: both functions that meet, and their callers."""

    title: str
    where: frozenset[str]


def races(console: str) -> list[Race]:
    """All reports on a console."""
    found = []
    title, where, depth = "", set[str](), 0
    for line in console.splitlines():
        if start := TITLE.search(line):
            title, where, depth = start[2].strip(), set(), DEEP
        elif title and END in line:
            found.append(Race(title, frozenset(where)))
            title = ""
        elif ACCESS.search(line):
            depth = 0
        elif title and depth < DEEP and (frame := FRAME.search(line)):
            where.add(frame[1].partition(".")[0])
            depth += 1
    return found


def added() -> frozenset[str]:
    """The functions that the series adds."""
    folder = paths.REPO / "linux" / "parts"
    texts = (patch.read_text(encoding="utf-8") for patch in folder.glob("*/*.patch"))
    return frozenset(name for text in texts for name in ADDED.findall(text))


def touched() -> frozenset[str]:
    """The functions of Linux that the series changes, by the headers of its hunks."""
    folder = paths.REPO / "linux" / "parts"
    texts = (patch.read_text(encoding="utf-8") for patch in folder.glob("*/*.patch"))
    return frozenset(name for text in texts for name in CHANGED.findall(text))


@pytest.mark.timeout(3600 + 6 * STRESS_SECONDS)
def test_each_race_has_a_reason(record_property: Record) -> None:
    script = (
        f"dmesg | grep -q 'kcsan: selftest: .* passed'; {HUGE_PAGES}; echo 200 > {DELAY}; "
        f"{KZEROPAGED}; stress --seconds {SECONDS} --seed {STRESS_SEED} compact pressure hugetlb "
        f"flush prezero > /tmp/stress & leak_hunter --setup --seconds {SECONDS} --seed "
        f"{STRESS_SEED} --workers 2; wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat"
    )
    result = run(
        script,
        kernel=build.build_linux("debug", config="kcsan", chosen=PARTS),
        devices=[BALLOON],
        cpus=2,
        memory="1G",
        append=STALE_MEMMAP,
        timeout=1800.0 + 4 * SECONDS,
        allow_warnings=True,
    )
    assert all("KCSAN" in line for line in result.violations), result.violations
    hunted(result, record_property)
    console = result.console.read_text(encoding="utf-8", errors="replace")
    found = races(console)
    assert len(found) == console.count("BUG: KCSAN: "), "a report was not understood"
    record_property("data_races", len(found))
    ours = added() | touched()
    assert {"prezero_one", "post_alloc_hook"} <= ours
    unexplained = {
        race.title
        for race in found
        if race.where & ours and not any(re.fullmatch(known, race.title) for known in REASONS)
    }
    assert not unexplained, sorted(unexplained)
