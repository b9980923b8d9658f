# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lab.compare import compare, register
from lab.errors import USAGE, UsageError
from lab.paths import REPO
from lab.results import Metric, Result


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
    assert [(row.side, row.first.median, row.second.median) for row in found] == [
        ("base", 100, 110),
        ("ours", 25, 27.5),
    ]
    assert found[0].change_percent == pytest.approx(10)
    assert not found[0].overlap


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"accelerator": "kvm"}, "accelerator"),
        ({"name": "order0"}, "job"),
        ({"job": {"size_mb": 64}}, "size_mb"),
        ({"host": {"cpu": "Z180", "cpus": "2"}}, "Z180"),
        ({"host": {"cpu": "Z80", "cpus": "4"}}, "host cpus 2 against 4"),
    ],
)
def test_unlike_runs_are_refused_unless_forced(tmp_path: Path, more: dict[str, object], word: str) -> None:
    one, two = write(tmp_path / "a", 100), write(tmp_path / "b", 110, **more)
    with pytest.raises(UsageError) as caught:
        compare(one, two)
    assert caught.value.code == USAGE
    assert word in caught.value.why
    assert compare(one, two, force=True)


def test_a_run_that_does_not_know_its_host_is_not_unlike(tmp_path: Path) -> None:
    other = write(tmp_path / "b", 110, host={"kernel": "6.2"})
    assert compare(write(tmp_path / "a", 100), other)


def test_kz_refuses_with_bad_usage_and_can_be_forced(tmp_path: Path) -> None:
    runs = [str(write(tmp_path / "a", 100)), str(write(tmp_path / "b", 110, accelerator="kvm"))]

    def kz(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lab", "compare", *runs, *more],
            env={**os.environ, "PYTHONPATH": str(REPO)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused = kz()
    assert refused.returncode == USAGE
    assert refused.stdout == ""
    assert "accelerator tcg against kvm" in refused.stderr
    assert "--force" in refused.stderr
    forced = kz("--force")
    assert forced.returncode == 0, forced.stderr
    assert "thp.populate.task_clock" in forced.stdout


def test_runs_that_share_no_metric_are_refused_even_when_forced(tmp_path: Path) -> None:
    one = write(tmp_path / "a", 100)
    two = write(tmp_path / "b", 100, metrics=[Metric.of("other", "ms", [1.0], [1.0])])
    with pytest.raises(UsageError, match="Cannot compare"):
        compare(one, two, force=True)


def test_the_verb_prints_json_and_a_table(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    runs = [str(write(tmp_path / "a", 100)), str(write(tmp_path / "b", 110))]
    told = CliRunner().invoke(app, ["compare", *runs, "--json"])
    assert told.exit_code == 0
    assert {row["side"] for row in json.loads(told.stdout)} == {"base", "ours"}
    assert "thp.populate.task_clock" in CliRunner().invoke(app, ["compare", *runs]).stdout
