# SPDX-License-Identifier: GPL-2.0
"""``kz bench prezero`` without a machine: a load counts what one of its times costs."""

import subprocess

import pytest

from lab.bench import prezero
from lab.bench.kzeropaged import PREZEROED
from lab.bench.session import Side
from tests.bench.fakes import side

PAGES, CPU_NS = 3072, 8_000_000_000


def test_a_load_costs_what_one_of_its_times_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of a load is not counted; the rest is divided by how often it ran."""
    runs: list[int] = []
    load = prezero.Load("files", "true", 4, 1.5)
    monkeypatch.setattr(prezero.Load, "script", lambda _load, times: f"run {times}")
    monkeypatch.setattr(prezero, "warm_host", lambda _size: None)
    monkeypatch.setattr(prezero, "cpu_ns", lambda _pid: len(runs) * CPU_NS)
    monkeypatch.setattr(prezero, "resident", lambda _pid: 7 << 20)
    guest: Side = side("ours")
    monkeypatch.setattr(guest, "sh", lambda command: runs.append(int(command.split()[1])))
    monkeypatch.setattr(guest, "vmstat", lambda: {PREZEROED: sum(runs) * PAGES})

    found = prezero.once(guest, load)

    assert runs == [1, 4]
    assert found == {
        "cpu": CPU_NS / 1e6 / 4,
        "prezeroed": PAGES * 4096,
        "resident": float(7 << 20),
    }


def test_a_load_whose_command_fails_is_a_failure() -> None:
    """Else a load that does nothing would seem to cost nothing."""
    for command, code in (("false; true", 1), ("true", 0)):
        script = prezero.Load("", command, 1, 0.0).script(1)
        assert subprocess.run(["sh", "-c", script], check=False).returncode == code
