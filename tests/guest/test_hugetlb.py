# SPDX-License-Identifier: GPL-2.0
"""Huge pages of hugetlb that are known to be zero: on the oracle kernel."""

from __future__ import annotations

from typing import Any

import pytest

from lab.boot.guest import BootResult
from tests.guest.guests import (
    DIRTY,
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

POOL = "/proc/sys/vm/nr_hugepages"
SURPLUS = "/proc/sys/vm/nr_overcommit_hugepages"
GIGANTIC = "/sys/kernel/mm/hugepages/hugepages-1048576kB"
COUNT = "grep -E 'pgzeroed_|nr_free_zeroed' /proc/vmstat"
MB = 128
PAGES = MB << 8
# What the hunter ends with when it got no page at all.
NOTHING_CHECKED = 3
ALLOC = f"alloc_once --size {MB} --pages hugetlb --verify --mode touch_all"
HUNTER_KINDS = (
    "hugetlb_pool", "hugetlb_surplus", "hugetlb_noreserve", "hugetlb_memfd", "hugetlb_grow", "hugetlb_file",
    "hugetlb_cow",
)  # fmt: skip


def grow(pages: int, path: str = POOL) -> str:
    """Set the size of a pool; it must really get there."""
    return f"echo {pages} > {path}; test $(cat {path}) = {pages}"


def deltas(result: BootResult) -> list[dict[str, Any]]:
    """What each allocation of the run counted."""
    return [told["vmstat"] for told in objects(result) if "task_clock_ns" in told]


def steps(result: BootResult) -> list[dict[str, int]]:
    """The counters each time that the guest printed them (COUNT)."""
    found: list[dict[str, int]] = []
    for line in text(result).splitlines():
        if not line.startswith(("pgzeroed_", "nr_free_zeroed")):
            continue
        name, value = line.split()
        if not found or name in found[-1]:
            found.append({})
        found[-1][name] = int(value)
    return found


@pytest.mark.parametrize("append", ["", "debug_pagealloc=on"], ids=["plain", "debug_pagealloc"])
def test_pool(append: str) -> None:
    """Growing the pool keeps what is known and zeroes nothing; what was used is dirty."""
    result = run(
        f"{DIRTY}; {REPORT}; {COUNT}; {grow(MB // 2)}; {COUNT}; {ALLOC} --reps 2; {COUNT}",
        append=append,
        checked=not append,
    )
    fine(result)
    before, grown, after = steps(result)
    expect_at_most(grown["pgzeroed_cleared"] - before["pgzeroed_cleared"], 0.01 * PAGES)
    expect_at_most(grown["pgzeroed_unwanted"] - before["pgzeroed_unwanted"], 0.01 * PAGES)
    # What is in the pool is not free memory any more, and does not count for that when it is used.
    assert before["nr_free_zeroed"] - grown["nr_free_zeroed"] == pytest.approx(PAGES, rel=0.05)
    assert after["nr_free_zeroed"] == pytest.approx(grown["nr_free_zeroed"], abs=0.05 * PAGES)
    first, second = deltas(result)
    expect_at_least(first["pgzeroed_skip_reported"], 0.99 * PAGES)
    expect_at_most(first["pgzeroed_cleared"], 0.01 * PAGES)
    # The same pages again, full of what the first one wrote.
    assert second["pgzeroed_cleared"] >= PAGES
    assert second["pgzeroed_skip_reported"] <= 0.01 * PAGES
    assert after["pgzeroed_bad"] == 0


def test_surplus() -> None:
    """Pages that are allocated because somebody reserves them."""
    result = run(f"echo {MB // 2} > {SURPLUS}; {DIRTY}; {REPORT}; {ALLOC}; {COUNT}", checked=True)
    fine(result)
    (delta,) = deltas(result)
    expect_at_least(delta["pgzeroed_skip_reported"], 0.99 * PAGES)
    expect_at_most(delta["pgzeroed_cleared"], 0.01 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


def test_shrunk_pool_is_still_known() -> None:
    """Pages that leave the pool unused are as good as they were."""
    result = run(
        f"{DIRTY}; {REPORT}; {grow(MB)}; {COUNT}; {grow(0)}; {COUNT}; {grow(MB // 2)}; {ALLOC}; {COUNT}",
        checked=True,
    )
    fine(result)
    before, shrunk, after = steps(result)
    expect_at_least(shrunk["pgzeroed_set_freed"] - before["pgzeroed_set_freed"], 0.99 * 2 * PAGES)
    (delta,) = deltas(result)
    expect_at_least(delta["pgzeroed_skip_reported"] + delta["pgzeroed_skip_freed"], 0.99 * PAGES)
    assert after["pgzeroed_bad"] == 0


def test_charge_fails() -> None:
    """The page that the memory cgroup refuses goes back to the pool as what it was."""
    small = "alloc_once --size 2 --pages hugetlb --verify"
    result = run(
        "mkdir -p /tmp/cg; mount -t cgroup2 -o memory_hugetlb_accounting none /tmp/cg; "
        "echo +memory > /tmp/cg/cgroup.subtree_control; mkdir /tmp/cg/small; "
        f"echo 2M > /tmp/cg/small/memory.max; {DIRTY}; {REPORT}; {grow(1)}; "
        f"if sh -c 'echo $$ > /tmp/cg/small/cgroup.procs; exec {small}' 2>/dev/null; "
        f"then echo charged; fi; {small}; {COUNT}"
    )
    fine(result)
    assert "charged" not in text(result)
    (delta,) = deltas(result)
    expect_at_least(delta["pgzeroed_skip_reported"], 512)
    assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.parametrize("append", ["init_on_alloc=1", "page_poison=1", "init_on_free=1"])
def test_zero_with_debugging_aids(append: str) -> None:
    result = run(
        f"{DIRTY}; {REPORT}; {grow(MB // 2)}; {ALLOC} --reps 2; {COUNT}",
        append=append,
        checked="poison" not in append,
    )
    fine(result)
    assert len(deltas(result)) == 2
    assert counters(result)["pgzeroed_bad"] == 0


def test_a_lie_is_found_in_the_pool() -> None:
    """The pool keeps who has said so: the first lie ends all belief in him, and everything is zero."""
    result = run(
        f"{DIRTY}; {REPORT}; {grow(MB // 2)}; {ALLOC}; {COUNT}",
        devices=[],
        append="page_zeroed_reporter.mode=lie",
        allow_warnings=True,
    )
    assert any("page_zeroed: BUG" in line for line in result.violations), text(result)[-2000:]
    assert result.exit_code == 0  # --verify: it was zeroed before the program got it
    found = counters(result)
    assert found["pgzeroed_bad"] > 0
    # One lie, and no more is believed. Before it there may be pages that nobody had written to.
    assert deltas(result)[0]["pgzeroed_bad"] == 512
    believed = deltas(result)[0]["pgzeroed_skip_reported"]
    assert believed <= PAGES // 4
    assert deltas(result)[0]["pgzeroed_cleared"] >= PAGES - believed


@pytest.mark.slow
@pytest.mark.parametrize("append", ["", "hugetlb_cma=1G"], ids=["contiguous", "cma"])
def test_gigantic(append: str) -> None:
    """A page of 1 GiB that is made of many blocks, and then what it is split into."""
    result = run(
        # Before anything else: what the kernel cannot move is soon everywhere. The hunter makes it dirty.
        f"{REPORT}; {grow(1, GIGANTIC + '/nr_hugepages')}; {COUNT}; "
        "leak_hunter --kind hugetlb_1g --workers 1 --dirty 0 --seconds 1; "
        f"{COUNT}; {grow(0, GIGANTIC + '/nr_hugepages')}; {REPORT}; "
        f"{grow(1, GIGANTIC + '/nr_hugepages')}; echo 1 > {GIGANTIC}/demote; test $(cat {POOL}) = 512; "
        f"{ALLOC}; {grow(0)}; {COUNT}",
        memory="5G",
        append=append,
        timeout=400.0,
    )
    fine(result)
    grown, used, after = steps(result)
    hunter = next(found for found in objects(result) if "checked_pages" in found)
    assert hunter["checked_pages"]["hugetlb_1g"] >= 1 << 18
    expect_at_least(used["pgzeroed_skip_reported"] - grown["pgzeroed_skip_reported"], 1 << 18)
    expect_at_least(deltas(result)[0]["pgzeroed_skip_reported"], 0.99 * PAGES)
    assert after["pgzeroed_bad"] == 0


@pytest.mark.slow
@pytest.mark.nightly  # whether there is a free range of 1 GiB is a matter of luck
def test_gigantic_of_which_a_part_is_dirty() -> None:
    """What a fault allocates is zeroed only where it has to be."""
    result = run(
        f"{REPORT}; fillfree --share 10 > /dev/null; echo 1 > {GIGANTIC}/nr_overcommit_hugepages; "
        f"{COUNT}; leak_hunter --kind hugetlb_1g_noreserve --workers 1 --dirty 0 --seconds 1 "
        f"|| [ $? = {NOTHING_CHECKED} ]; {COUNT}",
        memory="5G",
        timeout=400.0,
    )
    fine(result)
    before, after = steps(result)
    hunter = next(found for found in objects(result) if "checked_pages" in found)
    expect_at_least(hunter["checked_pages"].get("hugetlb_1g_noreserve", 0), 1 << 18)
    expect_at_least(after["pgzeroed_skip_reported"], before["pgzeroed_skip_reported"] + 1)
    assert after["pgzeroed_bad"] == 0


def test_every_way_to_get_them() -> None:
    """The leak hunter's kinds, one by one, so that none is left out."""
    each = "; ".join(
        f"{REPORT}; leak_hunter --kind {kind} --setup --seconds 2 --workers 2 --dirty 32"
        for kind in HUNTER_KINDS
    )
    result = run(f"{DIRTY}; {each}; {COUNT}", cpus=2, timeout=400.0)
    fine(result)
    hunts = [found for found in objects(result) if "checked_pages" in found]
    assert [list(hunt["checked_pages"]) for hunt in hunts] == [[kind] for kind in HUNTER_KINDS]
    assert all(hunt["violations"] == 0 for hunt in hunts)
    expect_at_least(counters(result)["pgzeroed_skip_reported"], 1)
    assert counters(result)["pgzeroed_bad"] == 0
