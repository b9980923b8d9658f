# SPDX-License-Identifier: GPL-2.0
"""The series on kernels that are configured otherwise, and for other processors.

See linux/configs.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lab.build import linux as build
from lab.machine import fetch
from lab.patches import apply, parts
from tests.guest.guests import (
    BALLOON,
    DELAY,
    KZEROPAGED,
    STRESS_SECONDS,
    ZP,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    objects,
    run,
)
from tests.kernel import kunit
from tests.kernel.objects import build_part

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.matrix]

PARTIAL = "page_zeroed_reporter.mode=partial"
SECONDS = max(60, STRESS_SECONDS)
REPORTS = f"echo 200 > {DELAY}"
# Every one of these kernels has them.
MUST_RUN = {
    "anon_4k",
    "brk",
    "stack",
    "fork_cow",
    "dontneed",
    "mremap",
    "page_tables",
    "shmem_write",
    "shmem_fallocate",
    "shmem_mmap",
    "file_tail",
}
THP = {"thp", "shmem_huge", "tmpfs_huge"}
HUGETLB = {"hugetlb_pool", "hugetlb_surplus", "hugetlb_memfd", "hugetlb_file", "hugetlb_cow"}


@dataclass(frozen=True)
class Kernel:
    """A kernel.

    ``is_it`` is a command that succeeds in no guest whose kernel is configured otherwise.
    """

    is_it: str
    config: str = ""
    arch: str = "x86_64"
    memory: str = "1G"
    cpus: int = 2
    drivers: str = "compact pressure hugetlb flush"
    must_run: frozenset[str] = frozenset(MUST_RUN | HUGETLB)
    must_not: frozenset[str] = frozenset()
    kzeropaged: bool = True

    @property
    def sources(self) -> str:
        """Shell that turns the sources of zeros on; without kzeropaged, it has no files."""
        return f"{REPORTS}; {KZEROPAGED if self.kzeropaged else f'! [ -e {ZP} ]'}"

    def build(self) -> str:
        """The image."""
        return str(build.build_linux("debug", self.arch, self.config))


KERNELS = {
    "kasan": Kernel("dmesg | grep -q 'KernelAddressSanitizer initialized (generic)'", "kasan"),
    "ubsan, KFENCE": Kernel("dmesg | grep -q 'kfence: initialized'", "ubsan"),
    "nothp": Kernel("! [ -e /sys/kernel/mm/transparent_hugepage ]", "nothp"),
    # Waiters for a lock of kzeropaged could wait for a SCHED_IDLE task: Kconfig excludes it.
    "real-time": Kernel(
        "uname -v | grep -q PREEMPT_RT; ! [ -e /sys/kernel/mm/transparent_hugepage ]",
        "rt",
        kzeropaged=False,
    ),
    "nohugetlb": Kernel(
        "! [ -e /proc/sys/vm/nr_hugepages ]",
        "nohugetlb",
        drivers="compact pressure flush",
        must_run=frozenset(MUST_RUN | THP),
        must_not=frozenset(HUGETLB),
    ),
    "nonuma": Kernel("! [ -e /sys/devices/system/node ]", "nonuma"),
    "up": Kernel("! uname -v | grep -q SMP", "up", cpus=1),
    "i386 with high memory": Kernel(
        "[ $(uname -m) = i686 ]; [ $(awk '/^HighTotal/ { print $2 }' /proc/meminfo) -gt 500000 ]",
        arch="i386",
        memory="2G",
    ),
    "User-Mode Linux with KASAN": Kernel(
        # Free memory that is written through memset() is what KASAN reports, and leaves as it is.
        "dmesg | grep -q 'KernelAddressSanitizer initialized (generic)'",
        "kasan-um",
        arch="um",
        cpus=1,
        # No pressure: each page a program uses is a mapping of the host's, which allows just so
        # many.
        drivers="compact flush",
        must_run=frozenset(MUST_RUN),
        must_not=frozenset(HUGETLB),
    ),
    "arm64": Kernel("[ $(uname -m) = aarch64 ]", arch="arm64"),
}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KERNELS)
def test_no_byte_leaks(name: str, record_property: Record) -> None:
    kernel = KERNELS[name]
    # User-Mode Linux has no such device without a daemon, nor has the distribution's QEMU that
    # emulates arm64.
    foreign = kernel.arch in ("arm64", "um")
    result = run(
        f"{kernel.is_it}; {kernel.sources}; stress --seconds {SECONDS} --seed 1 {kernel.drivers} > "
        f"/tmp/stress & leak_hunter --setup --whole-round --seconds {SECONDS} --seed 1 --workers "
        "2; wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat",
        kernel=kernel.build(),
        arch=kernel.arch,
        cpus=kernel.cpus,
        memory=kernel.memory,
        devices=[] if foreign else [BALLOON],
        append=PARTIAL if foreign else "",
        timeout=1800.0 + 4 * SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    assert all(stress["steps"].values()), stress
    ran, left_out = hunter["checked_pages"].keys(), hunter["skipped"]
    assert not kernel.must_run & left_out.keys(), left_out
    assert not kernel.must_not & ran, hunter
    assert hunter["total_pages"] > 10_000
    found = counters(result)
    wanted = ["pgzeroed_skip", "pgzeroed_set_reported"]
    if kernel.kzeropaged:
        wanted.append("pgzeroed_set_prezeroed")
    for counter in wanted:
        expect_at_least(found[counter], 100)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", KERNELS)
def test_unit_tests(name: str) -> None:
    kernel = KERNELS[name]
    cases = kunit.run(kernel.arch, "*", kernel.build(), timeout=900)
    failed = [f"{c.name}: {c.text}" for c in cases if c.state == "failed"]
    assert not failed, "\n".join(failed)
    passed = {c.name.split(".")[0] for c in cases if c.state == "passed"}
    wanted = {"page_zeroed_rules", "page_zeroed_alloc"}
    if kernel.kzeropaged:
        wanted.add("page_zeroed_prezero")
    assert wanted <= passed


@pytest.mark.timeout(3600)
def test_without_an_mmu_it_compiles() -> None:
    obj = build_part("debug", "riscv", ["mm/", "drivers/virtio/"], "nommu")
    config = (obj / ".config").read_text(encoding="utf-8")
    assert "CONFIG_MMU=y" not in config
    assert "CONFIG_PAGE_ZEROED=y" in config
    for name in (
        "mm/page_zeroed.o",
        "mm/prezero.o",
        "mm/nommu.o",
        "drivers/virtio/virtio_balloon.o",
    ):
        assert (obj / name).is_file(), name


def test_kmsan() -> None:
    """KMSAN takes clang, and kernels are built with gcc here.

    That Kconfig excludes the series is all to test.
    """
    with apply.working_copy(parts.get("linux"), fetch.obtain("linux")) as tree:
        kconfig = (tree / "mm" / "Kconfig").read_text(encoding="utf-8")
    ours = kconfig[kconfig.index("config PAGE_ZEROED\n") :].split("help")[0]
    assert "depends on !KMSAN" in ours
