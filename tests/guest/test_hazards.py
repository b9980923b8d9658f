# SPDX-License-Identifier: GPL-2.0
"""Rare ways in which free memory changes hands, on the oracle kernel."""

from __future__ import annotations

import re
import time

import pytest

from lab.boot import resolve
from lab.boot.console import violations
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.build.linux import build_linux
from tests.guest.guests import (
    BALLOON,
    DIRTY,
    KERNEL,
    REPORT,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

THP = "/sys/kernel/mm/transparent_hugepage"
POISON = "/sys/kernel/debug/hwpoison"
USE_ALL = "alloc_once --size 512 --pages thp --verify --mode touch_all"


def test_a_failed_charge_leaks_nothing() -> None:
    """At the limit of a cgroup a huge page is allocated, and not paid for."""
    result = run(
        "echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir /sys/fs/cgroup/small; echo "
        f"64M > /sys/fs/cgroup/small/memory.max; {DIRTY}; {REPORT}; sh -c 'echo 0 > "
        "/sys/fs/cgroup/small/cgroup.procs; exec alloc_once --size 96 --pages thp --mode "
        "touch_all' || echo killed; grep '^oom_kill ' /sys/fs/cgroup/small/memory.events; grep "
        f"pgzeroed_ /proc/vmstat; {USE_ALL}; grep pgzeroed_ /proc/vmstat",
        allow_warnings=True,
        checked=True,
    )
    assert result.exit_code == 0, text(result)
    assert not [line for line in result.violations if "page_zeroed" in line or "BUG" in line]
    assert re.search(r"^killed\noom_kill [1-9]", text(result), re.MULTILINE)
    assert counters(result)["pgzeroed_bad"] == 0


SMALL = "/sys/fs/cgroup/small"
# A cgroup that has no room for a huge page, and one byte written in each 2 MiB of 200 MiB by a task
# in it.
NEARLY_FULL = (
    f"echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir {SMALL}; echo 28M > "
    f"{SMALL}/memory.max; echo madvise > {THP}/defrag; sh -c 'echo 0 > {SMALL}/cgroup.procs; dd "
    "if=/dev/zero of=/held bs=1M count=24 2>/dev/null'"
)
SPARSE = f"sh -c 'echo 0 > {SMALL}/cgroup.procs; exec alloc_once --size 200 --mode sparse"


def test_huge_pages_that_cannot_be_paid_for_are_not_zeroed() -> None:
    """At the limit of a cgroup, with nobody who tells what is zero.

    No 2 MiB are taken for each 4 KiB.
    """
    taken = "awk '/^pgalloc_/ { n += $2 } END { print \"taken \" n }' /proc/vmstat"
    result = run(
        f"echo always > {THP}/enabled; {NEARLY_FULL}; {taken}; {SPARSE}'; {taken}; "
        "grep thp_fault_fallback_charge /proc/vmstat",
        devices=[],
        checked=True,
    )
    fine(result)
    before, after, charges = (
        int(line.split()[1]) for line in text(result).splitlines() if line.startswith("t")
    )
    # One or two may still fit in.
    assert charges >= 90
    expect_at_most(after - before, 10 * 512)


@pytest.mark.parametrize(
    ("pages", "switch", "counters_of_zeros", "charge"),
    [
        # A fault that may reclaim tries to pay first, and zeroes only what it has paid for.
        pytest.param("thp", "enabled", "cleared|skip", "thp_fault", id="advised"),
        # Allocated all the same, but not as zeros; what was zeroed in vain is freed as zero.
        pytest.param("shmem", "shmem_enabled", "cleared|set_freed", "thp_file", id="shared"),
    ],
)
def test_huge_pages_with_a_source_that_cannot_be_paid_for_are_not_zeroed(
    pages: str, switch: str, counters_of_zeros: str, charge: str
) -> None:
    zeroed = f"grep -E 'pgzeroed_({counters_of_zeros})' /proc/vmstat"
    result = run(
        f"echo always > {THP}/{switch}; {NEARLY_FULL}; {DIRTY}; {zeroed}; {SPARSE} --pages "
        f"{pages}'; {zeroed}; grep {charge}_fallback_charge /proc/vmstat",
        checked=True,
    )
    fine(result)
    *zeroed_pages, charges = (
        int(line.split()[1])
        for line in text(result).splitlines()
        if line.startswith(("pgz", "thp"))
    )
    assert charges >= 90
    expect_at_most(sum(zeroed_pages[2:]) - sum(zeroed_pages[:2]), 10 * 512)


@pytest.mark.parametrize("way", ["corrupt", "soft"])
def test_pages_gone_bad_and_back(way: str) -> None:
    """Poison is not lost to our flags, and a page that comes back is not called zero."""
    inject = (
        f"echo $pfn > {POISON}/corrupt-pfn"
        if way == "corrupt"
        else "printf '0x%x' $((pfn * 4096)) > /sys/devices/system/memory/soft_offline_page"
    )
    result = run(
        f"{DIRTY}; {REPORT}; bad=''; "
        # Free memory as the flush has left it, at odd places inside of large blocks.
        "for i in $(seq 0 39); do pfn=$((100000 + i * 1777)); "
        f'({inject}) 2>/dev/null && bad="$bad $pfn"; done; set -- $bad; echo taken $#; '
        "echo corrupted $(sed -n 's/HardwareCorrupted: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo); "
        f"{USE_ALL}; for pfn in $bad; do echo $pfn > {POISON}/unpoison-pfn; done; "
        "echo left $(sed -n 's/HardwareCorrupted: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo); "
        f"{USE_ALL}; grep pgzeroed_ /proc/vmstat",
    )
    fine(result)
    told = {
        line.split()[0]: int(line.split()[1])
        for line in text(result).splitlines()
        if line.count(" ") == 1
    }
    expect_at_least(told["taken"], 20)
    # A page that could not be taken is marked all the same, and told to have failed.
    assert told["corrupted"] >= 4 * told["taken"]
    assert told["left"] == told["corrupted"] - 4 * told["taken"]
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(objects(result)[0]["vmstat"]["pgzeroed_skip"], 1)


def test_large_folios_are_interleaved_wherever_they_are_touched() -> None:
    """The place of the fault in the folio, and a split of the mapping, must not change the policy's
    nodes.

    Of the base, the folios on both sides of the split are on one node.

    """
    result = run(
        f"echo never > {THP}/enabled; echo always > {THP}/hugepages-64kB/enabled; interleave "
        "--size 64",
        append="numa=fake=2",
        checked=True,
    )
    fine(result)
    told = objects(result)[-1]
    assert told["folios"] == 64
    assert told["same_node"] == 0
    assert told["not_large"] == 0


def test_shared_memory_is_not_zeroed_again() -> None:
    """Faults in holes of shmem take known-zero pages.

    What was fallocated and not used is still cleared.
    """
    result = run(
        f"{DIRTY}; {REPORT}; alloc_once --size 64 --pages shmem --verify --mode touch_all; for "
        "kind in shmem_mmap shmem_fallocate shmem_write; do leak_hunter --seconds 2 --dirty 64 "
        "--kind $kind; done; grep pgzeroed_ /proc/vmstat",
        checked=True,
    )
    fine(result)
    expect_at_least(objects(result)[0]["vmstat"]["pgzeroed_skip"], 0.5 * (64 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_soft_offlining_meets_offlining() -> None:
    """A caller that asks for a page of memory that goes away waits, and then gets an error."""
    result = run("stress --seconds 20 memoryblock softoffline", cpus=2, memory="1G")
    fine(result)
    (stress,) = objects(result)
    expect_at_least(min(stress["steps"].values()), 20)


def test_unbound_and_bound_again() -> None:
    """The balloon goes while memory is reported, and comes back.

    What is marked is zero all the time.
    """
    driver = "/sys/bus/virtio/drivers/virtio_balloon"
    result = run(
        f"cd {driver}; device=$(basename virtio*[0-9]); cd /; {DIRTY}; {REPORT}; echo $device > "
        f"{driver}/unbind; {USE_ALL}; echo $device > {driver}/bind; {DIRTY}; {REPORT}; {USE_ALL}; "
        "grep pgzeroed_ /proc/vmstat",
        checked=True,
    )
    fine(result)
    for used in objects(result):
        expect_at_least(used["vmstat"]["pgzeroed_skip"], 0.5 * (512 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_kexec_into_memory_that_is_not_zero() -> None:
    """With page_poison=1, all free memory has a pattern. The purgatory finds any of it that kexec
    leaves behind a segment, and stops.
    """
    spec = BootSpec(
        kernel=KERNEL,
        memory="768M",
        append="page_poison=1 retain_initrd",
        add=[(resolve.kernel(KERNEL)[0], "/kz/kernel")],
        timeout=240.0,
        command=[
            "sh",
            "-ec",
            "grep -q again=1 /proc/cmdline && { echo second-kernel > /dev/ttyS0; exit; }; "
            "kexec --append again=1",
        ],
    )
    with running(spec) as guest:
        deadline = float("inf")
        while (text := guest.console.read_text(errors="replace")).count("Linux version") < 2:
            if deadline == float("inf") and "Starting new kernel" in text:
                deadline = time.monotonic() + 60
            late = guest.process.poll() is not None or time.monotonic() > deadline
            assert not late, f"the second kernel did not start:\n{text[-2000:]}"
            time.sleep(0.5)
        assert guest.process.wait(180) == 0
        assert "second-kernel" in guest.console.read_text(errors="replace")


MARKER, MARKERS = "knownzero-was-here", 100_000


@pytest.mark.nightly
@pytest.mark.matrix
@pytest.mark.timeout(7200)  # with the build of its kernel
def test_a_crash_kernel_dumps_what_was_in_use() -> None:
    """Memory in use is in the dump, reported memory too (as zeros). The crash kernel reports its
    own memory, and skips zeroing there.
    """
    kernel = build_linux("debug", "x86_64", "crash")
    second = (
        f"grep -ao {MARKER} /proc/vmcore | wc -l; {DIRTY}; {REPORT}; "
        "alloc_once --size 32 --pages nothp --verify --mode touch_all; "
        "grep -E 'pgzeroed_(skip|bad)' /proc/vmstat; echo dumped"
    )
    spec = BootSpec(
        kernel=str(kernel),
        memory="1G",
        devices=[BALLOON],
        append="crashkernel=320M retain_initrd",
        add=[(kernel, "/kz/kernel")],
        timeout=900.0,
        allow_warnings=True,  # the first kernel panics
        command=[
            "sh",
            "-ec",
            f"grep -q again=1 /proc/cmdline && {{ ({second}) > /dev/ttyS0 2>&1; exit; }}; "
            f"yes {MARKER} | head -n {MARKERS} > /file; {DIRTY}; {REPORT}; "
            "kexec --crash --append again=1",
        ],
    )
    with running(spec) as guest:
        assert guest.process.wait(spec.timeout) == 0
        console = guest.console.read_text(errors="replace")
    assert "sysrq: Trigger a crash" in console
    after = console.rpartition("Linux version")[2].replace("\r", "")
    assert violations(after) == []
    dumped = re.search(r"^(\d+)\n(?s:.*)^pgzeroed_skip (\d+)\n(?s:.*)^dumped$", after, re.MULTILINE)
    assert dumped, after[-3000:]
    assert int(dumped[1]) >= MARKERS
    assert int(dumped[2]) >= 4096
    assert "page_zeroed: BUG" not in console
