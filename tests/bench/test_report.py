# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab import charts
from lab.report import html, markdown, register, write_reports
from lab.results import Metric, Result, Target
from lab.units import human, percent

MIB = 1 << 20


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
                sentence="CPU time.",
                target=target,
            ),
            Metric.of("thp.touch_all.task_clock", "ms", [200.0, 210, 190], [90.0, 95, 85]),
            Metric.of("thp.populate.guest_zeroed_bytes", "bytes", [256.0 * MIB] * 3, [1.5 * MIB] * 3),
            Metric.of("order0.populate.skipped_percent", "percent", [0.0] * 3, [88.0] * 3),
            Metric.of("hotpath.alloc_free.instructions", "instructions", [401.0] * 3, [402.0] * 3),
            Metric.of("host.resident_after_free_bytes", "bytes", [300.0 * MIB] * 3, [301.0 * MIB] * 3),
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


def test_the_seeds_figures_say_where_they_come_from() -> None:
    for text in (html([demo()]), markdown([demo()])):
        assert "232 ± 20 ms" in text
        assert "KVM" in text
        assert "never the milliseconds" in text


def test_a_missed_target_is_seen() -> None:
    result = demo()
    result.metrics = [
        Metric.of("thp.populate.task_clock", "ms", [100.0], [90.0], target=Target("78 % less", False))
    ]
    assert "NO: 78 % less" in markdown([result])
    assert '<span class="bad">NO</span>' in html([result])


def test_a_metric_nobody_knows_is_drawn_all_the_same() -> None:
    page = html([demo()]).replace("<wbr>", "")
    assert "<h3>novel.thing</h3>" in page
    assert 'aria-label="novel.thing"' in page
    # Its title is said once, not again beside the bars.
    assert '<text class="label" x="0" y="13.0">novel.thing' not in page


def test_no_value_is_cut_off() -> None:
    for value in (1.0, 737814.0, 123456789.0):
        metric = Metric.of("x.corunner", "steps/s", [value] * 3, [value] * 3)
        drawn = charts.bars([metric], [""], "x")
        found = re.findall(r'<text class="value" x="([\d.]+)" y="[\d.]+">([^<]+)</text>', drawn)
        assert len(found) == 2
        for left, text in found:
            assert float(left) + charts.CHARACTER * len(text) <= charts.WIDTH


def test_every_figure_of_a_narrow_table_says_what_it_is() -> None:
    page = html([demo()])
    names = re.findall(r'<td data-what="([a-z]+)">', page)
    assert names == ["base", "knownzero", "change"] * len(demo().metrics)
    assert "content: attr(data-what)" in page


def test_names_may_be_broken_and_are_escaped() -> None:
    result = demo()
    result.metrics = [Metric.of("a.b_c<d>", "ms", [1.0], [2.0])]
    assert "<code>a.<wbr>b_<wbr>c&lt;d&gt;</code>" in html([result])


def test_charts_refuse_to_mix_units() -> None:
    metrics = demo().metrics
    with pytest.raises(ValueError, match="share a unit"):
        charts.bars([metrics[0], metrics[2]], ["a", "b"], "mixed")


def test_bars_are_to_scale_from_zero() -> None:
    svg = charts.bars([Metric.of("x", "ms", [100.0], [25.0])], ["x"], "x")
    widths = [
        float(width) for width in re.findall(r'<rect class="\w+" x="0" y="[\d.]+" width="([\d.]+)"', svg)
    ]
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.01)


def test_all_zero_values_can_be_drawn() -> None:
    assert "<svg" in charts.bars([Metric.of("x", "percent", [0.0], [0.0])], ["x"], "x")


def test_the_verb_writes_both_files(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    demo().save(tmp_path / "run")
    told = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert told.exit_code == 0
    assert told.stdout.split() == [str(tmp_path / "run" / "report.html"), str(tmp_path / "run" / "report.md")]
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == [
        "report.html",
        "report.md",
        "result.json",
    ]


def test_several_runs_make_one_page(tmp_path: Path) -> None:
    write_reports([demo(), demo("kvm")], tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "on tcg" in page and "on kvm" in page


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


def test_small_changes_keep_their_digits() -> None:
    assert percent(-78.4) == "-78 %"
    assert percent(0.12) == "+0.12 %"
    assert percent(-99.72) == "-99.7 %"
    assert percent(None) == "–"
