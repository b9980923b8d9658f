# SPDX-License-Identifier: GPL-2.0
"""What `kz publish` writes to docs/results, and the runs that it refuses."""

from __future__ import annotations

import json
import re
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.bench.commands import app
from lab.core.errors import LabError
from lab.patches import parts
from lab.report import losses, origin, questions, registry
from lab.report import publish as publishing
from lab.report.publish import publish
from lab.report.results import Metric, Result, Target, load, results_of

BENCHES = ["thp", "order0"]
BASE = [100.0, 104, 98, 101, 99, 103]


def titled(metric: Metric, title: str) -> Metric:
    return replace(metric, title=title, label="a job")


def result(name: str, met: bool = True, **more: Any) -> Result:
    half, target = [v / 2 for v in BASE], Target("less", met)
    clock = Metric.of("thp.populate.task_clock", "ms", BASE, half, target)
    metrics = [
        titled(Metric.of("thp.populate.zeroed", "bytes", BASE, BASE[::-1]), "Bytes zeroed"),
        replace(titled(clock, "CPU time of the job"), kind="thp.{mode}.task_clock"),
        titled(Metric.of("thp.third", "faults", BASE, BASE), "Faults"),
    ]
    fields: dict[str, Any] = {
        "versions": {"knownzero": "v1-3-gabc"},
        "host": {"cpu": "Z80", "cpus": "1"},
        "metrics": metrics,
    }
    return Result(
        name=name, accelerator="tcg", reproduce=f"./kz {name} --pairs 6", **(fields | more)
    )


@pytest.fixture
def to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(publishing, "FOLDER", tmp_path / "results")
    return tmp_path / "results"


def test_a_run_is_published_reduced_with_its_main_charts(tmp_path: Path, to: Path) -> None:
    first = result("demo")
    first.save(tmp_path / "run")
    assert publish(tmp_path / "run", BENCHES) == [to / "demo"]
    assert {file.name for file in (to / "demo").iterdir()} == {
        "README.md",
        "result.json",
        "thp.svg",
    }
    (again,) = results_of(to / "demo").values()
    for one, two in zip(first.metrics, again.metrics, strict=True):
        # Medians, spread, n, interval, significance and target: all but the single values.
        for side, kept in ((one.base, two.base), (one.ours, two.ours)):
            assert astuple(kept) == pytest.approx(astuple(side), rel=1e-5)
        assert two.change_interval == pytest.approx(one.change_interval, rel=1e-5)
        assert one.significance and two.significance
        assert two.significance.p == pytest.approx(one.significance.p, rel=1e-5)
        assert (two.target, two.values) == (one.target, {})
    svg = (to / "demo" / "thp.svg").read_text()
    # The chart of the README.
    assert "CPU time of the job" in svg and "Bytes zeroed" not in svg and "Faults" not in svg


def test_a_published_metric_keeps_only_words_of_its_own(tmp_path: Path, to: Path) -> None:
    first = result("demo")
    parameters = {"mode": "populate", "size_mb": "256"}
    words = registry.words("thp.{mode}.task_clock", parameters)
    clock = replace(
        first.metrics[1],
        parameters=parameters,
        title=words["title"],
        label=words["label"],
        more=words["more"],
    )
    made = [clock, replace(clock, name="thp.own", title="A title of its own")]
    replace(first, metrics=made).save(tmp_path / "run")
    publish(tmp_path / "run", BENCHES)
    stored = json.loads((to / "demo" / "result.json").read_text(encoding="utf-8"))["metrics"]
    assert [one.get("title") for one in stored] == [None, "A title of its own"]
    assert "label" not in stored[0] and clock.label
    # A name is what kind and parameters make, or it is kept.
    assert [one.get("name") for one in stored] == [None, "thp.own"]
    file = to / "demo" / "result.json"
    whole = file.read_text(encoding="utf-8")
    file.write_text(whole.replace('"name":"thp.own",', '"name":"",'), encoding="utf-8")
    with pytest.raises(LabError, match="Cannot read") as error:
        load(to / "demo")
    assert "a metric has no name" in error.value.why
    file.write_text(whole, encoding="utf-8")
    again = load(to / "demo").metrics
    assert [one.name for one in again] == ["thp.populate.task_clock", "thp.own"]
    for one, two in zip(made, again, strict=True):
        assert (two.title, two.label, two.more, two.better) == (
            one.title,
            one.label,
            one.more,
            one.better,
        )


def test_a_published_run_can_be_published_again(tmp_path: Path, to: Path) -> None:
    result("demo").save(tmp_path / "run")
    publish(tmp_path / "run", BENCHES)
    before = {file: file.read_text() for file in to.rglob("*.*")}
    publish(to / "demo", BENCHES)
    assert {file: file.read_text() for file in to.rglob("*.*")} == before


def test_what_is_published_is_drawn_from_it() -> None:
    """The pages and SVG files of docs/results are those of its result.json files.

    The charts are small enough for a page.
    """
    results = []
    for file in sorted(publishing.FOLDER.glob("*/result.json")):
        results.append(load(file))
        for name, text in publishing._files(results[-1]).items():
            assert (file.parent / name).read_text(encoding="utf-8") == text, file.parent / name
    first = publishing.page(publishing.ordered(results))
    assert (publishing.FOLDER / "README.md").read_text(encoding="utf-8") == first
    svg = (publishing.FOLDER / "thp-native" / "thp.svg").read_text(encoding="utf-8")
    width, height = map(int, re.findall(r' (?:width|height)="(\d+)"', svg)[:2])
    assert width <= 400 and height <= 400


def test_every_question_is_answered_by_a_published_figure() -> None:
    """The first page begins with a table of at most 20 rows."""
    results = [load(file) for file in sorted(publishing.FOLDER.glob("*/result.json"))]
    rows = questions.table(results).strip().splitlines()[2:]
    asked = [row.partition("](")[0].removeprefix("[") for row in rows]
    assert asked == [one["asks"] for one in questions.questions()]
    assert 10 <= len(rows) <= 20
    assert all(len(row.split("|")) == len(questions.HEADS) for row in rows)
    first = (publishing.FOLDER / "README.md").read_text(encoding="utf-8")
    assert first.index("\nquestion|") < first.index("\n## ")


def test_a_question_gets_the_worst_of_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"asks": "How long?", "runs": ["demo", "demo-debian"], "metrics": "a.?.time"}
    monkeypatch.setattr(questions, "questions", lambda: [asked, asked | {"runs": ["other"]}])
    quick, slow = (
        Metric.of("a.1.time", "ms", BASE, [1.0] * 6),
        Metric.of("a.2.time", "ms", BASE, BASE),
    )
    made = result("demo", metrics=[quick, slow, Metric.of("b.1.time", "ms", [1.0], [9.0])])
    heads, _, row = questions.table([made]).strip().splitlines()
    assert heads == "|".join(questions.HEADS)
    asks, base, ours, change, spread, accelerator, command = row.split("|")
    assert asks == "[How long?](demo/README.md)"
    assert (accelerator, command) == ("tcg", "`./kz demo --pairs 6`")
    assert (base, ours, change) == ("100 ms", "100 ms", "+0.00 %")
    assert spread == "98.5 ms … 104 ms → 98.5 ms … 104 ms; change -3 % … +4 %; n = 6"
    rates = [replace(metric, better="more") for metric in made.metrics]
    (_, _, row) = questions.table([replace(made, metrics=rates)]).strip().splitlines()
    assert "|100 ms|1.00 ms|-99.0 %|" in row
    # Those with a distribution's defaults are among them.
    debian = replace(made, name="demo-debian", metrics=[Metric.of("a.1.time", "ms", BASE, [300.0])])
    (_, _, row) = questions.table([made, debian]).strip().splitlines()
    assert "](demo-debian/README.md)" in row
    assert questions.table([replace(made, metrics=[])]) == ""


def test_every_loss_is_in_the_table_of_losses() -> None:
    """Not what is within noise, better, or a comparison of base with base."""
    worse = Metric.of("slow", "ms", BASE, [300.0] * 6)
    count = Metric.of("count", "instructions", [100.0], [103.0])
    halved = Metric.of("half", "MiB/s", BASE, [50.0] * 6)
    others = [
        Metric.of("noise", "ms", BASE, [50.0, 300.0] * 3),
        Metric.of("once", "ms", [100.0], [300.0]),
        Metric.of("same", "ms", BASE, BASE),
        replace(worse, name="neither", better=""),
        replace(worse, name="fast", better="more"),
        replace(worse, name="of base", parameters={"peer": "init_on_free"}),
    ]
    with_reports = replace(worse, name="both report", parameters={"source": "reports"})
    worse_ones = [
        count,
        replace(halved, better="more", title="Rate", label="read"),
        worse,
        with_reports,
    ]
    rows = losses.table([result("demo", metrics=[*others, *worse_ones])]).splitlines()[2:]
    assert [row.partition("|")[0] for row in rows] == [
        "`slow`",
        "`both report`",
        "Rate, read",
        "`count`",
    ]
    assert rows[3].endswith("|100.0|103.0|+3 %|tcg|[demo](demo/README.md)")


def test_a_page_has_every_figure_of_its_run(tmp_path: Path, to: Path) -> None:
    for name in ("order0", "demo"):
        result(name, when="2026-11-24T01:02:03+0000").save(tmp_path / name)
        publish(tmp_path / name, BENCHES)
    first = (to / "README.md").read_text()
    linked = re.findall(r"^\[\w+\]\((\w+)/README.md\)", first, re.MULTILINE)
    assert linked == ["demo", "order0"]
    for name in linked:
        page = (to / name / "README.md").read_text()
        assert f"\n# {name}\n\ntcg; unknown." in page
        assert "\n`thp.populate.task_clock` ms|100 (98.5…104)|50.2 (49.2…51.8)|-50%" in page
        assert "|met\n" in page
        assert "\n`thp.third` faults|100 (98.5…104)|100 (98.5…104)|+0.00% (" in page
    for word in ("`./kz demo --pairs 6`", "tcg", "v1-3-gabc", "2026-11-24", "1×Z80", "1 of 1"):
        assert word in first
    # Publishing again replaces the run.
    before = sorted(to.rglob("*"))
    publish(tmp_path / "demo", BENCHES)
    assert sorted(to.rglob("*")) == before and (to / "README.md").read_text() == first


def test_a_page_says_which_series_was_measured(tmp_path: Path, to: Path) -> None:
    """This one; or the first commit to linux/parts that the run lacks."""
    now = parts.keys()
    zeroed = now | {"linux/zeroed": "another"}
    old = now | dict.fromkeys([name for name in now if name.startswith("linux/")], "another")
    commit = "5be6291"
    first = origin.later(commit)
    assert first.startswith("5fa70d6 ") and "let no lock wait" in first
    assert origin.later("5be6291-dirty") == origin.later("v1-3-g5be6291") == first
    for measured, words in (
        (now, origin.THIS),
        (now | {"qemu/reporting": "another"}, origin.THIS),
        (zeroed, f"{origin.THIS}, except zeroed (before {first})"),
        (old, f"before {first}"),
        ({}, origin.UNKNOWN),
    ):
        made = result("demo", parts=measured, versions={"knownzero": commit})
        made.save(tmp_path / "run")
        publish(tmp_path / "run", BENCHES)
        assert f"\n\ntcg; {words}. [How" in (to / "demo" / "README.md").read_text()
        assert f"|{words}|" in (to / "README.md").read_text()


@pytest.mark.parametrize(
    ("command", "earlier", "why"),
    [
        ("./kz bench demo --only park", "./kz bench demo", "left out"),
        ("./kz bench demo --ours debug", "./kz bench demo", "not of the kernel that ships"),
        ("./kz bench demo --only park", "./kz bench demo --only park", ""),
    ],
)
def test_a_part_replaces_no_whole_run(
    tmp_path: Path, to: Path, command: str, earlier: str, why: str
) -> None:
    replace(result("demo"), reproduce=earlier).save(tmp_path / "run")
    publish(tmp_path / "run", BENCHES)
    replace(result("demo"), reproduce=command).save(tmp_path / "run")
    if why:
        assert why in refused(tmp_path / "run", to)
    else:
        publish(tmp_path / "run", BENCHES)


def refused(run: Path, to: Path) -> str:
    there = {path: path.stat().st_mtime_ns for path in to.rglob("*")}
    with pytest.raises(LabError) as caught:
        publish(run, BENCHES)
    assert {path: path.stat().st_mtime_ns for path in to.rglob("*")} == there, (
        "something was written"
    )
    assert caught.value.what and caught.value.fix and caught.value.code
    return caught.value.why


def test_a_missed_target_is_published_as_such(tmp_path: Path, to: Path) -> None:
    result("demo").save(tmp_path / "good")
    publish(tmp_path / "good", BENCHES)
    result("demo", met=False).save(tmp_path / "run")
    publish(tmp_path / "run", BENCHES)
    assert "|MISSED\n" in (to / "demo" / "README.md").read_text()


def test_an_undecided_target_is_published_as_such(tmp_path: Path, to: Path) -> None:
    made = result("demo")
    hidden = Metric.of(
        "thp.noisy", "ms", BASE, BASE, target=Target("at least 78 % less", met=False, decided=False)
    )
    made.metrics.append(hidden)
    made.save(tmp_path / "run")
    publish(tmp_path / "run", BENCHES)
    text = (to / "demo" / "README.md").read_text()
    assert "|not decided\n" in text and "MISSED" not in text
    assert "|1 of 2, 1 not decided|" in (to / "README.md").read_text()


def test_a_run_of_another_format_or_without_a_result_is_refused(tmp_path: Path, to: Path) -> None:
    path = result("demo").save(tmp_path / "run")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    assert "its format is 1" in refused(tmp_path / "run", to)
    (tmp_path / "empty").mkdir()
    assert "result.json" in refused(tmp_path / "empty", to)
    result("demo", metrics=[]).save(tmp_path / "bare")
    assert "no figures" in refused(tmp_path / "bare", to)
    assert not to.exists()


def test_a_run_of_all_benches_is_published_whole(tmp_path: Path, to: Path) -> None:
    run = tmp_path / "all"
    result("thp").save(run / "thp")
    assert f"order0: Cannot read the run {run / 'order0'}" in refused(run, to)
    assert publish(run / "thp", BENCHES) == [to / "thp"]
    result("order0").save(run / "order0")
    assert publish(run, BENCHES) == [to / "thp", to / "order0"]
    assert {one.name for one in results_of(to).values()} == {"thp", "order0"}


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "FOLDER", tmp_path / "results")
    result("demo", met=False).save(tmp_path / "run")
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "run" / "nothing")])
    assert isinstance(done.exception, LabError)
    done = CliRunner().invoke(app, ["publish", str(tmp_path / "run")])
    assert done.exit_code == 0 and done.stdout.split() == [str(tmp_path / "results" / "demo")]
    assert load(tmp_path / "results" / "demo").name == "demo"
