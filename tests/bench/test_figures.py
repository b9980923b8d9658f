# SPDX-License-Identifier: GPL-2.0
"""Every figure that a bench can write, without a guest.

Each has its words, and the pages know it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.bench import (
    allocation,
    boot,
    churn,
    device,
    fleet,
    host,
    hotpath,
    init_on_alloc,
    jobs,
    kzeropaged,
    lockhold,
    page_fault,
    prezero,
    refpage,
    runner,
    scale,
    session,
)
from lab.bench.repeat import Values
from lab.bench.table import BENCHES
from lab.report import page, registry
from lab.report.groups import groups
from lab.report.results import Metric, Result
from tests.bench.fakes import MIB, fake, run_of, side

TWO = [1.0, 2.0]
LONG = 52  # characters of a label that fit beside each other


def answer(*argv: str) -> dict[str, Any]:
    """The answer of every guest program."""
    loops = int(argv[argv.index("--loops") + 1]) if "--loops" in argv else 1
    values = {
        "task_clock_ns": 10**6,
        "max_rss_kb": 10,
        "steps": 10,
        "bytes": 256 * MIB,
        "minor_faults": 9,
    }
    counters = {
        "thp_fault_alloc": 800,
        "pgzeroed_cleared": 1,
        "pgzeroed_skip": 1,
        "pgzeroed_bad": 0,
    }
    gaps = {"median_ns": 1, "p99_ns": 2, "longest_ns": 3}
    return {**values, **gaps, "wall_ns": 10**6 * loops, "vmstat": counters}


@contextmanager
def guests(specs: list[session.Wanted], keep: object) -> Iterator[list[Any]]:
    yield [side(one.name, answer) for one in specs]


def everything(monkeypatch: pytest.MonkeyPatch) -> list[Metric]:
    """The figures of all benches, of two repetitions each.

    Measured with fake guests, or made of fake values.
    """
    nothing = dict.fromkeys(("bytes", "cpu", "seconds", "known", "gib_cpu", "gib_seconds"), 1.0)
    monkeypatch.setattr(runner, "guests", guests)
    for module in (jobs, prezero):
        monkeypatch.setattr(module, "warm_host", lambda size: None)
    monkeypatch.setattr(kzeropaged, "zero_all", lambda *_: nothing)
    monkeypatch.setattr(jobs, "settle_both", lambda sides: None)
    monkeypatch.setattr(kzeropaged, "known_percent", lambda _: 1.0)
    monkeypatch.setattr(allocation, "in_and_out", lambda *_: None)
    monkeypatch.setattr("lab.build.programs.build_programs", lambda: {"corunner": Path("x")})
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    once = {"steps": 1, "wall_ns": 1, "cleared_bytes": 1, "clear_ns": 1}
    monkeypatch.setattr(prezero, "_corunner", lambda *_: once)
    monkeypatch.setattr(host, "fill_and_free", lambda _: (3e9, 1e6))
    monkeypatch.setattr("lab.build.daemon.punch", lambda *_: {"bare": TWO, "daemon": TWO})
    monkeypatch.setattr(allocation, "settle_both", lambda _: None)
    monkeypatch.setattr(allocation, "_job", lambda *_: 1.0)
    boots = {path.name: 1.0 for path in (*hotpath.PATHS, *hotpath.MORE, *hotpath.NEW)}
    for how in ("_boot", "_active"):
        monkeypatch.setattr(hotpath, how, lambda *_: boots)

    found: list[Metric] = []
    for name in ("thp", "hugetlb", "deflate", "prezero", "zerobytes", "hotpath"):
        run = run_of(name, pairs=2)
        BENCHES[name].measure(run)
        # The demo has the paths of the bench, too.
        found += [
            metric for metric in run.metrics if metric.name not in {one.name for one in found}
        ]
    run = run_of("refpage", pairs=2)
    guest = side("ours", answer)
    for refpage_part in (refpage.methods, refpage.instructions, refpage.readers):
        refpage_part(run, guest)
    assert fake(guest).asked
    device.punch(run)

    class Filled(Values):
        def __missing__(self, key: tuple[object, ...]) -> list[float]:
            return TWO

    sizes = (*host.SIZES, host.MORE)
    for name, kind in boot.KINDS.items():
        boot.figures(run, name, kind, Filled())
    init_on_alloc.figures(run, Filled())
    page_fault.figures(run, Filled())
    churn.figures(run, Filled())
    device.figures(run, Filled())
    fleet.figures(run, Filled())
    scale.figures(run, Filled(), sizes)
    holds = lockhold.Holds({"rmqueue_bulk": Counter({900: 2, 500: 9})})
    locks = lockhold.Found({(*step, gb): holds for step in lockhold.ALL_STEPS for gb in sizes})
    lockhold.growth(run, locks, sizes)
    lockhold.against_base(run, locks, sizes)
    return found + run.metrics


@pytest.fixture(scope="module")
def written() -> Iterator[list[Metric]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield everything(monkeypatch)


def test_every_figure_has_its_words_and_a_name_of_its_own(written: list[Metric]) -> None:
    assert len(written) > 250
    assert [metric.name for metric in written if not metric.title or "{" in metric.sentence] == []
    names = Counter(metric.name for metric in written)
    assert [name for name, times in names.items() if times > 1] == []


def test_every_metric_of_the_registry_is_measured(written: list[Metric]) -> None:
    """Both-ends and programs need guests; a breakdown needs a path beyond its limit."""
    measured = {metric.kind for metric in written}
    others = {
        name
        for name in registry.definitions()
        if name.startswith(("both-ends.", "programs.")) or name.endswith(".in.{function}")
    }
    assert set(registry.definitions()) == measured | others


def test_every_rule_of_the_registry_applies_to_a_figure(written: list[Metric]) -> None:
    """A misspelt parameter would leave a target or a headline without effect."""
    for name, about in registry.definitions().items():
        parameters = [metric.parameters for metric in written if metric.kind == name]
        for rule in (*about.targets, *about.headlines) if parameters else ():
            assert any(map(rule.applies, parameters)), (name, rule)


def test_the_page_names_only_figures_of_a_bench(written: list[Metric]) -> None:
    """A misspelt name would leave a posted table without ours."""
    known = {metric.name for metric in written}
    wanted = [row[4] for table in page.posted() for row in table["rows"] if row[4]]
    assert len(wanted) > 20 and set(wanted) <= known


def test_every_figure_is_in_a_chart_under_a_label_of_its_own(written: list[Metric]) -> None:
    result = Result("all", "tcg", {}, "./kz bench all", written)
    charts = groups(result)
    assert sum(len(chart.metrics) for chart in charts) == len(written)
    for chart in charts:
        assert len(set(chart.labels)) == len(chart.labels), chart
        assert all(0 < len(label) <= LONG for label in chart.labels) or len(chart.labels) == 1, (
            chart
        )
    titles = [chart.title for chart in charts]
    # The chart of the README.
    assert titles[:2] == [
        "Bytes that the guest zeroes for 256 MB",
        "CPU time of a program that maps 256 MB",
    ]
    labels = [
        "mapped, never touched",
        "mapped, a byte of each 4 KiB touched",
        "mapped, every byte written",
    ]
    assert charts[1].labels == labels
    text = page.html([result])
    assert text.count("<figure>") == text.count("<figcaption>") == len(charts) > 50
    for table in page.posted():
        assert table["source"].split(",")[0] in text
