# SPDX-License-Identifier: GPL-2.0
"""The demo: what it prints, what it builds, and when that begins."""

import importlib.util
import re
import subprocess
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from lab.bench import demo as demos
from lab.bench.jobs import NO_SOURCE, zeroed_bytes
from lab.bench.session import PAGE, Wanted
from lab.boot import ahead
from lab.core.errors import LabError
from lab.core.paths import REPO
from lab.machine import tools
from lab.report import summary
from lab.report.observations import BASE, OURS, Observation, metrics, observe
from lab.report.page import html
from lab.report.results import Result
from tests.bench.fakes import run_of

MIB = 1 << 20
STATISTICS = re.compile(r"\bp [=<]|interval|percentile|median|\bfloor [\d+]|decided|too few|n =")


def demo(accelerator: str = "tcg") -> Result:
    clocks = ["task_clock"] + ["cold_and_warm"] * (accelerator == "pvm")
    ms, big, small = {BASE: [100.0, 101.0, 102.0], OURS: [10.0, 11.0, 12.0]}, 256.0 * MIB, 1.0 * MIB
    found: list[Observation] = []
    for bench, mode in (name.split(".") for name in summary.JOBS):
        of = {"mode": mode, "size_mb": "256"}
        for clock in clocks:
            found += observe(f"{bench}.{{mode}}.{clock}", ms, accelerator, of)
        sides = {BASE: [big], OURS: [small]}
        found += observe(f"{bench}.{{mode}}.guest_zeroed_bytes", sides, accelerator, of)
    found += observe(summary.LEFT, {BASE: [big], OURS: [big]}, accelerator, {})
    made = Result("demo", accelerator, {}, "./kz demo", metrics(found), {"size_mb": 256})
    made.sides = list(summary.SIDES)
    return made


def test_ten_lines_and_no_statistics() -> None:
    printed = summary.lines(demo())
    rows = summary.rows(demo())
    # Beside these are the report's place and what to try next.
    assert len(rows) == 8 and len(printed) == 11 and all(len(line) <= 100 for line in printed)
    assert not [line for line in printed if STATISTICS.search(line)]
    assert "256 MiB" in printed[4] and "1.00 MiB" in printed[4] and "-99.6 %" in printed[4]
    # Quoted from what is published, whatever was measured here.
    assert [row.job for row in rows if row.job.startswith("cost")] == [*summary.COSTS.values()]
    assert "TCG" in printed[-1]


def test_bytes_of_a_guest_without_a_source() -> None:
    """Its counter stays at zero, while it zeroes each page: that is no figure."""
    counted = {"pgzeroed_bad": 0, "pgzeroed_cleared": 0, "thp_fault_alloc": 128}
    answer = {"vmstat": counted, "minor_faults": 130, "bytes": 256 * MIB}
    assert zeroed_bytes(answer, NO_SOURCE) == 256 * MIB + 2 * PAGE
    assert zeroed_bytes(answer, "ours") == 0.0

    class Asked(Exception):
        """The kernels of the sides."""

    def guests(wanted: list[Wanted]) -> NoReturn:
        raise Asked({one.name: one.kernel for one in wanted})

    run = run_of("thp")
    run.guests = guests  # type: ignore[method-assign,assignment]
    with pytest.raises(Asked) as asked:
        demos.measure(run)
    assert asked.value.args == ({"base": NO_SOURCE, "ours": "ours"},)


def test_natively_a_row_is_the_sum_of_two_runs() -> None:
    """Under kvm_pvm, what a guest saves in one run comes back in the next user of the page."""
    made = demo("pvm")
    assert all(name.endswith("cold_and_warm") for name in _clocks(made))
    assert all(name.endswith("task_clock") for name in _clocks(demo()))
    assert "without nested paging" in summary.lines(made)[-1]


def _clocks(result: Result) -> list[str]:
    return [one.name for _, one in summary.found(result) if one.unit == "ms"]


def test_the_report_opens_with_the_same_table() -> None:
    page = html([demo()])
    top = page[: page.index("<h2>")]
    for row in summary.rows(demo()):
        assert row.job in top
    assert "<svg" in top and not STATISTICS.search(
        re.sub("<title>.*?</title>", "", top, flags=re.S)
    )


class TestBuilds:
    """Everything that the demo needs, side by side."""

    def test_without_rust_it_builds_qemu_and_says_so(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert {"stock QEMU"} < set(ahead.first()) and set(ahead.then()) == {"kernel", "daemon"}
        assert not capsys.readouterr().err
        monkeypatch.setattr(tools, "has", lambda check: not check.startswith("cargo"))
        monkeypatch.setattr(tools, "candidates", lambda packages: {"cargo": "1.63.0"})
        assert "stock QEMU" not in ahead.first() and set(ahead.then()) == {"kernel", "QEMU"}
        assert "no Rust from 1.88 on" in (text := capsys.readouterr().err)
        assert "the lab's QEMU is built instead" in text

    def test_the_first_error_ends_the_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails() -> None:
            _until(tmp_path / "begun")
            raise LabError("the daemon does not build", "a reason", "a fix")

        def long() -> None:
            (tmp_path / "begun").touch()
            try:
                time.sleep(600)
            finally:
                (tmp_path / "ended").touch()

        monkeypatch.setattr(ahead, "first", lambda: {"kernel": long, "daemon": fails})
        monkeypatch.setattr(ahead, "then", lambda arch: {})
        monkeypatch.setattr(tools, "need", lambda what: None)
        with pytest.raises(LabError, match="the daemon does not build"):
            ahead.run()
        assert (tmp_path / "ended").exists()

    def test_they_begin_before_the_environment_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[str] = []
        kz = bootstrap()
        monkeypatch.setattr(kz, "cache_dir", lambda: str(tmp_path))
        monkeypatch.setattr(kz.subprocess, "Popen", lambda argv, **more: done.append(argv[3]))
        monkeypatch.setattr(kz, "make_environment", lambda *more: done.append("environment"))
        monkeypatch.setattr(kz.os, "execve", lambda *more: done.append("lab"))
        for verb, first in (("demo", ["lab.boot.ahead"]), ("doctor", []), ("demo -h", [])):
            monkeypatch.setattr(kz.sys, "argv", ["kz", *verb.split()])
            done.clear()
            kz.main()
            assert done == [*first, "environment", "lab"]

    def test_they_need_no_package_of_the_environment(self) -> None:
        code = "import lab.boot.ahead, sys; print(*sys.modules)"
        argv = ["/usr/bin/python3", "-I", "-S", "-c", f"import sys; sys.path[:0] = ['.']; {code}"]
        done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True)
        assert not {"rich", "typer", "jinja2", "scipy"} & set(done.stdout.split())


def bootstrap() -> ModuleType:
    """kz as a module."""
    loader = SourceFileLoader("kz_demo", str(REPO / "kz"))
    spec = importlib.util.spec_from_loader("kz_demo", loader)
    assert spec
    kz = importlib.util.module_from_spec(spec)
    loader.exec_module(kz)
    return kz


def _until(file: Path, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < deadline, file
        time.sleep(0.01)
