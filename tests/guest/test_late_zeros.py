# SPDX-License-Identifier: GPL-2.0
"""Callers that zero memory after they have allocated it: what they skip, and that it is zero."""

from __future__ import annotations

import pytest

from tests.guest.guests import (
    DIRTY,
    REPORT,
    STRESS_SECONDS,
    STRESS_SEED,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
)

pytestmark = pytest.mark.boots

PAGES = 128 << 8
SMALL = "/sys/fs/cgroup/small"
# Free memory in blocks that are too small to be reported: 8 MiB were seen.
REST = 12 << 8
# These are all zeroed in the guest's first use of the memory that it has just reported.
KINDS = ("fallocate", "tmpfs", "byte_writes", "uffd", "collapse")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_known_to_be_zero_is_not_zeroed_again(kind: str) -> None:
    result = run(
        f"mount -t tmpfs tmpfs /tmp || true; {DIRTY}; {REPORT}; late_zeros --size 128 {kind}; grep "
        "pgzeroed_ /proc/vmstat",
        checked=True,
    )
    fine(result)
    used = objects(result)[0]
    assert used["old"] == 0
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(used["vmstat"]["pgzeroed_skip"], PAGES - REST)


def test_a_fault_in_a_file_zeroes_a_page_once() -> None:
    """With init_on_alloc=1, the allocator has. The clock of the guest counts instructions."""
    times = []
    for append in ("init_on_alloc=0", "init_on_alloc=1"):
        result = run(
            f"{DIRTY}; alloc_once --size 16 --pages shmem --mode touch_line",
            devices=[],
            append=append,
            extra_qemu=["-icount", "shift=0,sleep=off"],
        )
        fine(result)
        times.append(objects(result)[0]["task_clock_ns"])
    # Twice is 6.8 % more.
    expect_at_most(times[1], 1.03 * times[0])


def test_without_a_source_all_is_zeroed() -> None:
    """The same memory, dirty and not reported."""
    kinds = " ".join((*KINDS, "full_writes"))
    result = run(
        f"mount -t tmpfs tmpfs /tmp || true; for kind in {kinds}; do {DIRTY}; "
        "late_zeros --size 128 $kind; done",
        devices=[],
        checked=True,
    )
    fine(result)
    assert [used["old"] for used in objects(result)] == [0] * (len(KINDS) + 1)


def test_whole_pages_take_no_zeros() -> None:
    """A write of whole pages is counted as cleared or skipped by none of its pages."""
    result = run(f"{DIRTY}; {REPORT}; late_zeros --size 128 full_writes", checked=True)
    fine(result)
    [used] = objects(result)
    found = used["vmstat"]
    assert used["old"] == 0
    expect_at_most(found["pgzeroed_skip"] + found["pgzeroed_cleared"], 0.05 * PAGES)


def test_a_collapse_that_is_refused_loses_no_zeros() -> None:
    """In a cgroup without room for it, a huge page is allocated and not paid for."""
    result = run(
        f"echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir {SMALL}; echo 28M > "
        f"{SMALL}/memory.max; {DIRTY}; {REPORT}; sh -c 'echo 0 > {SMALL}/cgroup.procs; dd "
        "if=/dev/zero of=/held bs=1M count=24 2>/dev/null; exec late_zeros --size 128 "
        "collapse_refused'; grep pgzeroed_ /proc/vmstat",
        checked=True,
    )
    fine(result)
    used = objects(result)[0]
    assert used["old"] == counters(result)["pgzeroed_bad"] == 0
    expect_at_least(used["vmstat"]["pgzeroed_set_freed"], 0.95 * PAGES)


@pytest.mark.parametrize("reported", [False, True], ids=["dirty", "reported"])
def test_a_buffer_of_an_unwritten_file_is_zero(reported: bool) -> None:
    """memfd_pin_folios() gave the old content of such a file to udmabuf."""
    result = run(f"{DIRTY}; {REPORT if reported else 'true'}; late_zeros --size 32 udmabuf")
    fine(result)
    assert objects(result)[0]["old"] == 0


@pytest.mark.parametrize("reported", [False, True], ids=["dirty", "known zero"])
def test_a_collapse_maps_no_unwritten_folio(reported: bool) -> None:
    """MADV_COLLAPSE mapped huge folios of such a file with their old content."""
    result = run(
        "echo always > /sys/kernel/mm/transparent_hugepage/shmem_enabled; "
        f"{DIRTY}; {REPORT if reported else 'true'}; late_zeros --size 32 collapse_unwritten"
    )
    fine(result)
    assert objects(result)[0]["old"] == 0


@pytest.mark.slow
@pytest.mark.hunt
def test_races_for_the_folios_of_a_file() -> None:
    """Each byte is what its only writer has left there, and known-zero folios are in use."""
    result = run(
        f"shmem_race --seconds {STRESS_SECONDS} --seed {STRESS_SEED}; grep pgzeroed_ /proc/vmstat",
        cpus=2,
        memory="1G",
        timeout=240 + 2 * STRESS_SECONDS,
    )
    fine(result)
    race = objects(result)[0]
    assert "violation" not in race
    expect_at_least(min(race["steps"].values()), 1)
    expect_at_least(min(race["collapsed"], race["short_writes"]), 1)
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(counters(result)["pgzeroed_skip"], 4096)
