# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.core.errors import MACHINE, USAGE, LabError
from lab.report.results import Metric, Result, Sample, load
from lab.report.significance import change_interval

finite = st.floats(min_value=0.001, max_value=1e12, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=40))
def test_a_sample_is_ordered_and_lies_within_its_values(values: list[float]) -> None:
    sample = Sample.of(values)
    assert min(values) <= sample.low <= sample.median <= sample.high <= max(values)
    assert sample.n == len(values)


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_nonsense_is_not_summarised(values: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot summarise"):
        Sample.of(values)


def test_percentiles_are_interpolated() -> None:
    sample = Sample.of([1, 2, 3, 4, 5])
    assert [sample.median, sample.low, sample.high] == pytest.approx([3, 1.4, 4.6])
    assert Sample.of([7]) == Sample(7, 7, 7, 1)


def test_the_interval_holds_the_change_and_is_repeatable() -> None:
    base = [100.0, 101, 99, 100, 102, 98, 100, 101, 99, 100]
    ours = [50.0, 51, 49, 50, 52, 48, 50, 51, 49, 50]
    found = change_interval(base, ours)
    assert found is not None
    assert found[0] <= -50 <= found[1]
    assert found[0] > -54 and found[1] < -46
    assert found == change_interval(base, ours)
    assert change_interval([0.0] * 3, ours) is change_interval(base[:2], ours) is None
    assert change_interval([0.0] * 3, [0.0] * 3) == (0, 0)


def result(**more: object) -> Result:
    fields: dict[str, object] = {
        "name": "thp",
        "accelerator": "tcg",
        "versions": {"qemu": "10"},
        "reproduce": "./kz bench thp",
        "metrics": [Metric.of("thp.populate.task_clock", "ms", [100.0, 110, 90], [20.0, 22, 18])],
        "job": {"size_mb": 256},
    }
    return Result(**(fields | more))  # type: ignore[arg-type]


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    first = result(series={"base": [2.0, 0.5]})
    path = first.save(tmp_path / "run")
    again = load(tmp_path / "run")
    assert (again.metrics, again.series) == (first.metrics, first.series)
    assert again.job == first.job
    assert load(path).accelerator == "tcg"
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["result.json"]


def test_a_run_that_is_not_there_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(LabError) as caught:
        load(tmp_path)
    assert caught.value.code == USAGE
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", USAGE),
        ("{", USAGE),
        ("[]", MACHINE),
        ("{}", MACHINE),
        ('{"format": 99}', MACHINE),
        ('{"name": "x", "metrics": 3}', MACHINE),
    ],
)
def test_a_damaged_run_is_named(tmp_path: Path, text: str, code: int) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(LabError) as caught:
        load(tmp_path)
    assert caught.value.code == code
    why = "is not a result" if code == MACHINE else "is no JSON file"
    assert why in caught.value.why
