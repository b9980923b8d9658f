# SPDX-License-Identifier: GPL-2.0
"""The bench of the two devices, without a guest: what it asks for and what it makes of the answers."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.bench import BENCHES, BenchOptions, device, session
from lab.errors import TestFailure
from lab.report import write_reports
from lab.results import SIDES, Result, load

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


@pytest.fixture(autouse=True)
def no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "memory_on_host", lambda side: side.on_host)
    monkeypatch.setattr(device, "warm_host", lambda size: None)


def pair(**more: int) -> session.Pair:
    sides = [cast(session.Side, FakeSide(name, **more)) for name in ("base", "ours")]
    return session.Pair(sides[0], sides[1], "tcg", session.Built(Path("q"), "base", "knownzero"))


def step(*rates: float) -> device.Step:
    return device.Step([*rates], [10.0] * len(rates), [1.0] * len(rates))


def test_it_is_a_bench() -> None:
    assert BENCHES["device"].module == "lab.bench.device"


def test_every_step_is_measured_on_both_sides() -> None:
    both = pair()
    found = device.rounds(both, BenchOptions(pairs=3, size_mb=64))
    for steps in found.values():
        for one in steps.values():
            assert len(one.rate) == len(one.cpu) == len(one.daemon) == 3
            assert min(one.rate) > 0
    # The warm-up as well: memory is dirty before it is reported, and before it goes into the balloon.
    for side in (both.base, both.ours):
        asked = cast(FakeSide, side).asked
        assert asked.count(device.DIRTY) == 8
        assert asked.index(device.DIRTY) < asked.index(f"echo 0 > {session.FLUSH}")
    assert set(found["report"]["base"].daemon) == {0}


def test_a_balloon_is_resized_on_either_side() -> None:
    both = pair()
    for side in (both.base, both.ours):
        assert device.actual(side) == 0
        assert device.resize(side, 256 * MIB) == 256 * MIB
        assert device.actual(side) == 256 * MIB
        assert device.resize(side, 0) == 256 * MIB
    assert cast(Any, both.base.guest).current == 2048 * MIB


@pytest.mark.parametrize("more", [{"zero": 0}, {"back": 100 * MIB}])
def test_reports_that_do_not_arrive_are_no_result(more: dict[str, int]) -> None:
    with pytest.raises(TestFailure, match="do not arrive"):
        device.report(pair(**more).ours)


def test_a_device_that_is_slower_is_named() -> None:
    fast, slow = (1000.0, 1010.0, 990.0, 1000.0), (500.0, 510.0, 490.0, 500.0)
    found = {name: {"base": step(*fast), "ours": step(*slow)} for name in device.WORDS}
    metrics = {metric.name: metric for metric in device.metrics_of(found)}
    assert len(metrics) == 9
    rate = metrics["device.report.rate"]
    assert rate.target and not rate.target.met
    assert rate.change_percent == -50
    same = {name: {"base": step(*fast), "ours": step(*fast)} for name in device.WORDS}
    targets = [metric.target for metric in device.metrics_of(same) if metric.target]
    assert len(targets) == 3
    assert all(target.met for target in targets)


def test_punching_is_measured() -> None:
    assert device.bare_rate(8 * MIB) > 0


def test_both_sides_have_their_own_names(tmp_path: Path) -> None:
    found = {name: {"base": step(1, 2, 3), "ours": step(1, 2, 3)} for name in device.WORDS}
    result = Result("device", "tcg", {}, "./kz bench device", device.metrics_of(found), sides=device.SIDES)
    result.save(tmp_path)
    assert load(tmp_path).sides == device.SIDES
    write_reports([load(tmp_path)], tmp_path)
    assert "| in QEMU | vhost-user |" in (tmp_path / "report.md").read_text()
    assert "<th>in QEMU</th><th>vhost-user</th>" in (tmp_path / "report.html").read_text()
    assert Result("thp", "tcg", {}, "", []).sides == list(SIDES)
