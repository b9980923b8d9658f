# SPDX-License-Identifier: GPL-2.0
"""What pre-zeroing costs, without a guest: whom the bench asks for what, and what it makes of the answers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.bench import BenchOptions, kzeropaged, prezero_cost
from lab.bench.session import Built, HostCost, Pair, Side
from lab.report.results import Metric

IMAGES = Built(Path("q"), "base", "knownzero")
OFF, ON = f"echo 0 > {kzeropaged.FOLDER}/enabled", f"echo 1 > {kzeropaged.FOLDER}/enabled"


class FakeSide:
    """A guest whose jobs all cost the same: the task 0.1 s, the VMM 0.2 s."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.guest = SimpleNamespace(pid=os.getpid())
        self.asked: list[str] = []
        self.wall_ns = 400_000_000

    def sh(self, command: str) -> list[str]:
        self.asked.append(command)
        return ["0"]

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(" ".join(argv))
        return {"task_clock_ns": 100_000_000, "wall_ns": self.wall_ns}

    @contextmanager
    def host_cost(self) -> Iterator[list[HostCost]]:
        found: list[HostCost] = []
        yield found
        found.append(HostCost(1, 0.05, 0.15))


def sides(*names: str) -> list[Side]:
    return [cast(Side, FakeSide(name)) for name in names]


def fake(side: Side) -> FakeSide:
    return cast(FakeSide, side)


def by_name(metrics: list[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


def test_peers_are_the_base_kernel_with_another_command_line() -> None:
    specs = dict(prezero_cost.peer_specs(BenchOptions(), IMAGES))
    assert {name: spec.append for name, spec in specs.items()} == {
        "base": "",
        "ours": "",
        "init_on_alloc": "init_on_alloc=1",
        "init_on_free": "init_on_free=1",
    }
    assert [name for name, spec in specs.items() if spec.kernel != "base"] == ["ours"]
    assert all(spec.devices == [] for spec in specs.values())


def test_what_was_zeroed_before_counts_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed: list[str] = []

    def zero_all(side: Side, cost: kzeropaged.Cost) -> None:
        zeroed.append(side.name)
        cost.cpu_s.append(0.5)

    monkeypatch.setattr(prezero_cost, "zero_all", zero_all)
    guests = sides("base", "ours", *prezero_cost.PEERS)
    found = by_name(prezero_cost.peers(guests, 64))
    assert len(found) == 2 * 3 * 2
    assert set(zeroed) == {"ours"}
    whole = found["prezero.peers.thp.ours.whole"]
    assert whole.base.median == pytest.approx(200)
    assert whole.ours.median == pytest.approx(700)
    assert found["prezero.peers.4k.init_on_free.whole"].ours.median == pytest.approx(200)
    assert found["prezero.peers.4k.init_on_alloc.job"].ours.median == pytest.approx(100)
    for guest in guests:
        asked = fake(guest).asked
        # Dirty before each job, and nobody but ours has a thread to turn off.
        jobs = [at for at, line in enumerate(asked) if line.startswith("alloc_once")]
        assert jobs and all(asked[at - 1] == kzeropaged.DIRTY for at in jobs)
        assert (OFF in asked) == (guest.name == "ours")


@pytest.mark.parametrize(("wall_ns", "met"), [(400_000_000, True), (440_000_000, False)])
def test_a_load_that_becomes_slower_is_named(wall_ns: int, met: bool) -> None:
    base, ours = sides("base", "ours")
    fake(ours).wall_ns = wall_ns
    found = by_name(prezero_cost.load_metrics(Pair(base, ours, "tcg", IMAGES), 4))
    target = found["prezero.build_load.wall"].target
    assert target and target.met is met
    first = fake(ours).asked[0]
    assert kzeropaged.FOLDER in first and first.endswith(ON)
    assert not any(kzeropaged.FOLDER in line for line in fake(base).asked)


def test_kernels_that_are_files_are_not_measured_natively() -> None:
    metrics, notes = prezero_cost.natively(BenchOptions(base="some/bzImage"), IMAGES)
    assert metrics == []
    assert "named by variant" in notes[0]
