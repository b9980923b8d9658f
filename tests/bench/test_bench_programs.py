# SPDX-License-Identifier: GPL-2.0
"""The bench of real programs, without a guest.

Its scripts, its disk, its figures, and outputs that differ.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from lab.bench import plan, plugin, programs
from lab.bench.kzeropaged import ON
from lab.bench.plan import BenchOptions
from lab.bench.programs import PROGRAMS
from lab.bench.runner import Run
from lab.bench.session import Side, Wanted
from lab.bench.table import BENCHES
from lab.build import linux as build
from lab.core.errors import LabError, TestFailure, UsageError
from lab.core.run import Argv
from lab.machine import apt, debs, tools
from lab.report.groups import groups
from lab.report.results import Result
from tests.bench.fakes import FakeSide, by_name, run_of

NAMES = {
    "chromium",
    "container",
    "gcc",
    "java",
    "java-touched",
    "microvm",
    "numpy",
    "postgres",
    "redis",
    "rust",
    "sqlite",
}


def test_each_program_is_a_script() -> None:
    assert set(programs.NAMES) == NAMES == set(BENCHES["programs"].parts)
    for name in programs.NAMES:
        file = PROGRAMS / f"{name}.sh"
        subprocess.run(["sh", "-n", file], check=True)
        head = file.read_text(encoding="utf-8").splitlines()[:4]
        assert head[0] == "#!/bin/sh" and head[1] == "# SPDX-License-Identifier: GPL-2.0"
        assert re.fullmatch(r"# .{8,52}", head[2]) and ":" not in head[2]
        assert re.fullmatch(r"# packages:( [a-z0-9.+-]+)+", head[3])
    for other in (PROGRAMS / "setup", programs.MAKER):
        subprocess.run(["sh", "-n", other], check=True)


def test_the_kernels_have_what_the_programs_need() -> None:
    assert BENCHES["programs"].config in build.configurations()
    wanted = build.requested(build.fragments("base", "x86_64", BENCHES["programs"].config))
    for option in (
        "EXT4_FS",
        "UNIX",
        "NET_NS",
        "SECCOMP_FILTER",
        "KVM_AMD",
        "TRANSPARENT_HUGEPAGE",
    ):
        assert wanted[f"CONFIG_{option}"] == "y"


# The disk.


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that make disks; nothing is downloaded."""
    asked: list[list[str]] = []

    def logged(argv: list[Any], *_: Any, **more: Any) -> None:
        asked.append([str(word) for word in argv])
        Path(argv[5]).write_text("a disk", encoding="utf-8")

    monkeypatch.setenv("KNOWNZERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(programs, "logged", logged)
    monkeypatch.setattr(tools, "need", lambda *_: None)
    monkeypatch.setattr(debs, "unpacked", lambda name: tmp_path / name)
    monkeypatch.setattr(apt, "codename", lambda: "bookworm")
    monkeypatch.setattr(apt, "mirrors", lambda *_: ["https://mirror.example/debian"])
    return asked


def test_a_disk_is_made_once(made: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    first = programs.disk()
    assert programs.disk() == first and first.read_text(encoding="utf-8") == "a disk"
    (argv,) = made
    assert argv[:2] == ["sh", str(programs.MAKER)] and argv[3] == "bookworm"
    assert {Path(word).stem for word in argv[6:]} == NAMES
    monkeypatch.setattr(apt, "codename", lambda: "trixie")
    assert programs.disk() != first and len(made) == 2


def maker(folder: Path, tool: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the script that makes a disk, with another mmdebstrap."""
    program = folder / "unpacked" / "usr" / "bin" / "mmdebstrap"
    program.parent.mkdir(parents=True)
    program.write_text(tool, encoding="utf-8")
    script = PROGRAMS / "sqlite.sh"
    argv: Argv = [
        "sh",
        programs.MAKER,
        folder / "unpacked",
        "bookworm",
        "sources",
        folder / "disk",
        script,
        PROGRAMS / "gcc.sh",
    ]
    return subprocess.run(
        argv, capture_output=True, text=True, check=False, env={**os.environ, **more}
    )


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    done = maker(tmp_path, 'print STDERR "E: Unable to locate package sqlite3 (@ARGV)\\n"; exit 1')
    assert done.returncode and "Unable to locate package sqlite3" in done.stderr
    # Packages of all scripts, each once.
    assert "--include=gcc,libc6-dev,libstb-dev,sqlite3 " in done.stderr
    assert not (tmp_path / "disk").exists() and {one.name for one in tmp_path.iterdir()} == {
        "unpacked"
    }


def test_a_full_disk_is_an_error_before_anything_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "df").write_text("#!/bin/sh\necho Avail\necho 3\n", encoding="utf-8")
    (tmp_path / "df").chmod(0o755)
    done = maker(tmp_path, "die", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert f"error: 3 GB are free in {tmp_path}, 10 GB are needed: free some space" in done.stdout


def test_the_disk_comes_before_the_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    def disk() -> Path:
        raise LabError("installing the programs in a Debian fails", "no such package", "install it")

    wanted = plan.plan(BENCHES["programs"], BenchOptions())
    wanted = replace(wanted, bench=replace(wanted.bench, disk=disk))
    monkeypatch.setattr(build, "build_linux", lambda *_: pytest.fail("it built something"))
    monkeypatch.setattr(plan, "available_gb", lambda: 16.0)
    with pytest.raises(LabError, match="installing the programs"):
        plan.build(wanted)
    with pytest.raises(UsageError, match="Bad --only: gcc,microvm"):
        plan.plan(BENCHES["programs"], BenchOptions(only="gcc,microvm", accel="pvm"))
    for bench, given in (("programs", "redis,emacs"), ("thp", "redis")):
        with pytest.raises(UsageError, match="Bad --only") as error:
            plan.plan(BENCHES[bench], BenchOptions(only=given))
        assert ("emacs" in error.value.why) is (bench == "programs") and error.value.fix
    monkeypatch.setattr(plan, "available_gb", lambda: 3.0)
    with pytest.raises(LabError, match="Cannot run the bench programs"):
        plan.build(wanted)


# The figures.


class Guest(FakeSide):
    """A guest in which each run of a program zeroes ``zeroed`` bytes; ``says`` is its output."""

    def __init__(self, name: str, zeroed: int, says: str = "the sum") -> None:
        super().__init__(name)
        self.zeroed, self.says, self.ran, self.append = zeroed, says, list[str](), ""
        self.counts = Path()

    def sh(self, command: str) -> list[str]:
        if not (found := re.search(r"chroot /debian .*/programs/(.+)\.sh", command)):
            return super().sh(command)[:0]
        self.ran.append(found[1])
        self.counts.write_bytes(
            struct.pack("=QQ", len(self.ran) * self.zeroed, len(self.ran) * 1000)
        )
        return [self.says]

    def vmstat(self) -> dict[str, int]:
        return {"pgfault": 70 * len(self.ran)}


def measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    only: str,
    says: str = "the sum",
    **options: Any,
) -> tuple[Run, dict[str, Guest]]:
    """A run of the bench, and its guests by name; ``says``: what the one with kzeropaged prints."""
    found = {"base": Guest("base", 4096), "ours": Guest("ours", 1024)}
    found["kzeropaged"] = Guest("kzeropaged", 512, says)
    rests: list[float] = []

    @contextmanager
    def guests(self: Run, specs: list[Wanted]) -> Iterator[list[Side]]:
        assert [(one.name, one.kernel) for one in specs] == [
            ("base", "base"),
            ("ours", "ours"),
            ("kzeropaged", "ours"),
        ]
        for one in specs:
            guest, extra = found[one.name], one.spec.extra_qemu
            guest.append = one.spec.append
            assert "file=a,,disk" in extra[1]
            assert ("-plugin" in extra) is not run.native
            guest.counts = tmp_path / "unused"
            if not run.native:
                guest.counts = Path(extra[-1].partition(",out=")[2])
            guest.counts.write_bytes(bytes(16))
        yield [cast(Side, guest) for guest in found.values()]

    run = run_of("programs", only=only, **options)
    monkeypatch.setattr(Run, "guests", guests)
    run.images = replace(run.images, disk=Path("a,disk"))
    monkeypatch.setattr(programs, "settle_both", lambda sides: None)
    monkeypatch.setattr("time.sleep", rests.append)
    monkeypatch.setattr(programs, "cpu_ns", lambda _: 10**9 * len(rests))
    monkeypatch.setattr(plugin, "WRITTEN_S", 0.0)
    programs.measure(run)
    # Base and the guest with kzeropaged rest before their last run.
    assert rests.count(programs.REST_S) == len(found["ours"].ran)
    return run, found


def test_each_program_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, guests = measured(monkeypatch, tmp_path, "", pairs=1)
    # With huge pages and without: cold, warm and rested.
    for name, times in (("base", 6), ("ours", 4), ("kzeropaged", 4)):
        ran = guests[name].ran
        assert {program: ran.count(program) for program in NAMES} == dict.fromkeys(NAMES, times)
    found = by_name(run)
    assert len(found) == len(NAMES) * 6 * len(programs.FIGURES)
    zeroed = found["programs.redis.thp.cold.zeroed"]
    assert (zeroed.base.median, zeroed.ours.median, zeroed.change_percent) == (4096, 1024, -75)
    assert found["programs.redis.thp.rested.zeroed"].ours.median == 512
    assert found["programs.sqlite.4k.warm.faults"].ours.median == 70
    assert found["programs.java.4k.cold.instructions"].change_percent == 0
    assert found["programs.gcc.thp.warm.time"].unit == "s"
    more, _ = measured(monkeypatch, tmp_path, "gcc", pairs=10)
    assert (
        more.job["rounds"] == by_name(more)["programs.gcc.4k.cold.zeroed"].ours.n == programs.ROUNDS
    )


def test_natively_it_has_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rested run costs what kzeropaged does in the rest, too."""
    run, guests = measured(monkeypatch, tmp_path, "gcc", pairs=20, accel="pvm")
    assert set(guests["base"].ran) == {"gcc"}
    found = by_name(run)
    assert len(found) == 6 * len(programs.NATIVE_FIGURES)
    assert found["programs.gcc.thp.rested.cpu"].ours.median == 1
    _, all_guests = measured(monkeypatch, tmp_path, "", pairs=1, accel="pvm")
    assert set(all_guests["base"].ran) == NAMES - {"microvm"}
    assert found["programs.gcc.thp.cold.time"].ours.n == programs.NATIVE_ROUNDS


def test_kzeropaged_runs_in_one_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, guests = measured(monkeypatch, tmp_path, "gcc", pairs=1, defaults="debian")
    assert [name for name, guest in guests.items() if ON in guest.asked] == ["kzeropaged"]
    assert {guest.append for guest in guests.values()} == {"init_on_alloc=1"}


def test_each_chart_has_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = measured(monkeypatch, tmp_path, "", pairs=1)
    charts = groups(Result("programs", "tcg", {}, "", run.metrics))
    assert len(charts) == 6 * len(programs.FIGURES)
    assert charts[0].title == "Bytes that the guest zeroes, huge pages, cold"
    assert {len(chart.labels) for chart in charts} == {len(NAMES)}
    labels = charts[0].labels
    assert labels[sorted(NAMES).index("redis")] == "Redis filled with 200 MB, then BGSAVE"


def test_one_program_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, guests = measured(monkeypatch, tmp_path, "redis, sqlite", pairs=1)
    assert guests["ours"].ran == (["redis"] * 2 + ["sqlite"] * 2) * 2
    assert run.job["programs"] == "redis, sqlite"
    wanted = plan.plan(BENCHES["programs"], run.options)
    assert "--only 'redis, sqlite'" in wanted.reproduce(run.options, "tcg")


def test_another_output_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TestFailure, match="sqlite computes something else") as error:
        measured(monkeypatch, tmp_path, "sqlite", says="another sum")
    assert "base: the sum\n" in error.value.why and "kzeropaged: another sum" in error.value.why
    assert "--only sqlite" in error.value.fix
