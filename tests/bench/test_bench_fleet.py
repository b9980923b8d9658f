# SPDX-License-Identifier: GPL-2.0
"""The bench of several guests, without one: bytes zeroed, its chart, and guests that fail."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.bench import fleet, plan
from lab.bench.plan import BenchOptions
from lab.bench.repeat import Values
from lab.bench.table import BENCHES
from lab.build import linux
from lab.core.errors import LabError, TestFailure
from lab.report import page
from lab.report.results import Result
from tests.bench.fakes import MIB, FakeSide, run_of


def test_too_little_memory_is_an_error_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "available_gb", lambda: 7.0)
    monkeypatch.setattr(linux, "build_linux", lambda *_: pytest.fail("it built something"))
    with pytest.raises(LabError, match="fleet") as error:
        plan.build(plan.plan(BENCHES["fleet"], BenchOptions()))
    assert "7.0 GiB of memory are available, 7.2 GiB are needed" in error.value.why
    assert BENCHES["fleet"].needs.gb >= 1.2 * fleet.GUESTS


ANSWER = {
    "bytes": 320 * MIB,
    "minor_faults": 200,
    "task_clock_ns": 10**7,
    "burst_ns": [10**6] * 99 + [10**9],
    "vmstat": {
        "thp_fault_alloc": 160,
        "pgzeroed_cleared": 512,
        "pgzeroed_skip": 0,
        "pgzeroed_bad": 0,
    }
    | {"pgfault": 900, "pgzeroed_set_prezeroed": 256},
}


class Sides(list[Any]):
    """Guests that answer at once, in this process."""

    def __init__(self, tmp_path: Path, *answers: Any) -> None:
        super().__init__()
        for number, answer in enumerate(answers):
            side = FakeSide(f"ours-x-{number}", answer)
            log = tmp_path / f"console-{number}"
            log.write_text("booting\nthe last line\n", encoding="utf-8")
            side.guest = SimpleNamespace(pid=os.getpid(), console=log)
            self.append(side)


def test_guests_that_zero_each_page_count_all_pages(tmp_path: Path) -> None:
    """Base has no counter: with init_on_alloc=1 it zeroes what it allocates, not only faults."""
    counted = iter(
        [{"pgalloc_dma32": 100, "pgalloc_normal": 7}, {"pgalloc_dma32": 600, "pgalloc_normal": 19}]
    )
    (side,) = Sides(tmp_path, lambda *argv: ANSWER)
    side.vmstat = lambda: next(counted)
    assert fleet.bursts(side, 0, each_page=True)["zeroed"] == [512 * 4096]
    assert fleet.bursts(side, 0, each_page=False)["zeroed"] == [2 * MIB]


def test_the_first_failure_ends_the_run_with_the_console(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()  # as the lines of a guest end with it
    late = []

    def fails(*argv: str) -> dict[str, Any]:
        raise TestFailure("A step failed", "exit code 137", "read it")

    def waits(*argv: str) -> dict[str, Any]:
        late.append(not ended.wait(30))
        raise TestFailure("It ended", "closed", "")

    with pytest.raises(TestFailure, match="A step failed") as error:
        fleet.play(Sides(tmp_path, waits, fails, waits), "late", Values())
    assert late == [], "it has waited for another guest"
    ended.set()
    assert error.value.why == "exit code 137\nits console ends with:\nbooting\nthe last line"


def test_a_page_has_a_bar_for_each_policy() -> None:
    run, found = run_of("fleet"), Values()
    for name in fleet.POLICIES:
        found[name, "burst"] = [1.0, 2.0]
    fleet.figures(run, found)
    words = [policy.words for policy in fleet.POLICIES.values()]
    sides = [fleet.POLICIES[fleet.AGAINST].words, "the policy named"]
    series = {name: [1.0] for name in words}
    made = Result("fleet", "tcg", {}, "./kz bench fleet", run.metrics, sides=sides, series=series)
    text = page.html([made])
    assert all(f'class="policy{number}"' in text for number in range(len(words)))
