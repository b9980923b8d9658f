# SPDX-License-Identifier: GPL-2.0
"""The bench of reference pages, without a guest: the steps, and the figures of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from lab.bench import refpage
from tests.bench.fakes import by_name, fake, run_of, side

# Of the start of the program, in every answer.
START_NS = 5_000_000


def answering(refpage_us: int, refpage_kb: int, start: int = 0) -> Any:
    """Answers in which memset() takes 1 ms for a mapping, and 6000 KiB."""

    def answer(*argv: str) -> dict[str, Any]:
        ours = "refpage" in argv[2]
        loops = int(argv[argv.index("--loops") + 1]) if "--loops" in argv else 1
        wall = 1000 * (refpage_us if ours else 1000) * loops + start
        return {"wall_ns": wall, "max_rss_kb": refpage_kb if ours else 6000}

    return answer


@pytest.mark.parametrize(("us", "kb", "met"), [(10, 3000, True), (500, 6100, False)])
def test_a_mapping_is_held_against_the_posted_series(us: int, kb: int, met: bool) -> None:
    guest, run = side("ours", answering(us, kb)), run_of("refpage", pairs=3)
    refpage.methods(run, guest)
    found = by_name(run)
    time, rss = found["refpage.page.time"], found["refpage.page.max_rss"]
    assert (time.base.median, time.ours.median) == (1.0, us / 1000)
    assert rss.ours.median == kb * 1024
    assert time.target and rss.target and time.target.met is rss.target.met is met
    assert "98.8" in time.target.text
    # Where all is touched the peak may differ by a page, and no saving is expected.
    all_rss = found["refpage.all.max_rss"].target
    assert all_rss and all_rss.met is met
    assert {len(one.values["ours"]) for one in run.metrics} == {3}
    assert all("--nothp" in line for line in fake(guest).asked)


def test_instructions_are_those_of_the_mappings_alone() -> None:
    run = run_of("refpage")
    refpage.instructions(run, side("ours", answering(10, 1, START_NS)))
    names = [
        f"refpage.{size}{name}.instructions" for size in refpage.FOLIOS for name in refpage.TOUCHED
    ]
    assert [m.name for m in run.metrics] == names
    assert all(m.target and m.target.met for m in run.metrics)
    assert {(m.base.median, m.ours.median) for m in run.metrics} == {(1_000_000, 10_000)}
