# SPDX-License-Identifier: GPL-2.0
"""The kernel under other command lines: nothing leaks, and memory is known zero where it can be."""

from __future__ import annotations

import pytest

from tests.guest.guests import DIRTY, REPORT, counters, expect_at_least, fine, objects, run

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.matrix]

USE = "alloc_once --size 256 --pages {} --verify --mode touch_all"
PAGES = 256 << 8

# The parameters, and whether what the host says about its pages is of use then.
COMMAND_LINES = {
    "init_on_alloc=1": True,
    "init_on_free=1": False,
    "init_on_alloc=1 init_on_free=1": False,
    "page_poison=1": False,
    "debug_pagealloc=on": True,
    "page_owner=on slub_debug=FZPU": True,
    "transparent_hugepage=never": True,
    "hugetlb_free_vmemmap=on hugepages=32": True,
    "hugetlb_cma=64M": True,
    "numa=off": True,
    "numa=fake=4": True,
    "maxcpus=1": True,
    "movablecore=256M": True,
    "kernelcore=mirror": True,
    "cgroup_disable=memory": True,
    "page_alloc.shuffle=1": True,
    "page_reporting.page_reporting_order=0": True,
    "prezero=on": True,
}


@pytest.mark.parametrize("append", COMMAND_LINES)
def test_command_line(append: str) -> None:
    pages = "nothp" if append == "transparent_hugepage=never" else "thp"
    result = run(
        f"{DIRTY}; {REPORT}; {USE.format(pages)}; leak_hunter --setup --seconds 15 --seed 1 "
        "--workers 2; grep pgzeroed_ /proc/vmstat",
        append=append,
        cpus=2,
    )
    fine(result)
    used, hunter = objects(result)
    assert hunter["violations"] == 0
    assert counters(result).get("pgzeroed_bad", 0) == 0
    expect_at_least(len(hunter["checked_pages"]), 5)
    skipped = used["vmstat"]["pgzeroed_skip"]
    if COMMAND_LINES[append]:
        expect_at_least(skipped, 0.9 * PAGES)
    else:
        assert skipped == 0
