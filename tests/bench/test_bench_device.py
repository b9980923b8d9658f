# SPDX-License-Identifier: GPL-2.0
"""The bench of the two devices, without a guest: what is no result, and its targets."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench import device, session
from lab.bench.repeat import Values
from lab.bench.runner import Pair
from lab.boot import balloon
from lab.core.errors import TestFailure
from tests.bench.fakes import MIB, FakeSide, by_name, run_of


class FakeDaemon:
    """A daemon whose guest does at once what it is asked."""

    def __init__(self) -> None:
        self.process = SimpleNamespace(pid=os.getpid())
        self.size, self.answers = 0, True

    def ask(self, **request: Any) -> dict[str, Any]:
        self.size = request.get("bytes", self.size)
        return {"ok": self.answers, "actual": self.size}


class FakeGuest:
    """A guest of 2 GiB that reports all it has."""

    def __init__(self, with_daemon: bool) -> None:
        self.pid = os.getpid()
        self.daemon = FakeDaemon() if with_daemon else None
        self.current, self.answers = 2048 * MIB, True

    def qmp(self, command: str, **arguments: int) -> dict[str, Any]:
        if command == "balloon":
            self.current = arguments["value"]
        report = {"status": "completed" if self.answers else "timeout"}
        return {"base-memory": 2048 * MIB, "actual": self.current, "report-now": report}


class DeviceSide(FakeSide):
    """Counts reports.

    ``zero`` is how much of a report is known to be zero, ``back`` what the host gets.
    """

    def __init__(self, name: str, zero: int = 512 * MIB, back: int = 512 * MIB) -> None:
        super().__init__(name)
        self.guest = FakeGuest(name == "ours")
        self.known, self.on_host = 0, 1024 * MIB
        self.zero, self.back = zero, back

    def sh(self, command: str) -> list[str]:
        self.asked.append(command)
        if command == device.DIRTY:
            self.on_host = 1024 * MIB
        elif session.FLUSH in command:
            self.known += self.zero
            self.on_host -= self.back
        return [str(self.known // 4096)]

    def vmstat(self) -> dict[str, int]:
        return {device.REPORTED: self.known // 4096}

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(argv[0])
        known = 0
        if argv[0] == "flush" or "--report" in argv:
            known = self.zero
            self.on_host -= self.back
        times = {
            "wall_ns": 20_000_000,
            "longest_ns": 4_000_000,
            "p99_ns": 1500,
            "lost_ns": 5_000_000,
        }
        return {**times, "vmstat": {"pgzeroed_set_reported": known // 4096}, "argv": argv}


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_on_host", lambda side: side.on_host)
    monkeypatch.setattr(device, "warm_host", lambda size: None)


def pair(**more: int) -> Any:
    sides: list[Any] = [DeviceSide(name, **more) for name in ("base", "ours")]
    return Pair(*sides)


def found(rates: tuple[float, ...], gaps: tuple[float, ...] = (1, 2, 3)) -> Values:
    """Rates of ours where base has 1000, and gaps of ours where base has 1, 2 and 3."""
    made = Values()
    for side, rate, gap in (
        ("base", (1000.0, 1010.0, 990.0, 1000.0), (1, 2, 3)),
        ("ours", rates, gaps),
    ):
        for name in device.STEPS:
            made[side, name, "rate"] = [*rate]
            made[side, name, "host_cpu"] = made[side, name, "daemon_cpu"] = [1.0]
        made[side, "latency", "ms"] = [*gap]
        for key in (
            (mode, state, kind)
            for mode in device.STALLS
            for state in device.STATES
            for kind in device.GAPS
        ):
            made[(side, *key)] = [*gap]
    return made


@pytest.mark.parametrize("name", ["base", "ours"])
def test_a_command_to_report_that_fails_is_no_result(name: str) -> None:
    side: Any = DeviceSide(name)
    balloon.report_now(side.guest)
    (side.guest.daemon or side.guest).answers = False
    with pytest.raises(TestFailure, match=r"report(-now)? fails"):
        balloon.report_now(side.guest)


@pytest.mark.parametrize(
    ("times", "pressed", "missed"),
    [
        ((12.0, 11.0), (0, 0), set()),
        ((9.0, 50.0), (0, 0), {"faster"}),
        ((50.0, 9.0), (0, 0), {"faster"}),
        ((12.0, 11.0), (1, 0), {"pressed.report_now"}),
        ((12.0, 11.0), (0, 1), {"pressed.report_now"}),
    ],
)
def test_either_device_can_miss_the_targets_of_the_command(
    times: tuple[float, float], pressed: tuple[int, int], missed: set[str]
) -> None:
    run, found = run_of("device"), Values()
    for side, faster, count in zip(("base", "ours"), times, pressed, strict=True):
        for way in device.BACK_WAYS:
            # Inflating presses the guest without a target.
            often = count if way == "report_now" else 7
            found.note(side, way, time=100.0, cpu=50.0, pressed=often)
        found.note(side, "times", faster=faster)
    device.back_figures(run, "0.5", found)
    metrics = by_name(run)
    assert len(metrics) == 3 * 3 + 1
    judged = {name: metric.target for name, metric in metrics.items() if metric.target}
    assert set(judged) == {"device.back.0.5.faster", "device.back.0.5.pressed.report_now"}
    names = {name for name, target in judged.items() if not target.met}
    assert names == {f"device.back.0.5.{name}" for name in missed}


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


def test_a_device_that_is_slower_misses_its_targets() -> None:
    run = run_of("device")
    device.figures(run, found((500.0, 510.0, 490.0, 500.0), gaps=(10, 20, 30)))
    metrics = by_name(run)
    # Three figures of three steps, latency, and three of stalls in two modes and two states.
    assert len(metrics) == 9 + 1 + 12
    missed = {name for name, metric in metrics.items() if metric.target and not metric.target.met}
    assert missed == {
        *("device.report.rate", "device.inflate.rate", "device.deflate.rate"),
        "device.report.latency",
        *(
            f"device.stall.{mode}.{gap}.reporting"
            for mode in ("spin", "alloc")
            for gap in device.GAPS
        ),
    }
    assert metrics["device.report.rate"].change_percent == -50
    run = run_of("device")
    device.figures(run, found((1000.0, 1010.0, 990.0, 1000.0)))
    targets = [metric.target for metric in run.metrics if metric.target]
    assert len(targets) == 10 and all(target.met for target in targets)
