# SPDX-License-Identifier: GPL-2.0
"""Guests that run natively under kvm_pvm: detection, refusals, command line, and the pool."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.bench import commands, native, runner
from lab.bench.plan import BenchOptions, plan
from lab.bench.table import BENCHES
from lab.boot import accel, hugepages, resolve
from lab.build import linux as build
from lab.build import programs
from lab.core import run
from lab.core.errors import LabError, UsageError
from lab.core.paths import REPO
from lab.machine import arches, fetch
from lab.patches import parts
from lab.report.results import in_words
from tests.bench.fakes import run_of, side

QEMU = Path("qemu")
CLOCK = {"mode": "populate", "size_mb": 256}
COSTS = (
    '{"loop_ns": 8e8, "clear_ns": 3e8, "fault_ns": 5000, "syscall_ns": 90, "pte_ns": 50, '
    '"exit_ns": 20000}'
)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with /dev/kvm and the module kvm_pvm, on which no kernel may be tried."""

    def probe(*_: object) -> str:
        raise AssertionError("a kernel was tried")

    (tmp_path / "kvm_pvm").mkdir()
    monkeypatch.setattr(accel, "MODULES", tmp_path)
    monkeypatch.setattr(accel, "_device_obstacle", lambda: "")
    monkeypatch.setattr(accel, "_probe", probe)
    return tmp_path


def test_the_module_decides_what_dev_kvm_is(machine: Path) -> None:
    chosen = accel.choose("auto", QEMU)
    assert chosen.name == "tcg" and "kvm_pvm" in chosen.reason
    chosen = accel.choose("pvm", QEMU)
    assert chosen.name == "pvm" and "kvm_pvm" in chosen.reason
    with pytest.raises(LabError, match="KVM cannot be used here") as caught:
        accel.choose("kvm", QEMU)
    assert "--accel pvm" in caught.value.fix


def test_the_patch_prints_what_the_lab_looks_for() -> None:
    patch = (parts.get("linux").root / "measure" / "pvm.patch").read_bytes()
    assert resolve.PVM_MARK in patch and b"add_taint(TAINT_TEST" in patch


def test_each_variant_gets_the_patch_last() -> None:
    for variant in build.VARIANTS:
        chosen = build._patches(variant, arches.PVM, ())
        names = [patch.name for patch in parts.get("linux", chosen).patches()]
        assert names[-1] == "pvm.patch"
        assert ("floor.patch" in names) == (variant == "floor")
        alone = variant in ("base", "floor")
        assert (len(names) <= 2) == alone
        assert build.fragments(variant, arches.PVM)[-1].name == "pvm.config"
    assert build._patches("knownzero", "x86_64", ()) == ()
    named = {part.name for part in parts.get("linux").parts}
    assert not named & set(parts.MEASURE)


def test_trees_of_kernels_to_measure_with_are_their_own() -> None:
    """A build of one must not change the files that the other is built from."""
    wanted = {("base", arches.PVM), ("knownzero", arches.PVM)}
    wanted |= {("floor", "x86_64"), ("knownzero", "x86_64")}
    found = {one: parts.get("linux", build._patches(*one, ())).suffix for one in wanted}
    assert len(set(found.values())) == len(found), found
    assert found["knownzero", "x86_64"] == ""


@pytest.fixture
def pool(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pool of the host with three pages of somebody else."""
    file = tmp_path / "nr_hugepages"
    file.write_text("3\n")
    monkeypatch.setattr(hugepages, "POOL", file)
    return file


def test_pages_of_the_pool_are_given_back(pool: Path) -> None:
    first, second = hugepages.take("1G"), hugepages.take("64M")
    assert first and second
    assert (first.pages, second.pages, pool.read_text()) == (512, 32, "547\n")
    hugepages.give_back(first)
    hugepages.give_back(second)
    assert pool.read_text() == "3\n"


KILLED = """
import os, sys
from pathlib import Path
from lab.boot import hugepages
hugepages.POOL = Path(sys.argv[1])
assert hugepages.take("1G")
os.kill(os.getpid(), 9)
"""


def test_pages_of_a_lab_that_was_killed_are_removed(pool: Path, cache: Path) -> None:
    own = hugepages.take("64M")
    environment = {**os.environ, "KNOWNZERO_CACHE": str(cache), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", KILLED, str(pool)]
    assert subprocess.run(argv, env=environment, check=False).returncode == -signal.SIGKILL
    assert pool.read_text() == "547\n"
    hugepages.reclaim()
    assert pool.read_text() == "35\n"
    subprocess.run(argv, env=environment, check=False)
    next_one = hugepages.take("64M")
    assert pool.read_text() == "67\n"
    for taken in (own, next_one):
        hugepages.give_back(taken)
    assert pool.read_text() == "3\n"


def test_a_record_of_an_earlier_boot_changes_no_pool(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = hugepages.take("64M")
    assert taken
    taken.record.close()  # as its process had ended
    monkeypatch.setattr(hugepages, "BOOT_ID", tmp_path / "boot_id")
    hugepages.BOOT_ID.write_text("another\n")
    hugepages.reclaim()
    assert pool.read_text() == "35\n"


@pytest.mark.parametrize("memory", ["1G,slots=2,maxmem=2G", "1.5G"])
def test_memory_that_is_no_number_of_pages_stays_out_of_the_pool(pool: Path, memory: str) -> None:
    assert hugepages.take(memory) is None
    assert pool.read_text() == "3\n"


def test_a_pool_that_stays_small_is_left_as_it_was(
    pool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resize(pages: int) -> int:
        pool.write_text(f"{min(pages, 100)}\n")
        return min(pages, 100)

    monkeypatch.setattr(hugepages, "_resize", resize)
    assert hugepages.take("1G") is None
    assert pool.read_text() == "3\n"
    monkeypatch.setattr(hugepages, "POOL", pool / "nothing")
    assert hugepages.take("1G") is None


def test_a_busy_machine_is_named_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.4, 9.0, 9.0))
    native.need_quiet()
    monkeypatch.setattr(os, "getloadavg", lambda: (1.6, 0.0, 0.0))
    with pytest.raises(LabError, match="Cannot measure natively") as caught:
        native.need_quiet()
    assert "1.6" in caught.value.why and caught.value.fix


def test_another_linux_is_refused_before_it_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "use", lambda *_: pytest.fail("it was downloaded"))
    with pytest.raises(UsageError, match="Bad --linux"):
        commands.bench("thp", linux="6.12", accel="pvm")


def test_a_native_plan_has_kernels_of_its_own(machine: Path) -> None:
    """And none that only the emulator needs; its result stands beside that of the emulator."""
    for name in ("thp", "hotpath", "prezero"):
        wanted = plan(BENCHES[name], BenchOptions(accel="pvm"))
        assert {kernel.arch for kernel in wanted.kernels.values()} == {arches.PVM}
        assert "off" not in wanted.kernels and wanted.name("pvm") == f"{name}-native"
        assert wanted.options.accel == "pvm"
        assert "--accel pvm" in wanted.reproduce(wanted.options, "pvm")
    assert plan(BENCHES["hotpath"], BenchOptions(accel="auto")).options.accel == "tcg"


def checked(
    monkeypatch: pytest.MonkeyPatch, huge_pages: int = 512, slow_times: int = 99, **guest: float
) -> runner.Run:
    """A run whose guest has these costs so many times, and its host those of COSTS."""
    found = iter([native.costs(COSTS) | guest] * slow_times + [native.costs(COSTS)] * 99)
    monkeypatch.setattr(programs, "build_program", lambda _: Path("costs"))
    monkeypatch.setattr(run, "output", lambda *_: COSTS)
    sides = runner.Pair(*(side(name, lambda *_: next(found)) for name in ("base", "ours")))
    for one in sides:
        one.guest.huge_pages = hugepages.Taken(huge_pages, io.StringIO()) if huge_pages else None
    new = run_of(accel="pvm")
    new.accel = "pvm"
    native.check(new, sides)
    return new


def test_a_native_run_has_the_costs_of_traps(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checked(monkeypatch, fault_ns=45000.0, loop_ns=9e8)
    assert made.facts["a first write to a 4 KiB page"] == "45.00 µs, on the host 5.00 µs"
    assert any("1e9 additions 900.00 ms, on the host 800.00 ms" in note for note in made.notes)
    made.add("thp.{mode}.task_clock", ([2.0], [1.0]), CLOCK)
    assert made.metrics[0].accelerator == "pvm"


@pytest.mark.parametrize("name", native.NATIVE)
def test_an_emulated_guest_is_not_native(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    slow = native.costs(COSTS)[name] * 1.3
    with pytest.raises(LabError, match="does not run natively"):
        checked(monkeypatch, 512, native.TRIES, **{name: slow})
    checked(monkeypatch, 512, native.TRIES - 1, **{name: slow})


def test_figures_without_huge_pages_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = checked(monkeypatch, huge_pages=0)
    made.add("thp.{mode}.task_clock", ([2.0], [1.0]), CLOCK)
    assert made.metrics[0].accelerator == f"pvm, {native.PLAIN}"
    assert in_words(made.metrics[0].accelerator) == f"native (PVM), {native.PLAIN}"
    assert native.PLAIN_NOTE in made.notes
