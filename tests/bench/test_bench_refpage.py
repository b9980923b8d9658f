# SPDX-License-Identifier: GPL-2.0
"""The bench of reference pages, without a guest: what it asks for and what it makes of the answers."""

from __future__ import annotations

import shlex
from typing import Any

from lab.bench import BENCHES, refpage
from lab.report.results import Metric


class FakeSide:
    """Answers each method with figures of its own."""

    def __init__(self, wall_us: dict[str, int], rss_kb: dict[str, int]) -> None:
        self.wall_us, self.rss_kb = wall_us, rss_kb
        self.asked: list[list[str]] = []

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(list(argv))
        if argv[0] == "refpage_heap":
            how = argv[argv.index("--init") + 1]
            return {"wall_ns": 1000 * self.wall_us[how], "max_rss_kb": self.rss_kb[how]}
        how = argv[argv.index("--method") + 1]
        if how == "memset" and "--nothp" not in argv:
            how = "memset_huge"
        loops = int(argv[argv.index("--loops") + 1])
        return {"wall_ns": 1000 * self.wall_us[how] * loops, "max_rss_kb": self.rss_kb[how]}


def side(refpage_us: int, refpage_kb: int) -> FakeSide:
    slow = dict.fromkeys(refpage.METHODS, 1000)
    return FakeSide(
        slow | {"refpage": refpage_us}, dict.fromkeys(refpage.METHODS, 6000) | {"refpage": refpage_kb}
    )


def found(metrics: list[Metric], name: str) -> Metric:
    return next(metric for metric in metrics if metric.name == name)


def test_it_is_a_bench() -> None:
    assert BENCHES["refpage"].module == "lab.bench.refpage"


def test_time_is_per_mapping_and_held_against_the_posted_series() -> None:
    metrics = refpage.measure(side(10, 3000), 3)  # type: ignore[arg-type]
    page = found(metrics, "refpage.page.time")
    assert (page.base.median, page.ours.median) == (1.0, 0.01)
    assert page.target and page.target.met
    assert "98.8" in page.target.text
    rss = found(metrics, "refpage.page.max_rss")
    assert rss.ours.median == 3000 * 1024
    assert rss.target and rss.target.met
    # The peers have no figure to be held against.
    assert found(metrics, "refpage.page.against_uffd.time").target is None


def test_a_saving_that_is_too_small_is_named() -> None:
    metrics = refpage.measure(side(500, 6100), 3)  # type: ignore[arg-type]
    page, rss = found(metrics, "refpage.page.time"), found(metrics, "refpage.all.max_rss")
    assert page.target and not page.target.met
    assert rss.target and not rss.target.met
    everything = found(metrics, "refpage.all.time")
    assert everything.target and everything.target.met


def test_only_the_huge_variant_may_have_huge_pages() -> None:
    fake = side(10, 3000)
    refpage.measure(fake, 2)  # type: ignore[arg-type]
    with_huge = [argv for argv in fake.asked if "--nothp" not in argv]
    assert {shlex.join(argv[:3]) for argv in with_huge} == {"refpage_bench --method memset"}
    assert len(with_huge) == 2 * len(refpage.TOUCHED)


def test_the_heap_is_measured_by_turns() -> None:
    fake = side(10, 3000)
    metrics = refpage.measure_heap(fake, 2)  # type: ignore[arg-type]
    assert [argv[2] for argv in fake.asked] == ["memset", "refpage", "refpage", "memset"]
    assert found(metrics, "refpage.heap.time").change_percent == -99.0


def test_instructions_are_those_of_one_more_mapping() -> None:
    class Counting(FakeSide):
        def json(self, *argv: str) -> dict[str, Any]:
            told = super().json(*argv)
            return told | {"wall_ns": told["wall_ns"] + 5_000_000}  # of the start, in both

    fake = Counting(dict.fromkeys(refpage.METHODS, 100) | {"refpage": 1}, dict.fromkeys(refpage.METHODS, 1))
    metrics = refpage.measure_instructions(fake)  # type: ignore[arg-type]
    assert [m.name for m in metrics] == [f"refpage.{name}.instructions" for name in ("page", "half", "all")]
    for metric in metrics:
        assert (metric.base.median, metric.ours.median) == (100_000, 1000)
