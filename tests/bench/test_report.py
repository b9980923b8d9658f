# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.core.units import human
from lab.report import charts, publish
from lab.report.commands import app
from lab.report.page import html, ran_on
from lab.report.results import Metric, Result, Target

MIB = 1 << 20
LEVEL = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 102]


def demo(accelerator: str = "tcg") -> Result:
    target = Target("at least 78 % less than base", True)
    return Result(
        name="demo",
        accelerator=accelerator,
        versions={"qemu": "QEMU emulator version 10.0.13", "note": "<b>&"},
        reproduce="./kz demo --pairs 10",
        metrics=[
            Metric.of(
                "thp.populate.task_clock",
                "ms",
                [100.0, 110, 90],
                [20.0, 22, 18],
                target=target,
            ),
            Metric.of("thp.touch_all.task_clock", "ms", [200.0, 210, 190], [90.0, 95, 85]),
            Metric.of(
                "thp.populate.guest_zeroed_bytes", "bytes", [256.0 * MIB] * 3, [1.5 * MIB] * 3
            ),
            Metric.of("order0.populate.skipped_percent", "percent", [0.0] * 3, [88.0] * 3),
            Metric.of("hotpath.alloc_free.instructions", "instructions", [401.0] * 3, [402.0] * 3),
            Metric.of(
                "host.resident_after_free_bytes", "bytes", [300.0 * MIB] * 3, [301.0 * MIB] * 3
            ),
            Metric.of("novel.thing", "ms", [1.0], [2.0]),
        ],
        notes=["A note with <angle> brackets."],
    )


class Checker(HTMLParser):
    void = frozenset({"meta", "br", "link", "img", "input", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_needs_nothing_else() -> None:
    page = html([demo()])
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.links == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    assert page.count("<svg") >= 4
    assert page.count("<figure>") == page.count("<figcaption>")
    assert "&lt;angle&gt;" in page and "&lt;b&gt;&amp;" in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_significance_is_on_the_page() -> None:
    metrics = [
        Metric.of("a.differs", "ms", LEVEL, [v / 2 for v in LEVEL]),
        Metric.of("a.same", "ms", LEVEL, [*LEVEL[1:], LEVEL[0]]),
        Metric.of("a.few", "ms", [1.0, 2], [3.0, 4]),
        Metric.of("a.counter", "faults", [128.0] * 10, [0.0] * 10),
    ]
    text = html([Result("a", "tcg", {}, "", metrics)])
    assert "p = 0.002" in text and "too few to tell" in text and "no spread" in text
    assert "Wilcoxon signed-rank, exact" in text
    assert "1 of 2 figures that were tested have p &lt; 0.05" in text
    assert "not corrected" in text
    assert "p is the probability" not in html([Result("a", "tcg", {}, "", metrics[2:])])


def test_figures_say_what_they_were_measured_on() -> None:
    others = ["", "User-Mode Linux", "tcg, counting instructions"]
    metrics = [metric(f"x.{number}", accelerator=name) for number, name in enumerate(others)]
    made = Result("a", "kvm", {}, "", metrics)
    assert [ran_on(made, metric) for metric in made.metrics] == ["kvm", *others[1:]]
    page = html([made])
    assert page.count("Measured on: ") == 3 + 2
    assert all(
        figure.count("Measured on: ") == 1 for figure in re.findall(r"<figure>.*?</figure>", page)
    )


def metric(name: str, title: str = "", label: str = "", unit: str = "ms", **more: str) -> Metric:
    made = Metric.of(name, unit, [2.0], [1.0])
    return replace(made, title=title, label=label, **more)  # type: ignore[arg-type]


def test_the_terminal_has_whole_names_and_verdicts() -> None:
    name = "hotpath.active.alloc_free_order9.in." + "a_function_of_the_kernel_with_a_long_name_" * 2
    missed = Target("at least 78 % less", False)
    long = Metric.of(name, "ms", [1.0, 2, 3], [1.0, 2, 4], target=missed)
    near = Metric.of("thp.x", "ms", LEVEL, LEVEL, floor=LEVEL)
    metrics = [long, replace(near, near_floor=Target("+0.0 %", True))]
    made = Result("a", "tcg", {}, "./kz demo", metrics)
    heads, first, second = publish.table(made).text()
    assert heads.split() == ["figure", "base", "knownzero", "change", "target"]
    assert first.startswith(f"{name} ms  ") and first.endswith("  MISSED")
    assert second.startswith("thp.x ms") and second.endswith("  floor +0.0%: reached")


def test_bars_are_to_scale_from_zero() -> None:
    svg = charts.bars([Metric.of("x", "ms", [100.0], [25.0])], ["x"], "x")
    widths = [
        float(width)
        for width in re.findall(r'<rect class="\w+" x="0" y="[\d.]+" width="([\d.]+)"', svg)
    ]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.01)


def test_the_verb_writes_the_page(tmp_path: Path) -> None:
    demo().save(tmp_path / "run")
    told = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert told.exit_code == 0
    assert told.stdout.split() == [str(tmp_path / "run" / "report.html")]
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert names == {"report.html", "result.json"}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (256 * MIB, "bytes", "256 MiB"),
        (512, "bytes", "512 B"),
        (51.23, "ms", "51.2 ms"),
        (1204.25, "instructions", "1,204.2"),
        (21, "percent", "21.0 %"),
        (0, "faults", "0 faults"),
    ],
)
def test_figures_read_well(value: float, unit: str, text: str) -> None:
    assert human(value, unit) == text
