# SPDX-License-Identifier: GPL-2.0
"""The bench of the two devices, without a guest: what it asks for and what it makes of the answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.bench import BENCHES, BenchOptions, device, session
from lab.build import daemon
from lab.core.errors import TestFailure
from lab.report.page import write_reports
from lab.report.results import SIDES, Result, load

MIB = 1 << 20


class FakeDaemon:
    """A daemon whose guest does at once what it is asked."""

    def __init__(self) -> None:
        self.process = SimpleNamespace(pid=os.getpid())
        self.size = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        self.size = request.get("bytes", self.size)
        return {"ok": True, "actual": self.size}


class FakeGuest:
    """A guest of 2 GiB that reports all it has."""

    def __init__(self, with_daemon: bool) -> None:
        self.pid = os.getpid()
        self.daemon = FakeDaemon() if with_daemon else None
        self.current = 2048 * MIB

    def qmp(self, command: str, **arguments: int) -> dict[str, int]:
        if command == "balloon":
            self.current = arguments["value"]
        return {"base-memory": 2048 * MIB, "actual": self.current}


class FakeSide:
    """Counts what is reported; ``zero`` is how much of it the device says is zero."""

    def __init__(self, name: str, zero: int = 512 * MIB, back: int = 512 * MIB) -> None:
        self.name = name
        self.guest = FakeGuest(name == "ours")
        self.known, self.on_host = 0, 1024 * MIB
        self.zero, self.back = zero, back
        self.asked: list[str] = []

    def sh(self, command: str) -> list[str]:
        self.asked.append(command)
        if command == device.DIRTY:
            self.on_host = 1024 * MIB
        elif session.FLUSH in command:
            self.known += self.zero
            self.on_host -= self.back
        return [str(self.known // 4096)]

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(argv[0])
        known = 0
        if argv[0] == "flush" or "--report" in argv:
            known = self.zero
            self.on_host -= self.back
        return {
            "wall_ns": 20_000_000,
            "longest_ns": 4_000_000,
            "p99_ns": 1500,
            "lost_ns": 5_000_000,
            "vmstat": {"pgzeroed_set_reported": known // 4096},
            "argv": argv,
        }


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_on_host", lambda side: side.on_host)
    monkeypatch.setattr(device, "warm_host", lambda size: None)


def pair(**more: int) -> session.Pair:
    sides = [cast(session.Side, FakeSide(name, **more)) for name in ("base", "ours")]
    return session.Pair(sides[0], sides[1], "tcg", session.Built(Path("q"), "base", "knownzero"))


def step(*rates: float) -> device.Step:
    return device.Step([*rates], [10.0] * len(rates), [1.0] * len(rates))


def found(
    base: tuple[float, ...], ours: tuple[float, ...], gaps: tuple[float, ...] = (1, 2, 3)
) -> device.Found:
    """Rates of both sides; ``gaps`` is what ours takes where base takes 1, 2 and 3."""
    stalls = {
        "base": device.Stall([1, 2, 3], [1, 2, 3], [1, 2, 3]),
        "ours": device.Stall([*gaps], [*gaps], [*gaps]),
    }
    return device.Found(
        {name: {"base": step(*base), "ours": step(*ours)} for name in device.WORDS},
        {"base": [1, 2, 3], "ours": [*gaps]},
        {(mode, state): stalls for mode in device.STALLS for state in device.STATES},
    )


def test_it_is_a_bench() -> None:
    assert BENCHES["device"].module == "lab.bench.device"


def test_every_step_is_measured_on_both_sides() -> None:
    both = pair()
    measured = device.rounds(both, BenchOptions(pairs=3, size_mb=64))
    for steps in measured.steps.values():
        for one in steps.values():
            assert len(one.rate) == len(one.cpu) == len(one.daemon) == 3
            assert min(one.rate) > 0
    assert measured.latencies == {"base": [20.0] * 3, "ours": [20.0] * 3}
    assert len(measured.stalls) == 4
    for sides in measured.stalls.values():
        for gaps in sides.values():
            assert gaps == device.Stall([4.0] * 3, [1.5] * 3, [25.0] * 3)
    # The warm-up as well: memory is dirty before it is reported, before it goes into the balloon, and before
    # each stall is measured.
    for side in (both.base, both.ours):
        asked = cast(FakeSide, side).asked
        assert asked.count(device.DIRTY) == 16
        assert asked.count("flush") == 4
        assert asked.count("stall") == 16
        assert asked.index(device.DIRTY) < asked.index(f"echo 0 > {session.FLUSH}")
    assert set(measured.steps["report"]["base"].daemon) == {0}


def test_a_stall_is_compared_with_as_long_a_time_without_reports() -> None:
    side = pair().ours
    told = device.stall(side, "alloc")
    assert told["reporting"]["argv"] == ("stall", "--mode", "alloc", "--report")
    assert told["idle"]["argv"] == ("stall", "--mode", "alloc", "--ms", "20")


def test_a_balloon_is_resized_on_either_side() -> None:
    both = pair()
    for side in (both.base, both.ours):
        assert device.actual(side) == 0
        assert device.resize(side, 256 * MIB) == 256 * MIB
        assert device.actual(side) == 256 * MIB
        assert device.resize(side, 0) == 256 * MIB
    assert cast(Any, both.base.guest).current == 2048 * MIB


@pytest.mark.parametrize("more", [{"zero": 0}, {"back": 100 * MIB}])
@pytest.mark.parametrize(
    "what",
    [device.report, device.latency, lambda side: device.stall(side, "spin")],
    ids=["report", "latency", "stall"],
)
def test_reports_that_do_not_arrive_are_no_result(
    what: Callable[[Any], object], more: dict[str, int]
) -> None:
    with pytest.raises(TestFailure, match="do not arrive"):
        what(pair(**more).ours)


def test_a_device_that_is_slower_is_named() -> None:
    fast, slow = (1000.0, 1010.0, 990.0, 1000.0), (500.0, 510.0, 490.0, 500.0)
    metrics = {metric.name: metric for metric in device.metrics_of(found(fast, slow, gaps=(10, 20, 30)))}
    # Three figures of three steps, the latency, and three of stalls in two modes and two states.
    assert len(metrics) == 9 + 1 + 12
    missed = {name for name, metric in metrics.items() if metric.target and not metric.target.met}
    assert missed == {
        *("device.report.rate", "device.inflate.rate", "device.deflate.rate", "device.report.latency"),
        *(f"device.stall.{mode}.{gap}.reporting" for mode in ("spin", "alloc") for gap in device.GAPS),
    }
    assert metrics["device.report.rate"].change_percent == -50
    targets = [metric.target for metric in device.metrics_of(found(fast, fast)) if metric.target]
    assert len(targets) == 10
    assert all(target.met for target in targets)


@pytest.mark.parametrize(("rate", "met"), [(1000.0, True), (950.0, True), (700.0, False)])
def test_a_daemon_is_held_against_a_bare_loop(
    monkeypatch: pytest.MonkeyPatch, rate: float, met: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def punch(rounds: int, size_mb: int) -> dict[str, list[float]]:
        asked.append((rounds, size_mb))
        return {"bare": [1000.0, 1001.0, 999.0], "daemon": [rate, rate + 1, rate - 1]}

    monkeypatch.setattr(daemon, "punch", punch)
    metric = device.punch_metric(BenchOptions(pairs=7, size_mb=64))
    assert asked == [(7 * device.PUNCH_TURNS, 64)]
    assert (metric.base.median, metric.ours.median) == (1000.0, rate)
    assert metric.target and metric.target.met is met


@pytest.mark.slow
@pytest.mark.nightly  # it takes cargo minutes to build all that for release
def test_punching_is_measured() -> None:
    found = daemon.punch(2, 16)
    assert len(found["bare"]) == len(found["daemon"]) == 2
    assert min(*found["bare"], *found["daemon"]) > 0


def test_both_sides_have_their_own_names(tmp_path: Path) -> None:
    metrics = device.metrics_of(found((1, 2, 3), (1, 2, 3)))
    result = Result("device", "tcg", {}, "./kz bench device", metrics, sides=device.SIDES)
    result.save(tmp_path)
    assert load(tmp_path).sides == device.SIDES
    write_reports([load(tmp_path)], tmp_path)
    assert "| in QEMU | vhost-user |" in (tmp_path / "report.md").read_text()
    assert "<th>in QEMU</th><th>vhost-user</th>" in (tmp_path / "report.html").read_text()
    assert Result("thp", "tcg", {}, "", []).sides == list(SIDES)
