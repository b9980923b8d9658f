# SPDX-License-Identifier: GPL-2.0
"""A bench of the allocation job in booted guests, small: its figures are right, mistakes show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.bench import session
from lab.bench.plan import BenchOptions, Images
from lab.bench.runner import Run
from lab.bench.table import BENCHES
from lab.report.results import Metric
from tests.bench.fakes import by_name

pytestmark = [pytest.mark.boots, pytest.mark.timeout(900)]

SIZE_MB = 64


def measured(image: Callable[..., Path], qemu: Path) -> dict[str, Metric]:
    """order0 with our kernel on both sides: both have counters, and both skip."""
    options = BenchOptions(pairs=1, size_mb=SIZE_MB, memory="768M", accel="tcg")
    kernel = image("knownzero")
    run = Run(BENCHES["order0"], options, Images(qemu, {"base": kernel, "ours": kernel}))
    BENCHES["order0"].measure(run)
    return by_name(run)


def test_single_pages_are_not_zeroed_again(image: Callable[..., Path], qemu: Path) -> None:
    found = measured(image, qemu)
    assert len(found) == 9
    for name, one in found.items():
        for side in (one.base, one.ours):
            if name.endswith("skipped_percent"):
                assert side.median >= 80  # 86 to 89 were measured
            if name.endswith("guest_zeroed_bytes"):
                assert 0 < side.median <= 0.2 * SIZE_MB * session.MIB
            if name.endswith("task_clock"):
                assert 1 < side.median < 60_000


def test_memory_that_is_not_reported_shows(
    image: Callable[..., Path], qemu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up uses the memory that the boot reported; what follows is dirty."""
    monkeypatch.setattr(session.Side, "free_and_report", lambda side: None)
    monkeypatch.setattr(session.Side, "reported", lambda side, timeout: 0)
    monkeypatch.setattr(session, "DELAY_MS", 3_600_000)
    zeroed = measured(image, qemu)["order0.touch_all.guest_zeroed_bytes"]
    assert zeroed.ours.median > 0.5 * SIZE_MB * session.MIB
