# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.core.errors import USAGE, UsageError
from lab.report.commands import app
from lab.report.compare import compare
from lab.report.results import Metric, Result


def write(folder: Path, clock: float, **more: object) -> Path:
    fields: dict[str, object] = {
        "name": "thp",
        "accelerator": "tcg",
        "versions": {},
        "reproduce": "",
        "metrics": [Metric.of("thp.populate.task_clock", "ms", [clock], [clock / 4])],
        "job": {"size_mb": 256},
        "host": {"cpu": "Z80", "cpus": "2", "kernel": "6.1"},
    }
    Result(**(fields | more)).save(folder)  # type: ignore[arg-type]
    return folder


def test_alike_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "a", 100), write(tmp_path / "b", 110))
    assert [(row.side, row.first.median, row.second.median) for row in found.rows] == [
        ("base", 100, 110),
        ("ours", 25, 27.5),
        ("ours/base", -75, -75),
    ]
    assert found.rows[0].change_percent == pytest.approx(10)
    assert not found.rows[0].overlap
    assert found.rows[2].points == 0
    assert found.reasons == found.versions == found.only_first == found.only_second == []


BASE = [100.0, 104, 98, 101, 99, 103, 97, 102, 100, 105]


def series(factor: float, saved: float) -> Metric:
    return Metric.of(
        "a.b", "ms", [v * factor for v in BASE], [v * factor * (1 - saved) for v in BASE]
    )


def test_differences_beyond_chance_are_marked(tmp_path: Path) -> None:
    """A machine that is slower today is slower for both sides.

    The change within the pairs does not move.
    """
    one = write(tmp_path / "a", 0, metrics=[series(1.0, 0.5)])
    slower = compare(one, write(tmp_path / "b", 0, metrics=[series(1.3, 0.5)]))
    assert [row.significance and row.significance.differs for row in slower.rows[:2]] == [
        True,
        True,
    ]
    pairs = slower.rows[2]
    assert pairs.side == "ours/base" and pairs.points == pytest.approx(0)
    worse = compare(one, write(tmp_path / "c", 0, metrics=[series(1.0, 0.4)])).rows
    assert worse[0].significance and worse[0].significance.differs is False
    assert worse[2].points == pytest.approx(10)
    assert worse[2].change_percent is None


def test_few_or_unknown_values_are_not_tested(tmp_path: Path) -> None:
    rows = compare(write(tmp_path / "a", 100), write(tmp_path / "b", 110)).rows
    assert {row.significance.test for row in rows if row.significance} == {"too few"}
    old = json.loads((tmp_path / "a" / "result.json").read_text())
    for metric in old["metrics"]:
        del metric["values"], metric["significance"]
    (tmp_path / "a" / "result.json").write_text(json.dumps(old))
    rows = compare(tmp_path / "a", tmp_path / "b").rows
    assert [(row.side, row.significance) for row in rows] == [("base", None), ("ours", None)]


def test_what_only_one_run_has_is_named(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 0, metrics=[series(1, 0.5), Metric.of("old", "ms", [1.0], [1.0])])
    two = write(
        tmp_path / "b",
        0,
        metrics=[series(1, 0.5), Metric.of("new", "ms", [1.0], [1.0])],
        versions={"qemu": "10.0.14"},
    )
    found = compare(one, two)
    assert (found.only_first, found.only_second) == (["old"], ["new"])
    assert found.versions == ["qemu nothing against 10.0.14"]
    told = CliRunner().invoke(app, ["compare", str(one), str(two)]).stdout
    assert "Only in the first: old" in told and "Only in the second: new" in told
    assert "Not the same: qemu nothing against 10.0.14" in told


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"accelerator": "kvm"}, "accelerator"),
        ({"name": "order0"}, "job"),
        ({"job": {"size_mb": 64}}, "size_mb"),
        ({"host": {"cpu": "Z180", "cpus": "2"}}, "Z180"),
        ({"host": {"cpu": "Z80", "cpus": "4"}}, "host cpus 2 against 4"),
        ({"host": {"cpu": "Z80", "cpus": "2", "kernel": "6.2"}}, "host kernel 6.1 against 6.2"),
        ({"job": {"size_mb": 256, "pairs": 5}}, "pairs nothing against 5"),
        ({"job": {}}, "size_mb 256 against nothing"),
        (
            {"sides": ["in QEMU", "vhost-user"]},
            "sides base and knownzero against in QEMU and vhost-user",
        ),
    ],
)
def test_unlike_runs_are_refused_unless_forced(
    tmp_path: Path, more: dict[str, object], word: str
) -> None:
    one, two = write(tmp_path / "a", 100), write(tmp_path / "b", 110, **more)
    with pytest.raises(UsageError) as caught:
        compare(one, two)
    assert caught.value.code == USAGE
    assert word in caught.value.why
    forced = compare(one, two, force=True)
    assert forced.rows and any(word in reason for reason in forced.reasons)


def test_runs_that_share_no_metric_are_refused_even_when_forced(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 100)
    two = write(tmp_path / "b", 100, metrics=[Metric.of("other", "ms", [1.0], [1.0])])
    with pytest.raises(UsageError, match="Cannot compare"):
        compare(one, two, force=True)
