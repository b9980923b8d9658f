# SPDX-License-Identifier: GPL-2.0
"""Every metric of metrics.toml: it has its words, and the pages show it."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from lab.bench import (
    boot,
    device,
    fleet,
    init_on_alloc,
    jobs,
    kzeropaged,
    life,
    page_fault,
    prezero,
)
from lab.bench.repeat import Values
from lab.bench.runner import Run
from lab.bench.session import Side, Wanted
from lab.bench.table import BENCHES
from lab.report import page, registry
from lab.report.groups import groups
from lab.report.observations import metrics, observe
from lab.report.registry import Definition
from lab.report.results import Metric, Result
from tests.bench.fakes import run_of, side

LONG = 52  # characters of a label that fit beside each other
TWO = [1.0, 2.0]
PLACE = re.compile(r"\{(\w+)\}")
# Of parameters without words; of those whose words are not all different.
SAMPLES = {
    "gb": ["4", "8"],
    "threads": ["1", "8"],
    "pages": ["thp", "nothp"],
    "row": ["off", "on", "bit6"],
    "size_mb": ["256"],
    "length": ["short"],
    "bound": ["yes"],
}


def observed(about: Definition) -> list[Metric]:
    """A metric with each value of its parameters."""
    texts = (about.name, about.title, about.label, about.more)
    rules = about.targets
    names = dict.fromkeys(PLACE.findall(" ".join(texts)))
    names |= dict.fromkeys(name for rule in rules for name in rule.when)
    inner = [" ".join(about.words.get(name, {}).values()) for name in names]
    names |= dict.fromkeys(PLACE.findall(" ".join(inner)))
    needed = {"size_mb"} if about.targets else set()
    in_name = [name for name in names if f"{{{name}}}" in about.name]
    others = [*(name for name in names if name not in in_name), *(needed - set(in_name))]
    fixed = {name: values_of(about, name)[0] for name in others}
    found = []
    for values in itertools.product(*(values_of(about, name) for name in in_name)):
        of = dict(zip(in_name, values, strict=True))
        # The words of a path are chosen by its name.
        own = {name: of["path"] for name in ("counted", "path_name") if "path" in of}
        sides = {"base": TWO, "ours": TWO}
        found += metrics(observe(about.name, sides, "tcg", fixed | own | of))
    return found


def values_of(about: Definition, name: str) -> list[str]:
    return SAMPLES.get(name) or [*about.words.get(name, {"7": ""})]


@pytest.fixture(scope="module")
def written() -> list[Metric]:
    return [metric for about in registry.definitions().values() for metric in observed(about)]


def test_every_figure_has_its_words_and_a_name_of_its_own(written: list[Metric]) -> None:
    assert len(written) > 250
    assert [metric.name for metric in written if not metric.title or "{" in metric.sentence] == []
    names = Counter(metric.name for metric in written)
    assert [name for name, times in names.items() if times > 1] == []


def test_every_rule_of_the_registry_applies_to_a_figure(written: list[Metric]) -> None:
    """A misspelt parameter would leave a target without effect."""
    for name, about in registry.definitions().items():
        # With 4 KiB pages by either name.
        parameters = [metric.parameters for metric in written if metric.kind == name]
        parameters += [of | {"pages": "4k"} for of in parameters if "pages" in of]
        for rule in about.targets:
            assert any(map(rule.applies, parameters)), (name, rule)


def test_every_figure_is_in_a_chart_under_a_label_of_its_own(written: list[Metric]) -> None:
    result = Result("all", "tcg", {}, "./kz bench", written)
    charts = groups(result)
    assert sum(len(chart.metrics) for chart in charts) == len(written)
    for chart in charts:
        assert len(set(chart.labels)) == len(chart.labels), chart
        assert all(0 < len(label) <= LONG for label in chart.labels) or len(chart.labels) == 1, (
            chart
        )
    # The chart of the README.
    clock = next(one for one in charts if one.title == "CPU time of a program that maps 256 MiB")
    assert clock.labels == [
        "mapped, never touched",
        "mapped, a byte of each 4 KiB touched",
        "mapped, every byte written",
    ]
    text = page.html([result])
    # And one of a life, by its phases.
    assert text.count("<figure>") == text.count("<figcaption>") == len(charts) + 1 > 50


class Filled(Values):
    def __missing__(self, key: tuple[object, ...]) -> list[float]:
        return [2000.0, 2001.0]  # more than the huge pages of a job


@pytest.mark.parametrize(
    "name",
    ["boot", "thp", "order0", "hugetlb", "page-fault", "init-on-alloc", "prezero", "refpage"],
)
def test_a_bench_gives_every_parameter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each metric that a bench adds has the words of its parameters."""

    @contextmanager
    def guests(self: Run, specs: Sequence[Wanted]) -> Iterator[list[Side]]:
        del self
        yield [
            side(spec.name, lambda *argv: {"wall_ns": 1, "max_rss_kb": 1}, "0") for spec in specs
        ]

    for module in (boot, init_on_alloc, jobs, kzeropaged, page_fault, prezero):
        monkeypatch.setattr(module, "measured", lambda *_, **__: Filled())
    monkeypatch.setattr(Run, "guests", guests)
    run = run_of(name)
    BENCHES[name].measure(run)
    assert run.metrics
    assert [metric.name for metric in run.metrics if "{" in metric.sentence] == []


def test_figures_give_every_parameter() -> None:
    """Of the benches that make their figures from values alone."""
    run = run_of("thp")
    device.figures(run, Filled())
    fleet.figures(run, Filled())
    life.figures(run, Filled(), life.Sizes())
    assert len(run.metrics) > 100
    assert [metric.name for metric in run.metrics if "{" in metric.sentence] == []
