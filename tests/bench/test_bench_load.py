# SPDX-License-Identifier: GPL-2.0
"""The bench of page faults, without a guest, and the targets of metrics."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from lab.bench import host, page_fault, plan
from lab.bench.plan import BenchOptions
from lab.bench.repeat import Values
from lab.bench.table import BENCHES
from lab.core.errors import LabError, TestFailure
from lab.report import goals, page, plain
from lab.report.results import Metric, Result
from tests.bench.fakes import MIB, FakeSide, by_name, run_of

USUAL = {
    "per_second": 1000.0,
    "iterations": 51200,
    "cycles": 4,
    "cycle_wall_ns": 400_000_000,
    "cycle_cpu_ns": 200_000_000,
    "vmstat": {"thp_fault_alloc": 100},
}


class LoadSide(FakeSide):
    """A guest that frees at once; ``back`` is the part of freed memory that the host gets."""

    def __init__(self, name: str, back: float = 1.0, amount: int = 0) -> None:
        super().__init__(name, lambda *argv: USUAL, "Y")
        self.amount = amount
        self.back = back
        self.resident = 100 * MIB

    def settle(self) -> int:
        self.resident -= int(max(0, self.resident - 100 * MIB) * self.back)
        return self.resident


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: dict[int, LoadSide] = {}
    numbers = iter(range(1 << 20, 1 << 21))
    ticks = itertools.count(step=51_200_000)

    def fill(side: LoadSide, size_mb: int, processes: int = 1) -> int:
        side.guest.pid = next(numbers)
        pids[side.guest.pid] = side
        side.resident += size_mb * processes * MIB
        return side.resident

    monkeypatch.setattr(page_fault, "fill", fill)
    monkeypatch.setattr(page_fault, "release", lambda side: None)
    monkeypatch.setattr(host, "resident", lambda pid: pids[pid].resident)
    monkeypatch.setattr(page_fault, "cpu_ns", lambda pid: next(ticks))
    monkeypatch.setattr(page_fault, "warm_host", lambda size: None)


def sides(names: list[str], **more: Any) -> list[Any]:
    return [LoadSide(name, **more) for name in names]


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
    [(times(0.2), "met"), (times(0.5), "MISSED"), ([30.0, 90] * 5, "not decided")],
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
    for text in (page.html([result]), page.markdown([result]), plain.text(result)):
        assert "MISSED" not in text and verdict in text


def test_a_limit_without_an_interval_or_a_base() -> None:
    def judged(base: float, ours: float) -> Any:
        return goals.within(0, 5, "not worse")(Metric.of("a.b", "ms", [base], [ours]))

    assert judged(100, 98).met and "interval" not in judged(100, 98).text
    assert not judged(100, 102).met and not judged(0, 1).met


def measured(**more: float) -> Values:
    found = Values()
    guests = sides(list(page_fault.ROWS))
    for guest in guests:
        guest.back = more.get(guest.name, 0.0 if guest.name in ("base", "off") else 1.0)
    page_fault.faults(guests, 4, found)
    page_fault.memory(guests, 2, found)
    return found


def page_faults(found: Values) -> dict[str, Metric]:
    run = run_of("page-fault")
    page_fault.figures(run, found)
    return by_name(run)


def test_page_faults_are_counted_in_all_rows() -> None:
    found = measured()
    # Four were asked for; the median of six equal ones is known.
    assert {len(values) for key, values in found.items() if key[0] in ("rate", "cpu")} == {6}
    metrics = page_faults(found)
    rows = ("off", "on", "bit6", "shuffle", "loss", "loss_cpu")
    loops = itertools.product(("thp", "nothp"), (1, 2), rows)
    assert set(metrics) == {
        *(f"page_fault.{pages}.{tasks}.{row}" for pages, tasks, row in loops),
        *(f"page_fault.resident.{row}" for row in ("on", "bit6", "shuffle")),
        *(f"page_fault.returned.{row}" for row in ("on", "bit6", "shuffle")),
    }
    assert metrics["page_fault.thp.1.loss_cpu"].ours.median == 1.0
    targets = [one.target for one in metrics.values() if one.target]
    assert len(targets) == 7 and all(target.met for target in targets)


def test_noisy_page_faults_are_counted_more_often() -> None:
    guests, rates = sides(["off", "bit6"]), itertools.count()
    for noisy, repetitions in ((True, 7 * page_fault.MOST), (False, 7)):
        guests[1].answer = lambda *argv, noisy=noisy: (
            USUAL | ({"per_second": 100.0 + 50 * (next(rates) % 2)} if noisy else {})
        )
        found = Values()
        page_fault.faults(guests, 7, found)
        assert {len(values) for values in found.values()} == {repetitions}


def test_memory_that_stays_with_the_guest_and_lost_page_faults_miss_their_target() -> None:
    found = measured(bit6=0.5)
    found["rate", "thp", 1, "bit6"] = [900.0, 905, 895, 900]
    metrics = page_faults(found)
    missed = {name for name, one in metrics.items() if one.target and not one.target.met}
    assert missed == {"page_fault.returned.bit6", "page_fault.thp.1.loss"}
    lost = metrics["page_fault.thp.1.loss"].target
    assert lost and "-10.0 %" in lost.text


def test_a_guest_without_a_device_gets_no_flush() -> None:
    guests = sides(["base", "off", "on"])
    page_fault.memory(guests, 2, Values())
    assert [side.has_flush for side in guests] == [False, False, True]


def test_small_pages_are_not_taken_for_huge_ones() -> None:
    guests = sides(["off"])
    guests[0].answer = lambda *argv: USUAL | {"vmstat": {"thp_fault_alloc": 3}}
    with pytest.raises(TestFailure, match="huge pages"):
        page_fault.faults(guests, 1, Values())


def test_rows_differ_in_what_they_should() -> None:
    rows = page_fault.ROWS
    assert [name for name, row in rows.items() if row.kernel == "base"] == ["base"]
    assert "reporting" not in rows["base"].device and rows["base"].device == rows["off"].device
    assert "x-device-init-reported=off" in rows["on"].device
    assert "x-device-init-reported=on" in rows["bit6"].device == rows["shuffle"].device
    assert [name for name, row in rows.items() if "shuffle=1" in row.append] == ["shuffle"]
    (guest,) = sides(["shuffle"])
    assert page_fault.shuffles(guest)
    guest.line = "N"
    assert not page_fault.shuffles(guest)


def test_memory_decides_how_large_guests_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.sizes(16.0) == host.sizes(17.9) == (1, 2, 4)
    assert host.sizes(18.0) == (1, 2, 4, 8)
    assert host.needed_gb((1, 2, 4, 8)) >= 15 + 2  # all are full at once
    bench = BENCHES["lockhold"]
    assert bench.needs_gb == pytest.approx(host.needed_gb(host.SIZES))
    monkeypatch.setattr(plan, "available_gb", lambda: 6.0)
    with pytest.raises(LabError, match="Cannot run the bench lockhold"):
        plan.build(plan.plan(bench, BenchOptions()))


def test_a_goal_of_less_than_zero_is_missed() -> None:
    assert not goals.less(10)(Metric.of("a.b", "pages", [0.0], [5.0])).met
