# SPDX-License-Identifier: GPL-2.0
"""A small guest goes through the phases of the bench life."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import life
from lab.bench.life import PHASES, WHOLE, Life, Sizes
from lab.bench.plan import BenchOptions, Images
from lab.bench.runner import Run
from lab.bench.table import BENCHES
from tests.guest.guests import KERNEL, expect_at_least, expect_at_most

pytestmark = pytest.mark.boots

MB = 1 << 20
SIZES = Sizes(memory_mb=1024, program_mb=128, cache_mb=64, park_mb=512, burst_mb=192, idle_s=2.5)


def test_ours_keeps_what_is_zero_through_a_life(qemu: Path, tmp_path: Path) -> None:
    """The debug kernel checks each page that it does not zero, also after the restore."""
    run = Run(BENCHES["life"], BenchOptions(), Images(qemu, {"ours": KERNEL}))
    image = life.disk(tmp_path, SIZES.cache_mb)
    found = Life(run, "kzeropaged", 0, SIZES, tmp_path, image).play(PHASES)
    print({name: round(value) for name, value in found.items()})
    assert {phase for phase, kind in found if kind == "host"} == set(PHASES)
    # The host has its memory back, or park() fails; and the file leaves free memory out.
    assert found["save", "file"] < found["save_cached", "file"]
    for phase in ("save_cached", "save"):
        assert found[phase, "of_used"] < 110
    assert found["restore", "host"] < found["save_cached", "host"]
    # The guest knows it, before and after the restore.
    for phase in ("first", "restored"):
        expect_at_most(found[phase, "zeroed"], 0.1 * SIZES.program_mb * MB)
    # kzeropaged has zeroed what programs waited for. That is less if reports come in between.
    expect_at_least(found[WHOLE, "prezeroed"], 0.8 * found[WHOLE, "zeroed"])
