# SPDX-License-Identifier: GPL-2.0
"""A bench of the allocation job in booted guests, small: its figures are right, mistakes show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.bench import session
from lab.bench.plan import BenchOptions, Images
from lab.bench.runner import Run
from lab.bench.table import BENCHES
from lab.core.paths import REPO
from lab.report.results import Metric, load
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


def test_what_was_measured_is_sent_and_published(
    image: Callable[..., Path], qemu: Path, tmp_path: Path
) -> None:
    """With the packages of a fresh machine; single pages are not zeroed again."""
    given = map(str, (image("knownzero"), qemu, tmp_path, SIZE_MB))
    argv = [sys.executable, "-m", "tests.bench.fresh", *given]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "results" / "order0"
    assert done.stdout.split()[-1] == str(folder)
    assert "[order0](order0/README.md)" in (tmp_path / "results" / "README.md").read_text()
    metrics = load(folder).metrics
    assert len(metrics) == 9
    for one in metrics:
        for side in (one.base, one.ours):
            if one.name.endswith("skipped_percent"):
                assert side.median >= 80  # 86 to 89 were measured
            if one.name.endswith("guest_zeroed_bytes"):
                assert 0 < side.median <= 0.2 * SIZE_MB * session.MIB
            if one.name.endswith("task_clock"):
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
