# SPDX-License-Identifier: GPL-2.0
"""The whole cost of pre-zeroing, without a guest.

The steps in each guest, and the figures of the answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.bench import kzeropaged, prezero
from tests.bench.fakes import by_name, fake, pair, run_of, side

OFF, ON = f"echo 0 > {kzeropaged.FOLDER}/enabled", f"echo 1 > {kzeropaged.FOLDER}/enabled"


def answer(*argv: str) -> dict[str, Any]:
    """All jobs cost the same: the task 0.1 s, and the VMM 0.2 s."""
    return {"task_clock_ns": 100_000_000, "wall_ns": 400_000_000}


def test_zeroing_before_the_job_counts_for_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    zeroed: list[str] = []

    def zero_all(side: Any) -> dict[str, float]:
        zeroed.append(side.name)
        return {"cpu": 0.5}

    monkeypatch.setattr(kzeropaged, "zero_all", zero_all)
    guests = [side(name, answer) for name in ("base", "ours", *prezero.PEERS)]
    run = run_of("prezero")
    prezero.peers(run, guests, 64)
    found = by_name(run)
    assert len(found) == 2 * 3 * 2 and set(zeroed) == {"ours"}
    medians = {
        name: found[f"prezero.peers.{name}"].ours.median
        for name in ("thp.ours.whole", "4k.init_on_free.whole", "4k.init_on_alloc.job")
    }
    assert list(medians.values()) == [pytest.approx(700), pytest.approx(200), pytest.approx(100)]
    for guest in guests:
        asked = fake(guest).asked
        # Memory is dirty before each job, and only ours has a thread to turn off.
        jobs = [at for at, line in enumerate(asked) if line.startswith("alloc_once")]
        assert jobs and all(asked[at - 1] == kzeropaged.DIRTY for at in jobs)
        assert (OFF in asked) == (guest.name == "ours")


@pytest.mark.parametrize(("wall_ns", "met"), [(400_000_000, True), (440_000_000, False)])
def test_a_load_that_becomes_slower_misses_its_target(wall_ns: int, met: bool) -> None:
    both, run = pair(answer), run_of("prezero", pairs=4)
    fake(both.ours).answer = lambda *argv: {"wall_ns": wall_ns}
    prezero.load(run, both)
    target = by_name(run)["prezero.build_load.wall"].target
    assert target and target.met is met
    assert fake(both.ours).asked[0].endswith(ON)
    assert not any(kzeropaged.FOLDER in line for line in fake(both.base).asked)


def test_kernels_that_are_files_are_not_measured_natively() -> None:
    run = run_of("prezero")
    run.images = replace(run.images, kernels={"base": "some/bzImage", "ours": "ours"})
    prezero.natively(run)
    assert run.metrics == [] and "named by variant" in run.notes[0]
