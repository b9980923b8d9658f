# SPDX-License-Identifier: GPL-2.0
"""Every figure that a bench can write, without a guest: it says what it is, and the page knows it."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lab.bench import (
    BenchOptions,
    churn,
    deflate,
    device,
    hostmemory,
    hugetlb,
    jobs,
    kzeropaged,
    lockhold,
    order0,
    page_fault,
    prezero,
    prezero_cost,
    refpage,
    scale,
    thp,
    zerobytes,
)
from lab.bench import sizes as guest_sizes
from lab.bench.session import Built, HostCost, Pair, Side
from lab.core.paths import REPO
from lab.report import charted, seeds
from lab.report import page as report
from lab.report.results import Metric, Result, load

IMAGES = Built(Path("q"), "base", "knownzero")
# Benches whose figures are not made here; their names are not checked.
ELSEWHERE = ("hotpath.",)
TWO = [1.0, 2.0]


class AnySide:
    """A guest that answers everything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.guest = SimpleNamespace(pid=0, accel="tcg")

    def sh(self, command: str) -> list[str]:
        del command
        return ["1000"]

    def settle(self) -> int:
        return 1 << 20

    def json(self, *argv: str) -> dict[str, Any]:
        loops = int(argv[argv.index("--loops") + 1]) if "--loops" in argv else 1
        return {"wall_ns": 10**6 * loops, "task_clock_ns": 10**6, "max_rss_kb": 10, "steps": 10}

    @contextmanager
    def host_cost(self) -> Iterator[list[HostCost]]:
        found: list[HostCost] = []
        yield found
        found.append(HostCost(1, 0.05, 0.15))


def side(name: str) -> Side:
    return cast(Side, AnySide(name))


def phase(*_: Any, **__: Any) -> jobs.Phase:
    found = jobs.Phase()
    for runs in (found.base, found.ours):
        for values in vars(runs).values():
            values += TWO
    return found


@contextmanager
def guests(specs: list[tuple[str, Any]]) -> Iterator[list[Side]]:
    yield [side(name) for name, _ in specs]


def zero_all(_: Side, cost: kzeropaged.Cost, **__: Any) -> None:
    for values in vars(cost).values():
        values.append(1.0)


def allocate(
    _: Pair, __: BenchOptions, ___: str, ____: str, cost: kzeropaged.Cost, *_____: str
) -> jobs.Phase:
    zero_all(side("ours"), cost)
    return phase()  # fmt: skip


@pytest.fixture(scope="module")
def written() -> Iterator[list[Metric]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield everything(monkeypatch)


def everything(monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """The figures of all benches, of two repetitions each where nothing says otherwise."""
    for module in (thp, order0, hugetlb, deflate):
        monkeypatch.setattr(module, "allocate", phase)
    for module in (thp, deflate, prezero):
        monkeypatch.setattr(module, "check_huge", lambda *_: None)
    for module in (prezero, prezero_cost):
        monkeypatch.setattr(module, "allocate", allocate)
    for module in (prezero_cost, kzeropaged):
        monkeypatch.setattr(module, "warm_host", lambda _: None)
    monkeypatch.setattr(kzeropaged, "free_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(prezero_cost, "zero_all", zero_all)
    monkeypatch.setattr(prezero_cost, "guests", guests)
    monkeypatch.setattr("lab.build.programs.build_programs", lambda: {"corunner": Path("x")})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(
        prezero_cost,
        "_corunner",
        lambda *_: {"steps": 1, "wall_ns": 1, "cleared_bytes": 1, "clear_ns": 1},
    )
    monkeypatch.setattr(hostmemory, "fill_and_free", lambda _: (3e9, 1e6))
    monkeypatch.setattr("lab.build.daemon.punch", lambda *_: {"bare": TWO, "daemon": TWO})
    monkeypatch.setattr(zerobytes, "build_plugin", lambda _: Path("x"))
    monkeypatch.setattr(zerobytes, "_job", lambda *_: 1.0)
    both = Pair(side("base"), side("ours"), "tcg", IMAGES)
    monkeypatch.setattr(zerobytes, "settle_both", lambda _: None)
    monkeypatch.setattr(zerobytes, "pair", pair_of(both))
    options = BenchOptions(pairs=2)

    faults = page_fault.Found()
    rows = [row.name for row in page_fault.ROWS]
    for key in [(p, t, r) for p in page_fault.PAGES for t in page_fault.TASKS for r in rows]:
        faults.rates[key] = faults.cpu_us[key] = TWO
    faults.full = faults.freed = dict.fromkeys(rows, TWO)

    churned = churn.Found()
    keys: list[churn.Key] = [(name, delay) for name in ("base", "ours") for delay in churn.RUN_MS]
    for job in churn.JOBS:
        churned.runs |= {(job.name, key): churn.Series(TWO, TWO, TWO) for key in keys}
    churned.back_s = dict.fromkeys(keys, TWO)

    devices = device.Found.empty()
    for sides in devices.steps.values():
        for step in sides.values():
            step.rate = step.cpu = step.daemon = TWO
    devices.latencies = {"base": TWO, "ours": TWO}
    for stalls in devices.stalls.values():
        for stall in stalls.values():
            stall.longest = stall.p99 = stall.lost = TWO

    sizes = (*guest_sizes.SIZES, guest_sizes.MORE)
    scaled = {(word, gb): scale.Series(TWO, TWO) for word in scale.WORDS for gb in sizes}
    locks = lockhold.Found()
    for kernel, steps in (("base", lockhold.BASE_STEPS), ("ours", lockhold.OURS_STEPS)):
        locks.holds |= {
            (kernel, step, gb): lockhold.Holds({"rmqueue_bulk": Counter({900: 2, 500: 9})})
            for step in steps
            for gb in sizes
        }
    return [
        *thp.measure(both, options)[0],
        *order0.measure(both, options)[0],
        *hugetlb.measure(both, options)[0],
        *deflate.measure(both, options),
        *hostmemory.measure(both, options, 2),
        *prezero.measure(both, options)[0],
        *prezero_cost.measure(options, IMAGES)[0],
        *refpage.measure(both.ours, 2),
        *refpage.measure_heap(both.ours, 2),
        *refpage.measure_instructions(both.ours),
        *page_fault.metrics_of(faults),
        *churn.metrics_of(churned),
        *device.metrics_of(devices),
        device.punch_metric(options),
        *scale.metrics_of(scaled),
        *lockhold.growth(locks, sizes, "scale.lock_hold"),
        *lockhold.against_base(locks, sizes),
        *zerobytes.measure(options, IMAGES),
    ]


def pair_of(both: Pair) -> Any:
    """What stands for a pair of guests under a plugin, which wants a file that it counts into."""

    @contextmanager
    def made(_: BenchOptions, __: Built, extra: dict[str, list[str]]) -> Iterator[Pair]:
        assert set(extra) == {"base", "ours"}
        yield both

    return made


def test_every_figure_has_a_sentence(written: list[Metric]) -> None:
    assert len(written) > 150
    assert [metric.name for metric in written if not metric.sentence.strip().endswith((".", ".)"))] == []
    names = [metric.name for metric in written]
    assert sorted(names) == sorted(set(names))


def test_the_page_names_no_figure_that_nobody_writes(written: list[Metric]) -> None:
    """A name that is misspelt would leave a chart, a headline or a posted table without ours."""
    known = {metric.name for metric in written}
    wanted = [name for _, _, bars in charted.CHARTS for name, _ in bars]
    wanted += [name for name, _ in charted.HEADLINES]
    wanted += [row.metric for table in seeds.TABLES for row in table.rows if row.metric]
    # Not every method has every figure, and a chart leaves out what is not there.
    never = {
        f"refpage.{touched}.against_{how}.max_rss"
        for touched in ("page", "half", "all")
        for how in ("memfd", "uffd")
    }
    assert {name for name in wanted if name not in known and not name.startswith(ELSEWHERE)} == never


def test_every_figure_can_be_put_on_a_page(written: list[Metric]) -> None:
    """One result with all of them: units of a chart agree, and each posted table is beside its own."""
    page = report.html([Result("all", "tcg", {}, "./kz bench all", written)])
    assert page.count("<figure>") == page.count("<figcaption>") > 50
    for table in seeds.TABLES:
        assert table.source.split(",")[0] in page


def calls_without_sentence(source: str) -> list[int]:
    """Lines on which Metric.of() is called with no sentence, or with an empty one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Metric.of":
            given = [word.value for word in node.keywords if word.arg == "sentence"]
            if not given or (isinstance(given[0], ast.Constant) and not given[0].value):
                found.append(node.lineno)
    return found


def test_a_bench_cannot_make_a_figure_without_a_sentence() -> None:
    assert calls_without_sentence('Metric.of("a", "ms", x, y)\nMetric.of("a", "ms", x, y, sentence="")') == [
        1,
        2,
    ]
    calls = 0
    for file in sorted((REPO / "lab").rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        assert calls_without_sentence(source) == [], file.name
        calls += source.count("Metric.of(")
    assert calls >= 30


def test_recorded_runs_have_a_sentence_for_each_figure() -> None:
    runs = sorted((REPO / "out").glob("*/*/result.json")) + sorted((REPO / "out").glob("all/*/*/result.json"))
    if not runs:
        pytest.skip("no run was recorded in out/")
    for run in runs:
        assert json.loads(run.read_text(encoding="utf-8"))["metrics"], run
        assert [metric.name for metric in load(run).metrics if not metric.sentence] == [], run
