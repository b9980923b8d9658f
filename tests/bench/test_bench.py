# SPDX-License-Identifier: GPL-2.0
"""The runner, the steps in a guest, the values of the job, and the verbs of the benches."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from lab.bench import commands, jobs, page_fault, runner, session
from lab.bench.commands import app
from lab.bench.demo import DEMO
from lab.bench.plan import FLAGS, MEMORY, PAIRS, SIZE, BenchOptions, Images, Plan, plan
from lab.bench.repeat import Values
from lab.bench.table import BENCHES
from lab.boot.guest import Guest
from lab.boot.verdict import EmulatorFault
from lab.core.errors import FAILED, USAGE, TestFailure, UsageError
from lab.report.compare import unlike
from lab.report.results import Metric, Result, Target
from tests.bench import fakes
from tests.bench.fakes import IMAGES, run_of

MIB = 1 << 20


class FakeGuest:
    """A guest with a fixed answer to each command."""

    def __init__(self, answers: dict[str, list[str]]) -> None:
        self.answers = answers
        self.pid = os.getpid()
        self.waiting: list[str] = []

    def send(self, line: str) -> None:
        self.waiting += self.answers.get(line, ["@done 0"])

    @property
    def lines(self) -> Iterator[str]:
        while self.waiting:
            yield self.waiting.pop(0)

    def fail_early(self) -> None:
        raise TestFailure("the guest ended", "exit code 9", "look")


def side(name: str = "base", **answers: list[str]) -> session.Side:
    return session.Side(name, cast(Guest, FakeGuest(answers)))


def answer(**vmstat: int | None) -> dict[str, Any]:
    counters: dict[str, int | None] = {
        "thp_fault_alloc": 128,
        "pgzeroed_cleared": None,
        "pgzeroed_skip": None,
        "pgzeroed_bad": None,
    }
    job = {"task_clock_ns": 50_000_000, "bytes": 256 * MIB, "minor_faults": 166}
    return {**job, "vmstat": counters | vmstat}


def test_base_counts_folios() -> None:
    found = jobs.values(answer(), "base")
    assert found["guest_zeroed_bytes"] == 256 * MIB + 38 * 4096
    assert (found["task_clock"], found["skipped_percent"]) == (50, 0)


def test_ours_has_counters_of_the_kernel() -> None:
    counted = answer(pgzeroed_cleared=151, pgzeroed_skip=65536, pgzeroed_bad=0)
    found = jobs.values(counted, "ours")
    assert (found["guest_zeroed_bytes"], found["skipped_percent"]) == (151 * 4096, 100)
    with pytest.raises(TestFailure, match="Cannot count"):
        jobs.values(answer(), "ours")
    with pytest.raises(TestFailure, match="was not"):
        jobs.values(answer(pgzeroed_cleared=1, pgzeroed_bad=1), "ours")


def test_a_job_without_huge_pages_is_no_result() -> None:
    found = Values()
    for name in ("base", "ours"):
        found[name, "huge_pages"] += [128, 128]
    jobs.check_huge(run_of(), found)
    for name in ("ours", "floor"):
        few = Values()
        few.update(found)
        few[name, "huge_pages"] = [3.0, 3.0]
        with pytest.raises(TestFailure, match="huge pages"):
            jobs.check_huge(run_of(), few)


def test_page_faults_without_huge_pages_are_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_fault, "warm_host", lambda size: None)
    answer = {"iterations": 51200, "per_second": 1000.0, "vmstat": {"thp_fault_alloc": 3}}
    with pytest.raises(TestFailure, match="huge pages"):
        page_fault.rate(fakes.side("off", lambda *argv: answer), "thp", 1)


def test_a_step_returns_its_lines_or_fails() -> None:
    assert side(x=["one", "two", "@done 0"]).sh("x") == ["one", "two"]
    with pytest.raises(TestFailure) as caught:
        side(x=["no such thing", "@done 3"]).sh("x")
    assert "exit code 3" in caught.value.why and "no such thing" in caught.value.why
    assert side(x=["@done 3"]).sh("x", check=False) == []
    with pytest.raises(TestFailure, match="ended in the middle") as caught:
        side(x=["half"]).sh("x")
    assert "half" in caught.value.why and "exit code 9" in caught.value.why


def test_a_guest_ended_by_the_emulator_raises_emulator_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only such a test is repeated."""

    def fail_early(self: FakeGuest) -> None:
        raise EmulatorFault("an emulated CPU ran code that had been replaced", "a breakpoint", "")

    monkeypatch.setattr(FakeGuest, "fail_early", fail_early)
    with pytest.raises(EmulatorFault, match="ended in the middle") as caught:
        side(x=["half"]).sh("x")
    assert "an emulated CPU" in caught.value.why


@pytest.mark.parametrize("lines", [[], ["not json"], ["[1]"]])
def test_a_program_without_an_object_is_named(lines: list[str]) -> None:
    with pytest.raises(TestFailure, match="guest program"):
        side(x=[*lines, "@done 0"]).json("x")


def test_a_process_settles_only_when_it_stops_growing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([10 * MIB, 30 * MIB, 50 * MIB])
    monkeypatch.setattr(session, "resident", lambda pid: next(sizes, 70 * MIB))
    assert session.settle_resident(1, timeout=5, what="this", still_s=0.02) == 70 * MIB
    grows = iter(range(0, 1 << 40, 2 * MIB))
    monkeypatch.setattr(session, "resident", lambda pid: next(grows))
    with pytest.raises(TestFailure, match="does not settle"):
        session.settle_resident(1, timeout=0.1, what="this", still_s=0.02)


@pytest.mark.parametrize(
    "more",
    [
        {"accel": "xen"},
        {"memory": "much"},
        {"memory": "600M"},
        {"size_mb": 1800},
        {"memory": "2"},
        {"ours": "/none"},
        {"only": "emacs"},
        {"defaults": "ubuntu"},
    ],
)
def test_options_that_cannot_work_are_bad_usage(more: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        plan(BENCHES["thp"], BenchOptions(**more))
    assert caught.value.code == USAGE and caught.value.fix


def test_an_option_without_effect_is_refused() -> None:
    """And is not in the command that repeats a run."""
    values: dict[str, Any] = {SIZE: 128, MEMORY: "4G", PAIRS: 3}
    for bench in BENCHES.values():
        command = shlex.split(plan(bench, BenchOptions()).reproduce(BenchOptions(), "tcg"))
        for name in bench.fixed:
            with pytest.raises(UsageError, match=FLAGS[name]):
                plan(bench, BenchOptions(**{name: values[name]}))
            assert FLAGS[name] not in command
    assert BENCHES["fleet"].fixed == (SIZE, MEMORY, PAIRS) and BENCHES["thp"].fixed == ()


def test_a_plan_names_each_kernel_before_one_is_built() -> None:
    variants = {
        name: {
            side: (kernel.named, kernel.arch, kernel.config)
            for side, kernel in plan(BENCHES[name], BenchOptions(ours="off")).kernels.items()
        }
        for name in ("thp", "refpage", "both-ends", "programs")
    }
    base, ours = ("base", "x86_64", ""), ("off", "x86_64", "")
    assert variants["thp"] == {"base": base, "ours": ours, "floor": ("floor", "x86_64", "")}
    assert variants["refpage"] == {"base": ours, "ours": ours}
    assert variants["both-ends"]["outer_ours"] == ("knownzero", "x86_64", "kvm")
    assert variants["programs"]["base"] == ("base", "x86_64", "programs")


def test_the_result_is_made_of_the_plan_and_the_run() -> None:
    given = BenchOptions(pairs=12, memory="4096M", size_mb=512, ours="off")
    run = run_of("thp", **{name: getattr(given, name) for name in ("pairs", "memory", "size_mb")})
    run.accel = "kvm"
    run.add("prezero.gib_cpu", ([2.0], [1.0]))
    run.note("One.", "One.")
    result = runner.result(plan(BENCHES["thp"], given), replace(run, options=given), 1.0)
    assert (result.accelerator, result.notes, len(result.metrics)) == ("kvm", ["One."], 1)
    assert result.job == {"size_mb": 512, "memory": "4096M", "cpus": 1, "pairs": 12}
    assert result.versions["image_floor"] == "floor"
    argv = shlex.split(result.reproduce)
    assert argv[:3] == ["./kz", "bench", "thp"]
    assert dict(zip(argv[3::2], argv[4::2], strict=True)) == {
        "--pairs": "12",
        "--size": "512",
        "--accel": "kvm",
        "--memory": "4096M",
        "--ours": "off",
    }


def test_four_benches_have_debians_defaults() -> None:
    taken, options = set(), BenchOptions(defaults="debian")
    for name, bench in BENCHES.items():
        try:
            assert plan(bench, options).name("tcg") == f"{name}-debian"
        except UsageError as error:
            assert f"{name} has settings of its own" in error.why and error.fix
            continue
        taken.add(name)
    assert taken == {"thp", "page-fault", "fleet", "programs"}
    wanted = plan(BENCHES["thp"], options)
    assert wanted.reproduce(options, "tcg").endswith(" --accel tcg --defaults debian")


def test_another_linux_has_no_floor() -> None:
    options = BenchOptions(linux="6.12")
    wanted = plan(BENCHES["thp"], options)
    assert wanted.name("tcg") == "thp-6-12" and set(wanted.kernels) == {"base", "ours"}
    assert wanted.reproduce(options, "tcg") == (
        "./kz bench thp --pairs 10 --size 256 --accel tcg --linux 6.12"
    )
    for name, accel, why in (("prezero", "auto", "lacks"), ("thp", "pvm", "newest kernel")):
        with pytest.raises(UsageError, match=why):
            plan(BENCHES[name], replace(options, accel=accel))


def test_debians_defaults_are_on_the_command_line() -> None:
    run = run_of("thp", defaults="debian")
    for kernel in ("base", "ours", "off"):
        assert run.spec(kernel).append == "init_on_alloc=1"
        assert run.spec(kernel, append="a=1").append == "init_on_alloc=1 a=1"
    # A floor that zeroes what is allocated is none.
    assert "init_on_alloc" not in run.spec("floor").append
    assert run_of("thp").spec("base").append == ""
    run.accel = "tcg"
    result = runner.result(plan(BENCHES["thp"], run.options), run, 1.0)
    assert result.job["defaults"] == "debian" and runner.DEBIAN_NOTE in result.notes
    other = runner.result(
        plan(BENCHES["thp"], BenchOptions()), replace(run_of("thp"), accel="tcg"), 1
    )
    assert unlike(result, other) and not unlike(other, other)


def test_a_run_has_the_name_of_its_verb() -> None:
    demo = plan(DEMO, BenchOptions(pairs=6), ("demo",))
    assert demo.name("tcg") == "demo"
    assert demo.reproduce(demo.options, "tcg") == "./kz demo --pairs 6 --accel tcg"
    thp = plan(BENCHES["thp"], BenchOptions())
    # By what it ran on: with --accel auto, that is known at the end.
    names = {"tcg": "thp", "kvm": "thp-kvm", "pvm": "thp-native"}
    assert {accel: thp.name(accel) for accel in names} == names


def result_of(name: str, **met: bool) -> Result:
    targets: dict[str, Target | None] = {
        what: Target(f"{what}, less", so) for what, so in met.items()
    }
    metrics = [
        Metric.of(f"{name}.{what}", "ms", [2.0], [1.0], target=target)
        for what, target in (targets or {"x": None}).items()
    ]
    return Result(name, "tcg", {}, f"./kz bench {name}", metrics)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Stands for builds and guests: the targets of the result, and whether they are met."""
    found: dict[str, bool] = {}

    def measure(wanted: Plan, images: Images, keep: object) -> Result:
        del images, keep
        return result_of(wanted.name("tcg"), **found)

    monkeypatch.setattr(commands, "build", lambda plan: IMAGES)
    monkeypatch.setattr(commands, "measure", measure)
    monkeypatch.setattr("lab.core.paths.out", lambda: tmp_path)
    return found


def test_a_missed_target_is_an_error_only_when_asked(
    tmp_path: Path, measured: dict[str, bool]
) -> None:
    verb = ["bench", "order0"]
    measured |= {"fine": True, "bad": False}
    assert CliRunner().invoke(app, verb).exit_code == 0
    folder = tmp_path / "here"
    strict = [*verb, "--strict", "--output", str(folder)]
    done = CliRunner().invoke(app, strict)
    assert isinstance(done.exception, TestFailure)
    assert done.exception.code == FAILED
    (line,) = done.exception.why.splitlines()
    assert line.startswith("order0:") and "bad, less" in line
    assert done.exception.what.startswith("1 target")
    # The result is written and printed all the same.
    assert done.stdout.splitlines()[-1] == str(folder)
    assert (folder / "report.html").is_file() and str(folder) in done.exception.fix
    measured["bad"] = True
    assert CliRunner().invoke(app, strict).exit_code == 0
