# SPDX-License-Identifier: GPL-2.0
"""The benches of page faults, churn and scale, without a guest: what they ask for and what they make of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.bench import BENCHES, BenchOptions, churn, hostmemory, jobs, page_fault, scale, session
from lab.bench import sizes as guest_sizes
from lab.core.errors import LabError, TestFailure
from lab.report.page import html, write_reports
from lab.report.results import Metric, Result, load

MIB = 1 << 20
IMAGES = session.Built(Path("q"), "base", "knownzero")


class FakeSide:
    """A guest that does at once what it is told; ``back`` is how much of freed memory the host gets."""

    def __init__(self, name: str, back: float = 1.0) -> None:
        self.name = name
        self.back = back
        self.guest = SimpleNamespace(pid=os.getpid(), closed=False)
        self.has_flush = not name.startswith("base")
        self.resident = 100 * MIB
        self.late = False
        self.asked: list[str] = []
        self.shuffle = "Y"
        self.told: dict[str, Any] = {
            "per_second": 1000.0,
            "iterations": 51200,
            "cycles": 4,
            "cycle_wall_ns": 400_000_000,
            "cycle_cpu_ns": 200_000_000,
            "vmstat": {"thp_fault_alloc": 100},
        }
        self.changes: Callable[[], dict[str, Any]] = dict

    def sh(self, command: str) -> list[str]:
        self.asked.append(command)
        self.late = self.late or command == session.LATE
        if session.FLUSH in command:
            self.settle()
        return [self.shuffle]

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(" ".join(argv))
        return self.told | self.changes()

    def settle(self) -> int:
        self.resident -= int(max(0, self.resident - 100 * MIB) * self.back)
        return self.resident


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(side: FakeSide, size_mb: int) -> int:
        side.resident += size_mb * MIB
        return side.resident

    pids: dict[int, FakeSide] = {}

    number = iter(range(1 << 20, 1 << 21))

    def numbered(side: FakeSide, size_mb: int, processes: int = 1) -> int:
        side.guest.pid = next(number)
        pids[side.guest.pid] = side
        return fill(side, size_mb * processes)

    for module in (page_fault, churn, scale):
        monkeypatch.setattr(module, "fill", numbered)
    for module in (churn, scale):
        monkeypatch.setattr(module, "release", lambda side: None if side.late else side.settle())
    for module in (hostmemory, scale):
        monkeypatch.setattr(module, "resident", lambda pid: pids[pid].resident)
    monkeypatch.setattr(page_fault, "release", lambda side: None)
    ticks = itertools.count(step=51_200_000)
    for module in (page_fault, scale):
        monkeypatch.setattr(module, "cpu_ns", lambda pid: next(ticks))
    for module in (page_fault, churn):
        monkeypatch.setattr(module, "warm_host", lambda size: None)


def sides(names: list[str], **more: float) -> list[session.Side]:
    return [cast(session.Side, FakeSide(name, **more)) for name in names]


def fakes(of: list[session.Side]) -> list[FakeSide]:
    return cast(list[FakeSide], of)


@pytest.mark.parametrize("name", ["page-fault", "churn", "scale"])
def test_they_are_benches(name: str) -> None:
    assert BENCHES[name].module == f"lab.bench.{name.replace('-', '_')}"


def test_every_guest_comes_first_and_last() -> None:
    for number in (2, 3, 5):
        orders = [session.by_turns(range(number), turn) for turn in range(-1, 2 * number - 1)]
        assert {order[0] for order in orders} == {order[-1] for order in orders} == set(range(number))
        assert all(sorted(order) == list(range(number)) for order in orders)
        after = {pair for order in orders for pair in itertools.pairwise(order)}
        assert {(b, a) for a, b in after} == after


def metric(base: list[float], ours: list[float]) -> Metric:
    return Metric.of("a.b", "ms", base, ours)


LEVEL = [100.0, 101, 99, 100, 102, 98, 100, 101]


@pytest.mark.parametrize(
    ("times", "met"),
    [
        (1.0, True),
        (0.5, True),
        (1.3, False),  # told from chance
        (1.2, True),
    ],
)
def test_a_limit_is_judged_by_the_interval(times: float, met: bool) -> None:
    made = metric(LEVEL, [value * times for value in LEVEL])
    assert jobs.within(made, 20, 50, "not slower").met is met


def test_noise_is_no_excuse() -> None:
    wide = [50.0, 180, 60, 170, 200, 40, 190, 175]
    made = metric(LEVEL, wide)
    assert made.change_interval and made.change_interval[0] < 0
    assert not jobs.within(made, 0, 10, "not slower").met
    assert jobs.within(made, 0, 100, "not slower").met


def test_what_is_too_noisy_shows_nothing() -> None:
    made = metric(LEVEL, [99.0, 180, 99, 170, 99, 40, 100, 175])
    assert made.change_percent is not None and made.change_percent < 5
    told = jobs.within(made, 0, 5, "not slower")
    assert not told.met
    assert "too noisy to tell" in told.text
    assert "noisy" not in jobs.within(made, 0, 30, "not slower").text


def test_less_is_worse_where_more_is_better() -> None:
    made = metric(LEVEL, [value * 0.97 for value in LEVEL])
    assert jobs.within(made, 0, 5, "no slower").met
    assert not jobs.within(made, 0, 5, "nothing lost", more_is_better=True).met
    few = metric([100.0], [98.0])
    assert "interval" not in jobs.within(few, 0, 5, "nothing lost", more_is_better=True).text
    assert not jobs.within(metric([0.0], [1.0]), 0, 5, "not slower").met


def measured(**more: float) -> page_fault.Found:
    found = page_fault.Found()
    guests = sides([row.name for row in page_fault.ROWS])
    for fake in fakes(guests):
        fake.back = more.get(fake.name, 0.0 if fake.name in ("base", "off") else 1.0)
    page_fault.faults(guests, BenchOptions(pairs=4), found)
    page_fault.memory(guests, 2, found)
    return found


def test_page_faults_are_counted_in_all_rows() -> None:
    found = measured()
    # Four were asked for; of six that are alike the median is known.
    assert {len(values) for values in found.rates.values()} == {6}
    assert len(found.rates) == len(page_fault.ROWS) * 4
    metrics = {one.name: one for one in page_fault.metrics_of(found)}
    assert set(metrics) == {
        *(f"page_fault.{p}.{t}.{r}" for p in ("thp", "nothp") for t in (1, 2) for r in ("off", "on", "bit6")),
        *(
            f"page_fault.{p}.{t}.{r}"
            for p in ("thp", "nothp")
            for t in (1, 2)
            for r in ("shuffle", "loss", "loss_cpu")
        ),
        *(f"page_fault.resident.{r}" for r in ("on", "bit6", "shuffle")),
    }
    assert metrics["page_fault.thp.1.loss_cpu"].ours.median == 1.0
    assert all(one.target.met for one in metrics.values() if one.target)
    assert sum(one.target is not None for one in metrics.values()) == 7


def test_noisy_page_faults_are_counted_more_often() -> None:
    guests = sides(["off", "bit6"])
    found = page_fault.Found()
    _, noisy = fakes(guests)
    rates = itertools.count()
    noisy.changes = lambda: {"per_second": 100.0 + 50 * (next(rates) % 2)}
    page_fault.faults(guests, BenchOptions(pairs=7), found)
    assert {len(values) for values in found.rates.values()} == {7 * page_fault.MOST}
    noisy.changes = dict
    again = page_fault.Found()
    page_fault.faults(guests, BenchOptions(pairs=7), again)
    assert {len(values) for values in again.rates.values()} == {7}


def test_memory_that_stays_with_the_guest_is_named() -> None:
    metrics = {one.name: one for one in page_fault.metrics_of(measured(bit6=0.5))}
    kept, given = metrics["page_fault.resident.bit6"].target, metrics["page_fault.resident.on"].target
    assert kept and not kept.met
    assert given and given.met


def test_lost_page_faults_are_named() -> None:
    found = measured()
    found.rates["thp", 1, "bit6"] = [900.0, 905, 895, 900]
    metrics = {one.name: one for one in page_fault.metrics_of(found)}
    lost = metrics["page_fault.thp.1.loss"].target
    assert lost and not lost.met and "-10.0 %" in lost.text


def test_a_guest_without_a_device_is_not_told_to_flush() -> None:
    guests = sides(["base", "off", "on"])
    page_fault.memory(guests, 2, page_fault.Found())
    assert [side.has_flush for side in guests] == [False, False, True]


def test_small_pages_are_not_taken_for_huge_ones() -> None:
    guests = sides(["off"])
    fakes(guests)[0].told["vmstat"] = {"thp_fault_alloc": 3}
    with pytest.raises(TestFailure, match="huge pages"):
        page_fault.faults(guests, BenchOptions(pairs=1), page_fault.Found())


def test_rows_differ_in_what_they_should() -> None:
    specs = dict(page_fault.specs(BenchOptions(), IMAGES))
    assert specs["base"].kernel == "base" and {specs[row].kernel for row in specs} == {"base", "knownzero"}
    devices = {row: spec.devices[0] for row, spec in specs.items()}
    assert "reporting" not in devices["base"] and devices["base"] == devices["off"]
    assert "x-device-init-reported=off" in devices["on"]
    assert "x-device-init-reported=on" in devices["bit6"] == devices["shuffle"]
    assert [row for row, spec in specs.items() if "shuffle=1" in spec.append] == ["shuffle"]


def test_a_kernel_that_cannot_shuffle_is_found_out() -> None:
    (guest,) = sides(["shuffle"])
    assert page_fault.shuffles(guest)
    fakes([guest])[0].shuffle = "N"
    assert not page_fault.shuffles(guest)


NAMES = [f"{name}-{delay}" for delay in churn.RUN_MS for name in ("base", "ours")]


def churned() -> churn.Found:
    found = churn.Found()
    guests = sides(NAMES)
    churn.allocations(guests, 3, found)
    churn.give_back(guests, 4, found)
    return found


def test_churn_measures_both_jobs_at_all_delays() -> None:
    found = churned()
    assert len(found.runs) == len(churn.JOBS) * len(NAMES)
    assert {len(series.wall_ms) for series in found.runs.values()} == {3}
    assert found.runs["six", ("ours", 250)].wall_ms == [100.0] * 3
    assert {len(values) for values in found.back_s.values()} == {4}
    metrics = {one.name: one for one in churn.metrics_of(found)}
    assert metrics["churn.loop.50ms.alloc_task_clock"].ours.median == 50
    assert len(metrics) == 2 * (3 * 3 + 2) + 4


def test_churn_is_judged_against_base_at_the_long_delay() -> None:
    found = churned()
    for run in ("loop", "six"):
        found.runs[run, ("ours", 250)].wall_ms = [130.0, 131, 129]
    found.back_s = {key: [1.0] if key == ("base", 2000) else [2.0] for key in found.back_s}
    metrics = {one.name: one for one in churn.metrics_of(found)}
    wall, clock = metrics["churn.loop.early.alloc_wall"], metrics["churn.loop.early.alloc_task_clock"]
    assert wall.target and not wall.target.met
    assert clock.target and clock.target.met
    late = metrics["churn.early.time_until_back"].target
    assert late and not late.met


def test_memory_that_never_comes_back_ends_the_bench() -> None:
    (guest,) = sides(["ours-250"], back=0.5)
    with pytest.raises(TestFailure, match="does not get its memory back"):
        churn.time_until_back(guest, timeout=0.05)
    (guest,) = sides(["ours-1"], back=0.5)
    with pytest.raises(TestFailure, match="does not get its memory back"):
        scale.report(guest, timeout=0.05)
    guest.sh(session.LATE)
    with pytest.raises(TestFailure, match="did not report everything"):
        scale.flush(guest)


def test_the_warm_up_of_churn_is_short() -> None:
    guests = sides(NAMES)
    churn.allocations(guests, 1, churn.Found())
    for name, fake in zip(NAMES, fakes(guests), strict=True):
        assert f"--ms {churn.WARM_UP_MS} " in fake.asked[0]
        assert f"--ms {churn.RUN_MS[int(name.split('-')[1])]} " in fake.asked[1]


def test_memory_decides_how_large_guests_are() -> None:
    assert guest_sizes.sizes(16.0) == (1, 2, 4)
    assert guest_sizes.sizes(17.9) == (1, 2, 4)
    assert guest_sizes.sizes(18.0) == (1, 2, 4, 8)
    # All are full at once.
    assert guest_sizes.needed_gb((1, 2, 4, 8)) >= 15 + 2
    with pytest.raises(LabError, match="Not enough memory"):
        guest_sizes.sizes(6.0)
    assert guest_sizes.available_gb() > 0.1


def scaled(monkeypatch: pytest.MonkeyPatch) -> scale.Found:
    def zero_all(side: session.Side, cost: Any, look: float) -> None:
        cost.bytes_zeroed.append(float(scale.fill_mb(side) * MIB))
        cost.seconds.append(scale.fill_mb(side) / 4096)
        cost.cpu_s.append(scale.fill_mb(side) / 8192)

    monkeypatch.setattr(scale, "zero_all", zero_all)
    found: scale.Found = {}
    for name, kernels in (("report", ("base", "ours")), ("flush", ("ours",)), ("prezero", ("ours",))):
        guests = sides([f"{kernel}-{gb}" for kernel in kernels for gb in (1, 2, 4)])
        for side in guests:
            if name == "flush":
                side.sh(session.LATE)
        scale.rounds(guests, 3, name, found)
    return found


def test_scale_measures_each_step_in_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scaled(monkeypatch)
    assert set(found) == {(word, gb) for word in scale.WORDS for gb in (1, 2, 4)}
    assert found["prezero", 4].wall_s == [0.25] * 3 and found["prezero", 1].cpu_s == [0.125] * 3
    metrics = {one.name: one for one in scale.metrics_of(found)}
    assert len(metrics) == 4 * 2 * 2
    # Only ours, and only the largest guest, is judged.
    assert {name for name, one in metrics.items() if one.target} == {
        f"scale.{step}.4gb.{kind}" for step in ("report", "flush", "prezero") for kind in ("wall", "cpu")
    }


def test_what_grows_faster_than_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = scaled(monkeypatch)
    found["prezero", 4].cpu_s = [0.2, 0.21, 0.19]
    metrics = {one.name: one for one in scale.metrics_of(found)}
    slow, same = metrics["scale.prezero.4gb.cpu"].target, metrics["scale.prezero.4gb.wall"].target
    assert slow and not slow.met
    assert same and same.met


def test_dirty_memory_that_stays_dirty_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def zero_all(side: session.Side, cost: Any, look: float) -> None:
        cost.bytes_zeroed.append(1.0)
        cost.seconds.append(1.0)
        cost.cpu_s.append(1.0)

    monkeypatch.setattr(scale, "zero_all", zero_all)
    with pytest.raises(TestFailure, match="did not become zero"):
        scale.prezero(sides(["ours-1"])[0])


def test_all_of_it_is_on_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = [
        Result("page-fault", "tcg", {}, "./kz bench page-fault", page_fault.metrics_of(measured())),
        Result("churn", "tcg", {}, "./kz bench churn", churn.metrics_of(churned())),
        Result(
            "scale", "tcg", {}, "./kz bench scale", scale.metrics_of(scaled(monkeypatch)), sides=scale.SIDES
        ),
    ]
    page = html(results)
    for title in ("Page faults: huge pages, one task", "Until the host has its memory back", "1 GB and 4 GB"):
        assert title in page
    assert "1 GB and 8 GB" not in page
    results[2].save(tmp_path)
    assert load(tmp_path).sides == scale.SIDES
    assert len(write_reports(results, tmp_path)) == 2
