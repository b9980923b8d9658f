# SPDX-License-Identifier: GPL-2.0
"""The leak hunter on the oracle kernel, while memory management is disturbed in every way."""

from __future__ import annotations

import os

import pytest

from tests.guest.guests import DELAY, STALE_MEMMAP, Record, expect_at_least, fine, hunted, objects, run

pytestmark = [pytest.mark.boots, pytest.mark.slow]

SECONDS = int(os.environ.get("KNOWNZERO_STRESS_SECONDS", "30"))
SEED = int(os.environ.get("KNOWNZERO_STRESS_SEED", "1"))

DISTURBANCES = {
    "compaction, CPU hotplug": ("compact", "hotplug", "flush"),
    "memory pressure": ("pressure", "flush"),
    "huge page pool, memory blocks": ("hugetlb", "memoryblock", "flush"),
    "single pages": ("softoffline", "compact", "flush"),
    "everything": ("compact", "hotplug", "pressure", "hugetlb", "memoryblock", "softoffline", "flush"),
}
OFTEN = ("huge page pool, memory blocks", "single pages", "everything")
# Every kernel of the lab offers these; a hunter that skipped one of them did not do its work.
MUST_RUN = {"anon_4k", "thp", "mthp_64k", "brk", "stack", "fork_cow", "dontneed", "mremap", "page_tables",
            "shmem_write", "shmem_fallocate", "shmem_mmap", "file_tail", "hugetlb_surplus"}  # fmt: skip


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[] if what in OFTEN else pytest.mark.nightly) for what in DISTURBANCES],
)
@pytest.mark.timeout(700 + 6 * SECONDS)
def test_no_byte_leaks(what: str, record_property: Record) -> None:
    drivers = " ".join(DISTURBANCES[what])
    result = run(
        f"echo 200 > {DELAY}; "
        f"stress --seconds {SECONDS} --seed {SEED} {drivers} > /tmp/stress & "
        f"leak_hunter --setup --whole-round --seconds {SECONDS} --seed {SEED} --workers 2; "
        "wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat",
        cpus=2,
        memory="1G",
        append=STALE_MEMMAP if "memoryblock" in drivers else "",
        timeout=480.0 + 4 * SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    assert all(stress["steps"].values()), stress
    # Stopped by time, a rare kind may not have had its turn; one that failed would be a lie.
    tried = {name for name, why in hunter["skipped"].items() if "turn did not come" not in why}
    assert not MUST_RUN & tried, hunter["skipped"]
    expect_at_least(len(hunter["checked_pages"]), 10)
    expect_at_least(hunter["vmstat"]["pgzeroed_skip_reported"], 1)
