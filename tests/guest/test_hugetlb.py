# SPDX-License-Identifier: GPL-2.0
"""Huge pages of hugetlb that are known to be zero: on the oracle kernel."""

from __future__ import annotations

import itertools

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
COUNT = "grep pgzeroed_ /proc/vmstat"
MB = 128
PAGES = MB << 8
ALLOC = f"alloc_once --size {MB} --pages hugetlb --verify --mode touch_all"
HUNTER_KINDS = (
    "hugetlb_pool",
    "hugetlb_surplus",
    "hugetlb_noreserve",
    "hugetlb_memfd",
    "hugetlb_grow",
    "hugetlb_file",
    "hugetlb_cow",
)
# The pool gives back the struct pages of each folio that it does not need.
HVO = "hugetlb_free_vmemmap=on"


def grow(pages: int, path: str = POOL) -> str:
    """Set the size of a pool and check that it was reached.

    A range of 1 GiB may need another try.
    """
    reached = f"test $(cat {path}) = {pages}"
    return f"for i in 1 2 3; do echo {pages} > {path}; {reached} && break; sleep 1; done; {reached}"


def steps(result: BootResult) -> list[dict[str, int]]:
    """The counters each time that the guest printed them (COUNT)."""
    found: list[dict[str, int]] = []
    for line in text(result).splitlines():
        if not line.startswith("pgzeroed_"):
            continue
        name, value = line.split()
        if not found or name in found[-1]:
            found.append({})
        found[-1][name] = int(value)
    return found


def deltas(result: BootResult) -> list[dict[str, int]]:
    """The changes of the counters between two steps."""
    found = steps(result)
    return [{name: b[name] - a[name] for name in b} for a, b in itertools.pairwise(found)]


@pytest.mark.parametrize(
    "append", ["", HVO, "debug_pagealloc=on"], ids=["plain", "hvo", "debug_pagealloc"]
)
def test_pool(append: str) -> None:
    """Growing the pool keeps what is known and zeroes nothing; a used page is dirty."""
    result = run(
        f"{DIRTY}; {REPORT}; {COUNT}; {grow(MB // 2)}; {COUNT}; {ALLOC}; {COUNT}; {ALLOC}; {COUNT}",
        append=append,
        checked="debug" not in append,
    )
    fine(result)
    grown, first, second = deltas(result)
    expect_at_most(grown["pgzeroed_cleared"], 0.02 * PAGES)
    expect_at_most(grown["pgzeroed_lost"], 0.02 * PAGES)
    expect_at_least(first["pgzeroed_skip"], 0.99 * PAGES)
    expect_at_most(first["pgzeroed_cleared"], 0.02 * PAGES)
    # The same pages again, with what the first program wrote.
    assert second["pgzeroed_cleared"] >= PAGES
    assert second["pgzeroed_skip"] <= 0.02 * PAGES
    assert counters(result)["pgzeroed_bad"] == 0


def test_pool_with_init_on_alloc() -> None:
    """A pool that grows is zeroed then, and not again when it is used."""
    result = run(
        f"{DIRTY}; {COUNT}; {grow(MB // 2)}; {COUNT}; {ALLOC}; {COUNT}",
        append="init_on_alloc=1 page_reporting.page_reporting_delay_ms=3600000",
        checked=True,
    )
    fine(result)
    grown, used = deltas(result)
    expect_at_least(grown["pgzeroed_cleared"], 0.95 * PAGES)
    expect_at_least(used["pgzeroed_skip"], 0.99 * PAGES)
    expect_at_most(used["pgzeroed_cleared"], 0.02 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


def test_surplus() -> None:
    """Pages that a mapping reserves beyond the pool."""
    result = run(
        f"echo {MB // 2} > {SURPLUS}; {DIRTY}; {REPORT}; {COUNT}; {ALLOC}; {COUNT}", checked=True
    )
    fine(result)
    (delta,) = deltas(result)
    expect_at_least(delta["pgzeroed_skip"], 0.99 * PAGES)
    expect_at_most(delta["pgzeroed_cleared"], 0.02 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.parametrize("append", ["", HVO], ids=["plain", "hvo"])
def test_shrunk_pool_is_still_known(append: str) -> None:
    """Unused pages return to the page allocator as known zero."""
    result = run(
        f"{DIRTY}; {REPORT}; {grow(MB)}; {COUNT}; {grow(0)}; {COUNT}; {grow(MB // 2)}; {COUNT}; "
        f"{ALLOC}; {COUNT}",
        append=append,
        checked=True,
    )
    fine(result)
    shrunk, _, used = deltas(result)
    expect_at_least(shrunk["pgzeroed_set_freed"], 0.99 * 2 * PAGES)
    expect_at_least(used["pgzeroed_skip"], 0.99 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


def test_reservation_fails() -> None:
    """A mapping that needs more than there is: what was allocated for it stays known zero."""
    result = run(
        f"echo {MB // 2} > {SURPLUS}; {DIRTY}; {REPORT}; {COUNT}; if alloc_once --size {MB + 2} "
        f"--pages hugetlb 2>/dev/null; then echo reserved; fi; {COUNT}; {ALLOC}; {COUNT}",
        checked=True,
    )
    fine(result)
    assert "reserved" not in text(result)
    failed, used = deltas(result)
    expect_at_least(failed["pgzeroed_set_freed"], 0.99 * PAGES)
    expect_at_least(used["pgzeroed_skip"], 0.99 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


def test_charge_fails() -> None:
    """A page that the memory cgroup refuses returns to the pool known to be zero."""
    small = "alloc_once --size 2 --pages hugetlb --verify"
    result = run(
        "mkdir -p /tmp/cg; mount -t cgroup2 -o memory_hugetlb_accounting none /tmp/cg; "
        "echo +memory > /tmp/cg/cgroup.subtree_control; mkdir /tmp/cg/small; "
        f"echo 2M > /tmp/cg/small/memory.max; {DIRTY}; {REPORT}; {grow(1)}; {COUNT}; "
        f"if sh -c 'echo $$ > /tmp/cg/small/cgroup.procs; exec {small}' 2>/dev/null; "
        f"then echo charged; fi; grep '^max [1-9]' /tmp/cg/small/memory.events; {COUNT}; {small}; "
        f"{COUNT}",
        checked=True,
    )
    fine(result)
    assert "charged" not in text(result)
    failed, used = deltas(result)
    expect_at_most(failed["pgzeroed_skip"] + failed["pgzeroed_cleared"], 511)
    expect_at_least(used["pgzeroed_skip"], 512)
    assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.parametrize("append", ["init_on_alloc=1", "page_poison=1", "init_on_free=1"])
def test_zero_with_debugging_aids(append: str) -> None:
    result = run(
        f"{DIRTY}; {REPORT}; {grow(MB // 2)}; {ALLOC} --reps 2; {COUNT}",
        append=append,
        checked="poison" not in append,
    )
    fine(result)
    assert counters(result)["pgzeroed_bad"] == 0


def test_a_false_answer_is_found_in_the_pool() -> None:
    """The first page that is not zero ends the trust in all pages of the pool."""
    result = run(
        # Less is left as it was than the pool takes.
        f"{DIRTY.replace('70', '85')}; {REPORT}; {grow(MB // 2)}; {COUNT}; {ALLOC}; {COUNT}",
        devices=[],
        append="page_zeroed_reporter.mode=lie",
        allow_warnings=True,
    )
    assert any("page_zeroed: BUG" in line for line in result.violations), text(result)[-2000:]
    assert result.exit_code == 0  # --verify: it was zeroed before the program got it
    assert counters(result)["pgzeroed_bad"] > 0
    # Before that page there may be pages that nothing had written to.
    (delta,) = deltas(result)
    assert delta["pgzeroed_skip"] <= PAGES * 3 // 4
    # Distrusted pages are zeroed again and count as lost.
    assert delta["pgzeroed_cleared"] + delta["pgzeroed_lost"] >= PAGES - delta["pgzeroed_skip"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "append",
    [
        pytest.param("movablecore=3G", id="contiguous", marks=pytest.mark.nightly),
        pytest.param("hugetlb_cma=1G", id="cma"),
    ],
)
def test_gigantic(append: str) -> None:
    """A page of 1 GiB that is made of many known-zero blocks, and the pages it is demoted to.

    One unmovable page in each GiB is enough to have no such range, so there are 3 GiB where
    only movable pages may be.
    """
    result = run(
        "echo 1 > /proc/sys/vm/movable_gigantic_pages; "
        # The hunter makes it dirty.
        f"{REPORT}; {grow(1, GIGANTIC + '/nr_hugepages')}; {COUNT}; leak_hunter --kind hugetlb_1g "
        f"--workers 1 --dirty 0 --seconds 1; {COUNT}; {grow(0, GIGANTIC + '/nr_hugepages')}; "
        f"{REPORT}; {grow(1, GIGANTIC + '/nr_hugepages')}; echo 1 > {GIGANTIC}/demote; test $(cat "
        f"{POOL}) = 512; {COUNT}; {ALLOC}; {COUNT}; {grow(0)}",
        memory="5G",
        append=append,
        timeout=400.0,
    )
    fine(result)
    used, _, demoted = deltas(result)
    hunter = next(found for found in objects(result) if "checked_pages" in found)
    assert hunter["checked_pages"]["hugetlb_1g"] >= 1 << 18
    expect_at_least(used["pgzeroed_skip"], 1 << 18)
    expect_at_least(demoted["pgzeroed_skip"], 0.99 * PAGES)
    assert counters(result)["pgzeroed_bad"] == 0


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
    for hunt in hunts:
        expect_at_least(hunt["vmstat"]["pgzeroed_skip"], 512)
    assert counters(result)["pgzeroed_bad"] == 0
