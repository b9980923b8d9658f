# SPDX-License-Identifier: GPL-2.0
"""The targets and floors of metrics: met, missed, or hidden by noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.report import goals, page, publish
from lab.report.results import Metric, Result
from tests.bench.fakes import run_of

LEVEL = [100.0, 101, 99, 100, 102, 98, 100, 101]
WIDE = [50.0, 180, 60, 170, 200, 40, 190, 175]
NOISY = [99.0, 180, 99, 170, 99, 40, 100, 175]


def times(factor: float) -> list[float]:
    return [value * factor for value in LEVEL]


@pytest.mark.parametrize(
    ("ours", "limit", "beyond", "more_is_better", "verdict", "text"),
    [
        (times(1.0), 20, 50, False, "met", "+0.0 %"),
        (times(0.5), 20, 50, False, "met", "-50.0 %"),
        (times(1.2), 20, 50, False, "met", "+20.0 %"),
        (times(1.3), 20, 50, False, "MISSED", "+30.0 %"),  # the whole interval is above 20 %
        (WIDE, 0, 10, False, "not decided", "interval"),  # its interval reaches below 0
        (WIDE, 0, 100, False, "met", "interval"),
        (NOISY, 0, 5, False, "not decided", "interval"),
        (NOISY, 0, 30, False, "met", "interval"),
        (times(0.97), 0, 5, False, "met", "-3.0 %"),
        (times(0.97), 0, 5, True, "MISSED", "-3.0 %"),
    ],
)
def test_a_limit_is_judged_by_the_interval(
    ours: list[float], limit: float, beyond: float, more_is_better: bool, verdict: str, text: str
) -> None:
    metric = Metric.of("a.b", "ms", LEVEL, ours)
    metric = replace(metric, better="more" if more_is_better else "less")
    target = goals.within(limit, beyond, "not worse")(metric)
    assert target.verdict == verdict and text in target.text


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (times(0.2), "met"),
        (times(0.5), "MISSED"),
        ([30.0, 90] * 5, "not decided"),  # the change is too small, its interval is not
        ([20.0, 20, 20, 20, 90], "not decided"),  # and the other way round
    ],
)
def test_a_saving_that_only_the_interval_reaches_is_not_decided(
    ours: list[float], verdict: str
) -> None:
    assert goals.less(70)(Metric.of("a.b", "ms", LEVEL, ours)).verdict == verdict


@pytest.mark.parametrize(
    ("floor", "verdict"),
    [(times(1.0), "reached"), (times(0.8), "above"), ([80.0, 130] * 5, "not decided")],
)
def test_the_floor_has_a_verdict_of_its_own(floor: list[float], verdict: str) -> None:
    run = run_of()
    of = {"mode": "populate", "size_mb": 256}
    run.add("thp.{mode}.task_clock", (times(10.0), LEVEL), of, floor=floor)
    (made,) = run.metrics
    assert made.target and made.target.verdict == "met" and "floor" not in made.target.text
    assert made.near_floor and made.near_floor.distance == verdict
    result = Result("a", "tcg", {}, "./kz demo", [made])
    assert [line.split(": ")[1] for line in result.missed()] == (
        ["thp.populate.task_clock is above the floor"] if verdict == "above" else []
    )
    for text in (page.html([result]), "\n".join(publish.table(result).text())):
        assert "MISSED" not in text and verdict in text


def test_a_limit_without_an_interval_or_a_base() -> None:
    def judged(base: float, ours: float) -> Any:
        return goals.within(0, 5, "not worse")(Metric.of("a.b", "ms", [base], [ours]))

    assert judged(100, 98).met and "interval" not in judged(100, 98).text
    assert not judged(100, 102).met and not judged(0, 1).met


def test_a_goal_of_less_than_zero_is_missed() -> None:
    assert not goals.less(10)(Metric.of("a.b", "pages", [0.0], [5.0])).met
