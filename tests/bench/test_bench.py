# SPDX-License-Identifier: GPL-2.0
from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lab.bench import BENCHES, Bench, BenchOptions, jobs, session
from lab.bench.commands import app, checked, folder_for, table
from lab.boot.guest import Guest
from lab.core import paths
from lab.core.errors import FAILED, USAGE, LabError, TestFailure, UsageError
from lab.report.results import Metric, Result, Target, load, load_error

MIB = 1 << 20
COST = session.HostCost(100, 0.05, 0.1)


class FakeGuest:
    """A guest that answers each command with what it was told to."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.pid = os.getpid()
        self.accel = "tcg"
        self.sent: list[str] = []
        self.waiting: list[str] = []

    def send(self, line: str) -> None:
        self.sent.append(line)
        self.waiting += self.answers.get(line, ["@done 0"])

    @property
    def lines(self) -> Iterator[str]:
        while self.waiting:
            yield self.waiting.pop(0)

    def fail_early(self) -> None:
        raise TestFailure("the guest ended", "exit code 9", "look")


def side(name: str = "base", **answers: list[str]) -> session.Side:
    return session.Side(name, cast(Guest, FakeGuest(answers)))


def told(**vmstat: int | None) -> dict[str, Any]:
    counters: dict[str, int | None] = {
        "thp_fault_alloc": 128,
        "pgzeroed_cleared": None,
        "pgzeroed_skip": None,
        "pgzeroed_bad": None,
    }
    return {
        "task_clock_ns": 50_000_000,
        "bytes": 256 * MIB,
        "minor_faults": 166,
        "vmstat": counters | vmstat,
    }


def test_base_counts_folios() -> None:
    runs = jobs.Runs()
    runs.add(side("base"), told(), COST)
    assert runs.zeroed == [256 * MIB + 38 * 4096]
    assert runs.task_clock_ms == [50]
    assert runs.skipped_percent == [0]
    assert runs.host_system_ms == [50]


def test_ours_counts_what_the_kernel_says() -> None:
    runs = jobs.Runs()
    runs.add(side("ours"), told(pgzeroed_cleared=151, pgzeroed_skip=65536, pgzeroed_bad=0), COST)
    assert runs.zeroed == [151 * 4096]
    assert runs.skipped_percent == [100]


def test_ours_without_counters_is_no_result() -> None:
    with pytest.raises(TestFailure, match="Cannot count"):
        jobs.Runs().add(side("ours"), told(), COST)


def test_a_bad_page_ends_the_bench() -> None:
    with pytest.raises(TestFailure, match="was not"):
        jobs.Runs().add(side("ours"), told(pgzeroed_cleared=1, pgzeroed_bad=1), COST)


def test_a_job_without_huge_pages_is_no_result() -> None:
    phase = jobs.Phase()
    for runs in (phase.base, phase.ours):
        runs.huge_pages += [128, 128]
    jobs.check_huge(phase, BenchOptions())
    phase.ours.huge_pages[:] = [3, 3]
    with pytest.raises(TestFailure, match="huge pages"):
        jobs.check_huge(phase, BenchOptions())


def test_a_step_returns_its_lines() -> None:
    assert side(x=["one", "two", "@done 0"]).sh("x") == ["one", "two"]


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(TestFailure) as caught:
        side(x=["no such thing", "@done 3"]).sh("x")
    assert "exit code 3" in caught.value.why and "no such thing" in caught.value.why
    assert side(x=["@done 3"]).sh("x", check=False) == []


def test_a_guest_that_ends_is_named() -> None:
    with pytest.raises(TestFailure, match="ended in the middle") as caught:
        side(x=["half"]).sh("x")
    assert "half" in caught.value.why and "exit code 9" in caught.value.why


@pytest.mark.parametrize("lines", [[], ["not json"], ["[1]"]])
def test_a_program_that_says_nothing_is_named(lines: list[str]) -> None:
    with pytest.raises(TestFailure, match="guest program"):
        side(x=[*lines, "@done 0"]).json("x")


def test_the_other_side_goes_first_by_turns() -> None:
    both = session.Pair(side("base"), side("ours"), "tcg", session.Built(paths.REPO, "base", "off"))
    assert [s.name for s in both.sides(0)] == ["base", "ours"]
    assert [s.name for s in both.sides(1)] == ["ours", "base"]
    # Warm-ups have negative numbers.
    assert [s.name for s in both.sides(-1)] == ["ours", "base"]


def test_a_quiet_process_settles() -> None:
    assert session.settle_resident(os.getpid(), timeout=5, what="this", still_s=0.1) > MIB


def test_warming_gives_the_memory_back() -> None:
    before = session.resident(os.getpid())
    session.warm_host(64 * MIB)
    assert session.resident(os.getpid()) < before + 16 * MIB


def options(**more: Any) -> BenchOptions:
    plain: dict[str, Any] = {
        "pairs": 10,
        "size": 256,
        "memory": "2G",
        "accel": "auto",
        "base": "base",
        "ours": "knownzero",
    }
    return checked(**(plain | more))


@pytest.mark.parametrize(
    "more", [{"accel": "xen"}, {"memory": "much"}, {"memory": "600M"}, {"size": 1800}, {"memory": "2"}]
)
def test_options_that_cannot_work_are_bad_usage(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        options(**more)
    assert caught.value.code == USAGE and caught.value.fix


def test_what_reproduces_a_run_can_be_parsed_again() -> None:
    made = options(pairs=12, memory="4096M", size=512, accel="tcg", ours="off")
    argv = shlex.split(session.reproduce("thp", made, "tcg"))
    assert argv[:3] == ["./kz", "bench", "thp"]
    given = dict(zip(argv[3::2], argv[4::2], strict=True))
    assert given == {
        "--pairs": "12",
        "--size": "512",
        "--accel": "tcg",
        "--memory": "4096M",
        "--ours": "off",
    }


def test_an_unknown_bench_is_bad_usage() -> None:
    told = CliRunner().invoke(app, ["bench", "speed"])
    assert isinstance(told.exception, LabError)
    assert told.exception.code == USAGE
    assert all(name in told.exception.fix for name in BENCHES)


def test_help_names_every_bench() -> None:
    shown = CliRunner().invoke(app, ["bench", "--help"]).stdout
    assert all(name in shown for name in BENCHES)


def test_the_table_marks_a_missed_target() -> None:
    result = Result(
        name="demo",
        accelerator="tcg",
        versions={},
        reproduce="",
        metrics=[Metric.of("a.b", "ms", [2.0], [1.0], target=Target("at least 78 % less", False))],
    )
    cells = [cell for column in table(result).columns for cell in column.cells]
    assert any("NO" in str(cell) for cell in cells)


def test_two_runs_never_share_a_folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.core.paths.out", lambda: tmp_path)
    first = folder_for("demo")
    first.mkdir(parents=True)
    assert folder_for("demo") != first


def small(name: str) -> Result:
    return Result(name, "tcg", {}, f"./kz bench {name}", [Metric.of(f"{name}.x", "ms", [2.0], [1.0])])


def test_all_benches_make_one_page(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "run", lambda self, options: small(self.name))
    told = CliRunner().invoke(app, ["bench", "all", "--output", str(tmp_path / "here")])
    assert told.exit_code == 0, told.output
    for name in BENCHES:
        assert load(tmp_path / "here" / name).name == name
        assert f"<code>{name}" in (tmp_path / "here" / name / "report.html").read_text()
    page = (tmp_path / "here" / "report.md").read_text()
    assert [line.split()[1] for line in page.splitlines() if line.startswith("## ")] == list(BENCHES)
    assert told.stdout.splitlines()[-1] == str(tmp_path / "here")


def with_targets(name: str, **met: bool) -> Result:
    metrics = [
        Metric.of(f"{name}.{what}", "ms", [2.0], [1.0], target=Target(f"{what}, less", so))
        for what, so in met.items()
    ]
    return Result(name, "tcg", {}, f"./kz bench {name}", metrics)


@pytest.mark.parametrize("verb", [["demo"], ["bench", "order0"], ["bench", "all"]], ids=" ".join)
def test_a_missed_target_is_an_error_only_when_asked(
    verb: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "run", lambda self, options: with_targets(self.name, fine=True, bad=False))
    monkeypatch.setattr("lab.core.paths.out", lambda: tmp_path)
    assert CliRunner().invoke(app, verb).exit_code == 0
    folder = tmp_path / "here"
    told = CliRunner().invoke(app, [*verb, "--strict", "--output", str(folder)])
    assert isinstance(told.exception, TestFailure)
    assert told.exception.code == FAILED
    names = {"demo": ["thp"], "order0": ["order0"], "all": list(BENCHES)}[verb[-1]]
    lines = told.exception.why.splitlines()
    assert [line.split()[1] for line in lines] == [f"{name}.bad" for name in names]
    assert all("bad, less" in line for line in lines)
    assert told.exception.what.startswith(f"{len(names)} target")
    # All is kept, and said, all the same.
    assert told.stdout.splitlines()[-1] == str(folder)
    assert (folder / "report.html").is_file() and str(folder) in told.exception.fix


@pytest.mark.parametrize("verb", [["demo"], ["bench", "order0"], ["bench", "all"]], ids=" ".join)
def test_targets_that_are_met_are_no_error(
    verb: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "run", lambda self, options: with_targets(self.name, fine=True))
    told = CliRunner().invoke(app, [*verb, "--strict", "--output", str(tmp_path / "here")])
    assert told.exit_code == 0, told.output


def test_a_bench_that_fails_does_not_stop_the_others(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(bench: Bench, options: BenchOptions) -> Result:
        del options
        if bench.name in ("order0", "churn"):
            raise TestFailure(f"{bench.name} broke", "so it is", "mend it")
        return small(bench.name)

    monkeypatch.setattr("lab.core.paths.out", lambda: tmp_path)
    monkeypatch.setattr(Bench, "run", run)
    told = CliRunner().invoke(app, ["bench", "all"])
    assert isinstance(told.exception, TestFailure) and "order0" in told.exception.what
    (folder,) = (tmp_path / "all").iterdir()
    results = {file.parent.name for file in folder.glob("*/result.json")}
    assert results == {*BENCHES} - {"order0", "churn"}
    assert (folder / "report.html").is_file()
    # Each of the two says why, until it has a result.
    assert {file.parent.name for file in folder.glob("*/error.json")} == {"order0", "churn"}
    why = load_error(folder / "churn")
    assert why is not None and (why.what, why.why, why.code) == ("churn broke", "so it is", 1)
    small("churn").save(folder / "churn")
    assert load_error(folder / "churn") is None
    (folder / "order0" / "error.json").write_text("[]")
    with pytest.raises(LabError, match="Cannot read"):
        load_error(folder / "order0")
