# SPDX-License-Identifier: GPL-2.0
"""A KVM without hardware.

A guest in a guest, and what both kernels zero of memory that comes back.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.bench import both_ends, jobs, plan, runner
from lab.bench.both_ends import Inner, use
from lab.bench.kzeropaged import ON
from lab.bench.plan import BenchOptions
from lab.bench.runner import Run
from lab.bench.session import LATE, LOOP, MIB, PAGE, Side, Wanted
from lab.bench.table import BENCHES
from lab.boot import accel, nested, resolve
from lab.boot.console import taint_reasons
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.build.qemu import PROGRAM
from lab.report import archive
from lab.report.results import Metric, load
from tests.guest.guests import BALLOON, CHECK, expect_at_least, expect_at_most
from tests.guest.test_stock import JOB

pytestmark = [pytest.mark.boots, pytest.mark.slow]

FILL, USED = 256, 128  # MB
USES = 2
INITRD = f"{nested.PLACE}/probe"
SHELL = ["sh", "-c", LOOP]
GUEST = BootSpec(memory="768M", devices=[BALLOON], command=SHELL, append=CHECK)


def probed(qemu: Path, run: Callable[[list[str]], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The reason why KVM does not run a kernel, by the lab's own probe. ``run`` runs its QEMU."""
    really = subprocess.run

    def called(words: list[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
        if words[0] != str(qemu):
            return really(words, **more)
        return subprocess.CompletedProcess(words, 0, run(words).encode(), b"")

    kernel, _ = resolve.kernel(GUEST.kernel)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", called)
        return accel._probe(qemu, kernel)


def fine(side: Side, skipped: int) -> None:
    """The kernel found no fault, and no known-zero page that is dirty.

    It did not zero ``skipped`` MB that were used.
    """
    assert taint_reasons(side.number("cat /proc/sys/kernel/tainted")) == []
    counters = side.vmstat()
    assert counters["pgzeroed_bad"] == 0
    expect_at_least(counters["pgzeroed_skip"] * PAGE, 0.9 * skipped * MIB)


@pytest.mark.nightly
def test_neither_end_zeroes_memory_that_comes_back(
    image: Callable[..., Path], qemu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab finds that KVM works.

    Each job of the demo, and of the tests with stock partners, runs in its guest.
    """

    def keep(words: list[str]) -> str:
        shutil.copy(words[words.index("-initrd") + 1], tmp_path / "probe")
        return ""

    # Other tests run meanwhile, so reports pause for longer.
    monkeypatch.setattr(both_ends, "STILL_S", 4.0)
    assert "ended before user space" in probed(qemu, keep, monkeypatch)
    kernel, probe = image("debug"), [(tmp_path / "probe", INITRD)]
    host = BootSpec(kernel, memory="1536M", command=SHELL, append=CHECK, timeout=600, add=probe)
    with running(nested.outer(host, GUEST, qemu)) as running_host:
        outer = Side("outer", running_host)

        def run_outside(words: list[str]) -> str:
            """Run the probe's QEMU in the outer guest, which has the same files elsewhere."""
            there = [f"/{PROGRAM}", *words[1:]]
            there[words.index("-kernel") + 1] = f"{nested.PLACE}/kernel"
            there[words.index("-initrd") + 1] = INITRD
            line = shlex.join(there)
            return "\n".join(outer.sh(f"timeout 180 {line} < /dev/null 2>&1", check=False))

        why = probed(qemu, run_outside, monkeypatch)
        monkeypatch.setattr(accel, "kvm_obstacle", lambda _: why)
        assert accel.choose("kvm", qemu).name == "kvm"

        outer.sh(ON)
        inner = Inner("ours", outer, GUEST)
        assert "Hypervisor detected: KVM" in running_host.console.read_text(errors="replace")
        inner.sh(f"{LATE}; fillfree --size {FILL} > /dev/null")
        full = inner.counts()["resident"] * PAGE
        expect_at_least(full - inner.settle(), 0.9 * FILL * MIB)
        inner.sh(f"(set -e; {JOB})")
        for _ in range(USES):
            found = use(inner, USED)
            expect_at_least(found["idle"], 0.9 * USED * MIB)
            expect_at_most(found["inner"], 0.05 * USED * MIB)
            expect_at_most(found["outer"], 0.05 * USED * MIB)
        fine(inner, USES * USED)
        fine(outer, USES * USED)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", ["thp", "order0", "hugetlb"])
def test_the_evidence_on_kvm(
    name: str,
    image: Callable[..., Path],
    qemu: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The benches of `kz evidence`, each kernel in an outer guest, and their archive.

    Without init-on-alloc, which needs a disk. Times are not judged: emulated KVM.
    """
    options = BenchOptions(pairs=2, memory="1536M", accel="tcg")
    planned = plan.plan(BENCHES[name], options)
    run = Run(planned.bench, options, plan.build(planned))

    @contextmanager
    def kernels(self: Run, *names: str, **_: Any) -> Iterator[list[Side]]:
        inner = {name: replace(self.spec(name), accel="auto") for name in names}
        outer = BootSpec(image("debug"), memory="2560M", command=SHELL, append=CHECK, timeout=900)
        specs = [Wanted(name, nested.outer(outer, spec, qemu)) for name, spec in inner.items()]
        with self.guests(specs) as sides:
            found = [Inner(side.name, side, inner[side.name]) for side in sides]
            yield [*found]
            for side in found:
                assert "Hypervisor detected: KVM" in side.guest.console.read_text(errors="replace")
                assert taint_reasons(side.number("cat /proc/sys/kernel/tainted")) == []
                assert taint_reasons(side.outer.number("cat /proc/sys/kernel/tainted")) == []

    monkeypatch.setattr(Run, "kernels", kernels)
    monkeypatch.setattr(jobs, "warm_host", lambda size: None)  # the outer guest has its own
    planned.bench.measure(run)
    missed = [
        f"{one.name}: {one.target.text}" for one in run.metrics if one.target and not one.target.met
    ]
    assert [one for one in missed if "task_clock" not in one] == []
    written = runner.result(planned, run, 0.0)
    written.save(tmp_path / name)
    archive.pack(tmp_path, [name], tmp_path / "evidence.tar.gz")
    with archive.opened(tmp_path / "evidence.tar.gz") as place:
        assert load(place / name).to_json() == written.to_json()
    if name == "thp":
        expect_thp({one.name: one for one in run.metrics})


def expect_thp(found: dict[str, Metric]) -> None:
    """It has a target for each kind of figure."""
    assert {name.rpartition(".")[2] for name, one in found.items() if one.target} == {
        "guest_zeroed_bytes",
        "task_clock",
        "skipped_percent",
    }
