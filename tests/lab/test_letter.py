# SPDX-License-Identifier: GPL-2.0
"""A letter has the figures of runs, says where they are from, and has a marked gap for what nobody measured."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lab.core.errors import LabError, UsageError
from lab.machine import fetch
from lab.post import letter
from lab.report.results import Metric, Result
from lab.series import series

TEMPLATE = """mm: the thing

Why.

{{ table("task-clock",
         ("populate", "thp.populate.task_clock"),
         ("hugetlb, surplus", "hugetlb.surplus.populate.task_clock")) }}

{{ table("zeroed", ("by the guest", "thp.populate.guest_zeroed_bytes")) }}

{{ provenance() }}

{{ base }}
"""


def result(name: str = "demo", when: str = "2026-11-22T20:00:00+0000", **more: object) -> Result:
    made = Result(
        name=name,
        accelerator="tcg",
        versions={"knownzero": "good1-3-g1234567", "qemu": "QEMU emulator version 10.0.13"},
        reproduce=f"./kz {name} --pairs 5",
        metrics=[
            Metric.of("thp.populate.task_clock", "ms", [300, 310, 320, 330, 340], [20, 21, 22, 23, 24]),
            Metric.of("thp.populate.guest_zeroed_bytes", "bytes", [256 << 20] * 5, [600 << 10] * 5),
        ],
        job={"size_mb": 256, "memory": "2G", "cpus": 1},
        host={"cpu": "A Processor", "cpus": "2", "kernel": "6.1"},
        when=when,
    )
    for key, value in more.items():
        setattr(made, key, value)
    return made


@pytest.fixture
def what(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> series.Series:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "Makefile").write_text("VERSION = 7\nPATCHLEVEL = 3\nSUBLEVEL = 4\n")
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(folder))
    (repo / "linux/cover-letter.txt").write_text(TEMPLATE)
    return series.get("linux")


def write(what: series.Series, *runs: Path) -> letter.Letter:
    return letter.write(what, fetch.identify("linux"), runs, [])


def test_tables_are_filled_and_aligned(what: series.Series, tmp_path: Path) -> None:
    result().save(tmp_path / "run")
    made = write(what, tmp_path / "run")
    assert made.subject == "mm: the thing"
    lines = made.text.splitlines()
    at = next(i for i, line in enumerate(lines) if "task-clock (ms)" in line)
    assert lines[at : at + 4] == [
        "  task-clock (ms)                          base            patched",
        "  populate                       320 (304..336)  22.0 (20.4..23.6)    -93 %",
        "  hugetlb, surplus                       [no figures: run kz bench hugetlb]",
        "  [TCG, n = 5: kz demo --pairs 5]",
    ]
    assert "  zeroed (MiB)                             base            patched" in lines
    assert "  by the guest                              256               0.59  -99.8 %" in lines
    assert made.gaps == ["hugetlb.surplus.populate.task_clock"]
    assert made.long_lines == []
    assert max(map(len, lines)) <= letter.WIDTH
    assert made.text.isascii()
    words = " ".join(made.text.split())
    assert (
        "Series good1-3-g1234567, QEMU emulator version 10.0.13, on A Processor (2 CPUs, Linux 6.1)." in words
    )
    assert "kz demo: guests of 2G and 1 CPU, 256 MB allocated. TCG is QEMU's emulation" in words
    assert words.endswith("The series is for Linux 7.3.4.")


def test_without_runs_there_are_gaps_and_no_digits(what: series.Series) -> None:
    made = write(what)
    assert made.runs == []
    assert made.text == (
        "Why.\n\n  task-clock: [no figures: run kz bench all]\n\n  zeroed: [no figures: run kz bench thp]\n\n"
        "The series is for Linux 7.3.4."
    )


def test_kvm_is_not_called_an_emulator(what: series.Series, tmp_path: Path) -> None:
    result(accelerator="kvm").save(tmp_path / "run")
    made = write(what, tmp_path / "run")
    assert "[KVM, n = 5" in made.text
    assert "emulation" not in made.text


def test_a_change_that_may_be_none_is_marked(what: series.Series, tmp_path: Path) -> None:
    noisy = Metric.of("thp.populate.task_clock", "ms", [100, 300, 200, 100, 300], [190, 90, 310, 280, 110])
    result(metrics=[noisy]).save(tmp_path / "run")
    assert re.search(r"~-\d+ %$", write(what, tmp_path / "run").text, re.MULTILINE)


def test_accelerators_are_not_mixed_in_a_table(what: series.Series, tmp_path: Path) -> None:
    result().save(tmp_path / "one")
    surplus = Metric.of("hugetlb.surplus.populate.task_clock", "ms", [3.0], [1.0])
    result("hugetlb", accelerator="kvm", metrics=[surplus]).save(tmp_path / "two")
    with pytest.raises(LabError, match="would mix figures") as caught:
        write(what, tmp_path / "one", tmp_path / "two")
    assert "kvm, tcg" in caught.value.why


def test_the_bench_of_a_metric_goes_before_one_that_has_it_too(what: series.Series, tmp_path: Path) -> None:
    surplus = "hugetlb.surplus.populate.task_clock"
    for name, when, value in (
        ("demo", "2026-11-22", 5.0),
        ("hugetlb", "2026-11-21", 7.0),
        ("hugetlb", "2026-11-20", 9.0),
    ):
        result(name, when, metrics=[Metric.of(surplus, "ms", [10.0], [value])]).save(
            tmp_path / "all" / f"{name}{when}"
        )
    made = write(what, tmp_path / "all")
    assert re.search(r"^  hugetlb, surplus +10\.0 +7\.00 +-30 %$", made.text, re.MULTILINE)


def test_what_is_no_run_is_bad_usage(what: series.Series, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "empty", tmp_path / "nothing"):
        with pytest.raises(UsageError, match="Cannot read the run"):
            write(what, run)


def git(folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org",
    }  # fmt: skip
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_newest_run_of_this_very_series_is_taken(what: series.Series, repo: Path) -> None:
    patch = repo / "linux/patches/0001-x.patch"
    patch.parent.mkdir()
    patch.write_text("one\n")
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "one")
    versions = {"knownzero": git(repo, "rev-parse", "--short", "HEAD"), "qemu": "q"}
    result(versions=versions).save(repo / "out/demo/20261122-100000")
    result(versions=versions).save(repo / "out/demo/20261122-110000")
    result(versions={**versions, "knownzero": "0123abc"}).save(repo / "out/demo/20261122-120000")
    result(versions={**versions, "knownzero": versions["knownzero"] + "-dirty"}).save(
        repo / "out/all/20261122-130000/thp"
    )
    assert write(what).runs == [repo / "out/demo/20261122-110000"]
    assert write(what).stale == []
    # Other files may change; all runs of the very series count, and those of every bench before those of one.
    (repo / "linux/cover-letter.txt").write_text(TEMPLATE + "\nMore.\n")
    result("thp", versions=versions).save(repo / "out/all/20261121-100000/thp")
    assert write(what).runs == [repo / "out/all/20261121-100000"]
    patch.write_text("two\n")
    assert write(what).runs == []
    named = write(what, repo / "out/demo/20261122-110000")
    assert named.stale == [versions["knownzero"]]
    assert f"[the series has changed since {versions['knownzero']}: run kz bench all]" in " ".join(
        named.text.split()
    )


@pytest.mark.parametrize("name", ["linux", "qemu"])
def test_the_letters_of_this_repository_can_be_filled(name: str, tmp_path: Path) -> None:
    """With no run they have gaps for every table; with figures as long as they come, lines are short enough."""
    what = series.get(name)
    source = fetch.identify(name)
    figures = letter.Figures([])
    asked: list[str] = []
    for metric in re.findall(
        r'"(\w+(?:\.\w+)+)"', (what.root / "cover-letter.txt").read_text(encoding="utf-8")
    ):
        assert figures.find(metric) is None
        asked.append(metric)
    units = {
        "bytes": "bytes",
        "instructions": "instructions",
        "time": "ms",
        "cpu": "s",
        "corunner": "steps/s",
        "loss": "pages/s",
    }
    metrics = []
    for metric in asked:
        unit = next((units[end] for end in units if metric.endswith(end)), "ms")
        scale = 1e6 if unit in ("bytes", "steps/s") else 300 if unit == "pages/s" else 1
        made_up = Metric.of(metric, unit, [1111 * scale, 3333 * scale], [1111 * scale, 3333 * scale])
        metrics.append(replace(made_up, change_percent=-99.8, change_interval=(-1.0, 1.0)))
    result(metrics=metrics).save(tmp_path / "run")
    made = letter.write(what, source, [tmp_path / "run"], [])
    assert (made.gaps, made.long_lines) == ([], [])
    assert "{{" not in made.text
    assert "}}" not in made.text
    assert made.text.isascii()
    assert bool(asked) == (name == "linux")
    # No figure of a bench is typed by hand.
    plain = re.sub(
        r"\{\{.*?\}\}", "", (what.root / "cover-letter.txt").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert re.findall(r"\d[\d.,]* (?:%|[MG]iB)", plain) == []
