# SPDX-License-Identifier: GPL-2.0
"""Instructions of hot paths are compared, and held against the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.bench import hotpath
from lab.bench.plugin import build_plugin, symbols
from lab.bench.runner import Run
from lab.core.errors import TestFailure
from tests.bench.fakes import run_of

ALL = [*hotpath.PATHS, *hotpath.MORE]
BOUND = [path for path in ALL if path.bound]


def test_an_address_is_in_the_function_before_it(tmp_path: Path) -> None:
    system_map = tmp_path / "System.map"
    system_map.write_text(
        "ffffffff81000100 T second\nffffffff81000000 t first\nffffffff81000180 D not_code\n"
        "ffffffff81000200 W third\n",
        encoding="utf-8",
    )
    table = symbols(system_map)
    assert table.names == ["first", "second", "third"]
    places = (0x80000000, 0x81000000, 0x810000F0, 0x81000190, 0x82000000)
    found = [table.function_at(0xFFFFFFFF00000000 | place) for place in places]
    assert found == ["?", "first", "first", "second", "third"]


@pytest.mark.images
@pytest.mark.parametrize("name", ["lockhold", "zerobytes"])
def test_plugins_compile(name: str) -> None:
    assert build_plugin(name).is_file()


def counts(paths: Sequence[hotpath.HotPath], each: float) -> list[hotpath.Counts]:
    """What two boots of a kernel that takes ``each`` for everything would give."""
    return [{path.name: each for path in paths}] * 2


def compared(paths: Sequence[hotpath.HotPath], ours: float, prefix: str) -> Run:
    run = run_of("hotpath")
    rows = {"base": counts(paths, 1000), "ours": counts(paths, ours)}
    hotpath.compare(run, rows, paths, prefix)
    return run


@pytest.mark.parametrize("prefix", [hotpath.IDLE, hotpath.OFF])
def test_each_path_has_its_limit(prefix: str) -> None:
    made = compared(BOUND, 1005, prefix).metrics
    assert (
        all(metric.target and metric.target.met for metric in made) and len(made) == len(BOUND) == 9
    )
    made = compared(BOUND, 1006, prefix).metrics
    assert [metric.target.met for metric in made if metric.target] == [False] * len(BOUND)


@pytest.mark.parametrize(("ours", "met"), [(1050, True), (1051, False)])
def test_faults_in_unused_memory_are_near_the_floor(ours: float, met: bool) -> None:
    run, paths = run_of("hotpath"), [*hotpath.NEW, *hotpath.PATHS]
    rows = {"base": counts(paths, 9000), "ours": counts(paths, ours), "floor": counts(paths, 1000)}
    hotpath.compare(run, rows, paths, hotpath.ACTIVE)
    assert [one.floor for one in run.metrics] == [1000.0] * len(hotpath.NEW) + [None] * len(
        hotpath.PATHS
    )
    assert [one.near_floor.met for one in run.metrics if one.near_floor] == [met] * len(hotpath.NEW)


def test_a_source_that_gives_no_zeros_is_no_result() -> None:
    for path in hotpath.NEW:
        pages = (path.reps + hotpath.WARM_UPS) * hotpath.PAGES[path.name]
        hotpath.check_skipped(path, pages, "ours")
        with pytest.raises(TestFailure, match="not active"):
            hotpath.check_skipped(path, pages // 2, "ours")
