# SPDX-License-Identifier: GPL-2.0
"""The bench of both ends without a guest.

Its counts, its turns, its figures, and the inner guest's command line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench import both_ends, session
from lab.bench.jobs import MODES
from lab.boot import nested
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from tests.bench.fakes import IMAGES, MIB, by_name, run_of

ANSWER = {
    "bytes": 256 * MIB,
    "minor_faults": 130,
    "task_clock_ns": 1,
    "wall_ns": 50_000_000,
    "vmstat": {
        "thp_fault_alloc": 128,
        "pgzeroed_cleared": 25,
        "pgzeroed_skip": 65536,
        "pgzeroed_bad": 0,
    },
}


class Outer:
    """An outer guest that notes each line.

    Its kernel zeroes ``cleared`` pages between two looks.
    """

    def __init__(self, name: str, kernel: str, cleared: int = 0) -> None:
        self.name, self.kernel, self.cleared, self.looks = name, kernel, cleared, 0
        self.guest: Any = SimpleNamespace(pid=1, lines=iter(()))
        self.asked: list[str] = []

    def sh(self, command: str, *, check: bool = True) -> list[str]:
        self.asked.append(command)
        if command == both_ends.COUNTS:
            self.looks += 1
            names = {"pgzeroed_cleared": self.looks * self.cleared, "resident": 1000}
            return [f"{name} {value}" for name, value in names.items()]
        return [json.dumps(ANSWER) if "alloc_once" in command else "yes"]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STILL_S", "REST_S"):
        monkeypatch.setattr(both_ends, name, 0.0)


def test_the_outer_kernel_is_counted_as_the_inner_one() -> None:
    base = {"thp_fault_alloc": 64, "minor_faults": 70, "pool": 0}
    assert both_ends.zeroed(base) == 128 * MIB + 6 * 4096
    pool = {"thp_fault_alloc": 0, "minor_faults": 70, "pool": 64 * 512}
    assert both_ends.zeroed(pool) == 128 * MIB + 6 * 4096
    assert both_ends.zeroed({**base, "pgzeroed_cleared": 3, "pgzeroed_bad": 0}) == 3 * 4096
    with pytest.raises(TestFailure, match="was not"):
        both_ends.zeroed({**base, "pgzeroed_cleared": 3, "pgzeroed_bad": 1})


@pytest.mark.parametrize("name", ["rest", "busy", "kept"])
def test_a_use_counts_both_ends(name: str) -> None:
    way = both_ends.WAYS[name]
    outer: Any = Outer("ours_ours", "ours", cleared=10)
    inner = both_ends.Inner("ours", outer, BootSpec(command=["true"]))
    found = both_ends.use(inner, 256, "touch_all", way)
    assert found == {"use": 35 * 4096, "outer": 10 * 4096, "inner": 25 * 4096, "idle": 0, "ms": 50}
    assert (both_ends.BUSY in outer.asked) is (name == "busy")
    assert any(session.DROP in line for line in outer.asked) is (name != "kept")
    (job,) = (line for line in outer.asked if "alloc_once" in line)
    assert job.startswith("kill $busy; inner " if name == "busy" else "inner ")


def test_each_pair_of_kernels_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: dict[str, BootSpec] = {}
    share = {"base_base": 2.0, "ours_base": 1.0, "base_ours": 1.0, "ours_ours": 0.04}

    @contextmanager
    def guests(specs: Sequence[session.Wanted]) -> Iterator[list[Outer]]:
        hosts.update((f"{one.name} {len(hosts) // 4}", one.spec) for one in specs)
        yield [Outer(one.name, one.kernel) for one in specs]

    def use(
        inner: both_ends.Inner, size_mb: int, mode: str, way: both_ends.Way
    ) -> dict[str, float]:
        zeroed = size_mb * MIB * (share[inner.outer.name] if way.rest and way.reports else 1.0)
        return {"use": zeroed, "outer": 0, "inner": zeroed, "idle": 0, "ms": 1.0}

    monkeypatch.setattr(nested, "outer", lambda spec, inner, qemu: spec)
    monkeypatch.setattr(both_ends, "use", use)
    run = run_of("both-ends", pairs=2)
    monkeypatch.setattr(run, "guests", guests)
    both_ends.measure(run)
    assert {name: spec.kernel for name, spec in hosts.items()} == {
        f"{name} {again}": IMAGES.kernels[f"outer_{outside}"]
        for name, (outside, _) in both_ends.ENDS.items()
        for again in (0, 1, 2)
    }
    assert {(spec.memory, *spec.devices) for spec in hosts.values()} == {("3072M",)}
    found = by_name(run)
    goals = {name: metric.target.met for name, metric in found.items() if metric.target}
    assert goals == {f"both-ends.rest.use.{mode}.ours_ours": True for mode in MODES} | {
        "both-ends.given_back.ms": True
    }
    assert found["both-ends.given_back.use"].change_percent == -96
    assert found["both-ends.rest.use.populate.ours_base"].change_percent == -50
    assert found["both-ends.busy.use.touch_all.ours_ours"].change_percent == 0


def test_the_inner_guest_has_kvm_and_needs_no_socket() -> None:
    lines = nested.start(BootSpec(memory="1G", devices=[session.BALLOON], append="quiet"))
    text = "\n".join(lines)
    for words in (
        "-accel kvm",
        "-cpu host",
        "kernel-irqchip=split",
        session.BALLOON,
        "no_timer_check",
    ):
        assert words in text
    assert "socket" not in text
    for name in ("ctl", "out", "err", "in"):
        assert f"name=kz.{name}" in text


def test_a_program_brings_its_libraries() -> None:
    found = nested.libraries(Path("/bin/ls"))
    assert any(file.name.startswith("libc.so") for file in found)
    assert any(file.name.startswith("ld-linux") for file in found) and all(
        file.is_file() for file in found
    )
