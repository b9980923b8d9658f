# SPDX-License-Identifier: GPL-2.0
"""Instructions of hot paths are compared, held against the limit, and attributed to functions."""

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


def test_instructions_are_added_up_by_function(tmp_path: Path) -> None:
    system_map = tmp_path / "System.map"
    system_map.write_text(
        "ffffffff81000100 T second\nffffffff81000000 t first\nffffffff81000180 D not_code\n"
        "ffffffff81000200 W third\n",
        encoding="utf-8",
    )
    table = symbols(system_map)
    assert table.names == ["first", "second", "third"]
    counted = (
        "ffffffff81000000 5\nffffffff810000f0 2\nffffffff81000190 7\nffffffff82000000 "
        "1\nffffffff80000000 9\n"
    )
    assert hotpath.by_function(counted, table) == {"first": 7, "second": 7, "third": 1}


@pytest.mark.images
@pytest.mark.parametrize("name", ["functions", "lockhold", "zerobytes"])
def test_plugins_compile(name: str) -> None:
    assert build_plugin(name).is_file()


def counts(paths: Sequence[hotpath.HotPath], each: float) -> list[hotpath.Counts]:
    """What two boots of a kernel that takes ``each`` for everything would give."""
    return [{path.name: each for path in paths}] * 2


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The breakdowns that were wanted, as (prefix, path)."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(
        hotpath,
        "breakdown",
        lambda run, images, path, prefix, other: found.append((prefix, path.name)),
    )
    return found


def compared(paths: Sequence[hotpath.HotPath], ours: float, prefix: str) -> Run:
    run = run_of("hotpath")
    rows = {"base": counts(paths, 1000), "ours": counts(paths, ours)}
    hotpath.compare(run, run.images.kernels, rows, paths, prefix)
    return run


@pytest.mark.parametrize("prefix", [hotpath.IDLE, hotpath.OFF])
def test_each_path_beyond_the_limit_is_broken_down(
    prefix: str, asked: list[tuple[str, str]]
) -> None:
    made = compared(BOUND, 1005, prefix).metrics
    assert (
        all(metric.target and metric.target.met for metric in made) and len(made) == len(BOUND) == 9
    )
    assert asked == []
    made = compared(BOUND, 1006, prefix).metrics
    assert [metric.target.met for metric in made if metric.target] == [False] * len(BOUND)
    assert asked == [(prefix, path.name) for path in BOUND]


@pytest.mark.parametrize(("ours", "met"), [(1050, True), (1051, False)])
def test_faults_in_unused_memory_are_near_the_floor(ours: float, met: bool) -> None:
    run, paths = run_of("hotpath"), [*hotpath.NEW, *hotpath.PATHS]
    rows = {"base": counts(paths, 9000), "ours": counts(paths, ours), "floor": counts(paths, 1000)}
    hotpath.compare(run, run.images.kernels, rows, paths, hotpath.ACTIVE)
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


def test_functions_are_counted_for_one_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instructions of the boot, which both counts have, are none of the operation's."""
    path = hotpath.PATHS[0]
    images = {name: tmp_path / name / "bzImage" for name in ("base", "ours")}
    for kernel in images.values():
        kernel.parent.mkdir()
        (kernel.parent / "System.map").write_text(
            "ffffffff81000000 T changed\nffffffff81001000 T same\nffffffff81002000 T boots\n"
        )

    def boot(
        run: Run, kernel: Path, paths: Sequence[hotpath.HotPath], extra: Sequence[str]
    ) -> hotpath.Counts:
        reps, out = paths[0].reps, extra[1].partition("out=")[2]
        assert paths[0].name == path.loop
        each = 70 if kernel == images["ours"] else 60
        Path(out).write_text(
            f"ffffffff81000000 {5000 + reps * path.operations * each}\n"
            f"ffffffff81001000 {9000 + reps * path.operations * 20}\n"
            f"ffffffff81002000 {10**8 - reps * path.operations * each}\n"
        )
        return {}

    monkeypatch.setattr(hotpath, "_boot", boot)
    run = run_of("hotpath")
    hotpath.breakdown(run, images, path, hotpath.OFF)
    assert [(m.name, m.base.median, m.ours.median) for m in run.metrics] == [
        ("hotpath.off.fault.in.changed", 60.0, 70.0)
    ]
