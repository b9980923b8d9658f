# SPDX-License-Identifier: GPL-2.0
"""The guest programs themselves, run on the machine that builds them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lab.bench.session import cpu_ns
from lab.build.programs import build_programs
from lab.core import run
from lab.core.paths import REPO

# init is not run by hand.
SOURCES = [*(REPO / "guest").glob("*.c"), *(REPO / "tools").glob("*/*.c")]
NAMES = sorted(source.stem for source in SOURCES if source.stem != "init")


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    return build_programs()


def call(programs: dict[str, Path], name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(programs[name]), *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_source_becomes_a_program(programs: dict[str, Path]) -> None:
    assert set(NAMES) <= set(programs)


@pytest.mark.parametrize("name", NAMES)
def test_help_is_there(programs: dict[str, Path], name: str) -> None:
    told = call(programs, name, "--help")
    assert told.returncode == 0
    assert told.stdout.startswith(f"usage: {name}")
    assert "Exit:" in told.stdout


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_option_is_bad_usage(programs: dict[str, Path], name: str) -> None:
    assert call(programs, name, "--no-such-option").returncode == 2


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("alloc_once", ("--size", "0")),
        ("alloc_once", ("--size", "-1")),
        ("alloc_once", ("--size", "12x")),
        ("alloc_once", ("--mode", "often")),
        ("alloc_once", ("--pages", "large")),
        ("alloc_once", ("--pages", "mthp=")),
        ("alloc_once", ("left over",)),
        ("burst", ()),
        ("burst", ("1:0:2",)),
        ("fillfree", ("--share", "101")),
        ("fillfree", ("--byte", "256")),
        ("leak_hunter", ("--kind", "unheard-of")),
        ("leak_hunter", ("--byte", "0")),
        ("leak_hunter", ("--workers", "0")),
        ("refpage_bench", ("--method", "magic")),
        ("refpage_bench", ("--byte", "256")),
        ("refpage_bench", ("--touch", "8192000")),
        ("refpage_fuzz", ("--seconds", "0")),
        ("refpage_fuzz", ("--seed", "-1")),
        ("refpage_fuzz", ("--seed", "18446744073709551617")),
        ("refpage_fuzz", ("--pages", "1x")),
        ("refpage_fuzz", ("--steps",)),
        ("refpage_fuzz", ("--break-model", "everything")),
        ("refpage_fuzz", ("left over",)),
        ("refpage_heap", ("--init", "maybe")),
        ("refpage_heap", ("--used", "101")),
        ("hotpath", ("sideways",)),
        ("hotpath", ("--reps", "1")),
        ("page_fault", ("--tasks", "0")),
        ("page_fault", ("--tasks", "65")),
        ("page_fault", ("--pages", "small")),
        ("page_fault", ("--ms", "0")),
        ("page_fault", ("left over",)),
        ("corunner", ("--ms", "0")),
        ("corunner", ("--size", "1M")),
        ("stall", ("--mode", "sleep")),
        ("stall", ("--ms", "0")),
        ("stall", ("--size", "6")),
        ("stall", ("left over",)),
        ("stress", ()),
        ("stress", ("idleness",)),
        ("flush", ("--signal-after", "0")),
        ("flush", ("1", "2")),
        ("zeropages", ("--interval", "0")),
        ("zeropages", ("--interval", "1.5")),
        ("zeropages", ("--interval", "3601")),
        ("zeropages", ("--count", "0")),
        ("zeropages", ("--count", "many")),
        ("zeropages", ("--once", "--count", "2")),
        ("zeropages", ("--check", "--json")),
        ("zeropages", ("--check", "--interval", "2")),
        ("zeropages", ("--metrics", "--count", "2")),
        ("zeropages", ("left over",)),
    ],
)
def test_bad_input_is_named(
    programs: dict[str, Path], name: str, arguments: tuple[str, ...]
) -> None:
    told = call(programs, name, *arguments)
    assert told.returncode == 2
    assert told.stderr.startswith(f"{name}: ")
    assert told.stdout == ""


def test_zeropages_is_built_and_installed_from_a_clone_with_make(tmp_path: Path) -> None:
    for copied in ("tools/zeropages", "LICENSES"):
        shutil.copytree(REPO / copied, tmp_path / copied)
    folder, to = tmp_path / "tools" / "zeropages", ["PREFIX=/usr", f"DESTDIR={tmp_path / 'to'}"]
    for target in (["check"], ["install", *to], ["uninstall", *to], ["deb", f"OUT={tmp_path}"]):
        done = subprocess.run(
            ["make", "-C", str(folder), *target],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning" not in done.stderr
    assert not [path for path in (tmp_path / "to").rglob("*") if path.is_file()], (
        "left by make uninstall"
    )
    (made,) = tmp_path.glob("*.deb")
    version = subprocess.run(
        [folder / "zeropages", "--version"], capture_output=True, text=True, check=True
    )
    assert made.name.startswith(f"{version.stdout.strip().replace(' ', '_')}_")
    subprocess.run(["dpkg-deb", "-x", made, tmp_path / "to"], check=True)
    unit, manual = (
        "usr/lib/systemd/system/zeropages-check.service",
        "usr/share/man/man1/zeropages.1",
    )
    inside = {
        str(path.relative_to(tmp_path / "to"))
        for path in (tmp_path / "to").rglob("*")
        if path.is_file()
    }
    assert inside == {"usr/bin/zeropages", manual, unit, "usr/share/doc/zeropages/copyright"}
    program = tmp_path / "to/usr/bin/zeropages"
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    page = (folder / "zeropages.1").read_text(encoding="utf-8").replace("\\-", "-")
    options = re.findall(r"^  (--[a-z]+)", told, re.MULTILINE)
    assert len(options) > 3 and all(option in page for option in options)


def test_all_are_static(programs: dict[str, Path]) -> None:
    for path in programs.values():
        headers = run.output(["readelf", "-lW", path], f"cannot read {path}", "install binutils")
        assert "INTERP" not in headers, path


def test_the_fuzzer_needs_the_system_call(programs: dict[str, Path]) -> None:
    told = call(programs, "refpage_fuzz", "--steps", "1")
    if told.returncode == 0:
        pytest.fail("this machine has refpage_create, so this test says nothing here")
    assert told.returncode == 3
    assert "does not have it" in told.stderr


@pytest.mark.parametrize("mode", ["populate", "touch_line", "touch_all", "read_all"])
def test_alloc_once_measures_its_child(programs: dict[str, Path], mode: str) -> None:
    told = call(
        programs,
        "alloc_once",
        "--size",
        "8",
        "--pages",
        "nothp",
        "--mode",
        mode,
        "--verify",
        "--reps",
        "2",
    )
    assert told.returncode == 0, told.stderr
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [line["rep"] for line in lines] == [0, 1]
    for line in lines:
        assert line["mode"] == mode
        assert line["bytes"] == 8 << 20
        assert line["minor_faults"] >= 2048
        # The counter runs from exec to exit; nothing can use more CPU than there was time.
        assert 0 < line["task_clock_ns"] <= line["wall_ns"]
        assert line["vmstat"]["pgfault"] >= 2048


@pytest.mark.parametrize("tasks", [1, 3])
def test_page_fault_counts_pages_and_mappings(programs: dict[str, Path], tasks: int) -> None:
    told = call(
        programs,
        *("page_fault", "--tasks", str(tasks), "--size", "4", "--pages", "nothp"),
        *("--ms", "200", "--skip", "1", "--cycles", "2"),
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["tasks"] == tasks
    assert found["cycles"] >= 2 * tasks
    # The first mapping of each task is no cycle, but its pages count.
    assert found["iterations"] >= (found["cycles"] + tasks) * 1024
    # Each page is a fault of its own.
    assert found["vmstat"]["pgfault"] >= found["iterations"]
    assert found["cycle_wall_ns"] > 0 and found["cycle_cpu_ns"] > 0
    # Never more than the time it took allows: no task is faster than all pages in its 200 ms.
    assert 0 < found["per_second"] <= found["iterations"] / 0.2


def test_page_fault_goes_on_until_there_are_cycles(programs: dict[str, Path]) -> None:
    told = call(
        programs, "page_fault", "--size", "2", "--ms", "1", "--cycles", "3", "--pause-ms", "20"
    )
    found = json.loads(told.stdout)
    assert found["cycles"] >= 3


def test_fillfree_fills_the_given_share(programs: dict[str, Path]) -> None:
    told = call(programs, "fillfree", "--size", "16", "--byte", "7")
    assert told.returncode == 0
    assert json.loads(told.stdout)["filled_bytes"] == 16 << 20


def test_the_hunter_finds_a_planted_byte(programs: dict[str, Path]) -> None:
    told = call(
        programs, "leak_hunter", "--plant", "--seconds", "5", "--dirty", "2", "--workers", "1"
    )
    assert told.returncode == 1
    first, last = (json.loads(line) for line in told.stdout.splitlines())
    assert first["violation"]["value"] == 0x5A
    assert last["violations"] >= 1


def test_the_hunter_names_what_it_skips(programs: dict[str, Path]) -> None:
    told = call(programs, "leak_hunter", "--seconds", "2", "--dirty", "2")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert report["violations"] == 0
    listed = set(call(programs, "leak_hunter", "--list").stdout.split())
    assert set(report["checked_pages"]) | set(report["skipped"]) == listed
    assert not set(report["checked_pages"]) & set(report["skipped"])
    assert all(report["skipped"].values())
    assert report["total_pages"] == sum(report["checked_pages"].values()) > 0


def test_a_kind_that_cannot_run_is_no_success(programs: dict[str, Path]) -> None:
    # No pool of huge pages on the machine that builds: nothing is checked, and that is said.
    told = call(programs, "leak_hunter", "--kind", "hugetlb_1g", "--seconds", "1", "--dirty", "0")
    report = json.loads(told.stdout.splitlines()[0])
    if report["checked_pages"]:
        pytest.fail("this machine has free 1 GiB pages, so this test says nothing here")
    assert told.returncode == 3


@pytest.mark.parametrize("mode", ["spin", "alloc"])
def test_stall_counts_all_of_its_time(programs: dict[str, Path], mode: str) -> None:
    told = call(programs, "stall", "--mode", mode, "--size", "256", "--ms", "300", "--lost", "1")
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert found["mode"] == mode and found["reporting"] is False
    assert found["wall_ns"] >= 300_000_000
    assert found["gaps"] > 0
    assert found["median_ns"] <= found["p99_ns"] <= found["longest_ns"] <= found["wall_ns"]
    assert found["lost_ns"] <= found["wall_ns"]
    # Each step of the second takes more than a microsecond, so all of its time is in such gaps.
    if mode == "alloc":
        assert found["lost_ns"] == found["wall_ns"]


def test_stall_finds_that_it_was_stopped(programs: dict[str, Path]) -> None:
    """For a fifth of a second it gets no CPU at all: one gap is as long as that."""
    with subprocess.Popen(
        [str(programs["stall"]), "--ms", "5000"], stdout=subprocess.PIPE, text=True
    ) as process:
        while cpu_ns(process.pid) < 50_000_000:  # it measures
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.2)
        process.send_signal(signal.SIGCONT)
        told, _ = process.communicate(timeout=120)
    found = json.loads(told)
    assert found["longest_ns"] >= 190_000_000
    assert found["lost_ns"] >= found["longest_ns"]
    assert found["p99_ns"] < found["longest_ns"]


def test_stall_cannot_report_where_there_is_no_parameter(programs: dict[str, Path]) -> None:
    if Path("/sys/kernel/mm/page_reporting/flush").exists():
        pytest.fail("this machine can report, so this test says nothing here")
    told = call(programs, "stall", "--report")
    assert told.returncode == 3
    assert "cannot report" in told.stderr and told.stdout == ""


def test_hotpath_prints_each_path(programs: dict[str, Path]) -> None:
    paths = ("fault", "new_fault", "alloc_free", "fork", "exec")
    told = call(programs, "hotpath", "--reps", "5", *paths)
    assert told.returncode == 0
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert [line["path"] for line in lines] == list(paths)
    assert all(line["n"] == 5 for line in lines)
    assert lines[0]["min"] > 0
