# SPDX-License-Identifier: GPL-2.0
"""The kernel's own selftests of memory management, on the oracle kernel and beside the leak hunter."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from tests.guest import selftests
from tests.guest.guests import BALLOON, DELAY, Record, counters, expect_at_least, fine, hunted, run, text

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow]

ZP = "/sys/kernel/mm/zero_page"
SECONDS = 600  # for each of them, under emulation
SKIPPED = 4  # what kselftest ends with then
# As run_vmtests.sh runs them, with smaller sizes where it takes a machine's.
GROUPS = {
    "anonymous memory": (
        "cow", "madv_populate", "guard-regions", "merge", "mremap_test", "mremap_dontunmap", "mkdirty",
        "process_madv", "droppable", "mseal_test", "mdwe_test", "map_fixed_noreplace", "map_populate",
        "soft-dirty", "pagemap_ioctl",
    ),
    "pinned and locked": (
        "gup_longterm", "gup_test -ct -F 0x1 0 19 0x1000", "gup_test -u -n 1", "gup_test -a -n 1",
        "mlock-random-test", "mlock2-tests", "memfd_secret", "mrelease_test",
    ),
    "huge pages": (
        "split_huge_page_test", "folio_split_race_test", "prctl_thp_disable", "transhuge-stress -d 20 64",
    ),
    "collapsed": ("khugepaged", "khugepaged all:shmem"),
    "hugetlb": (
        "hugetlb-mmap", "hugetlb-shm", "hugetlb-mremap", "hugetlb-madvise", "hugetlb_dio",
        "hugetlb_fault_after_madv", "hugetlb_madv_vs_map", "thuge-gen",
    ),
    "moved and merged": (
        "compaction_test", "migration", "rmap", "ksm_functional_tests", "ksm_tests -M -p 10", "ksm_tests -U",
        "ksm_tests -Z -p 10 -z 0", "ksm_tests -Z -p 10 -z 1", "ksm_tests -N -m 1", "ksm_tests -N -m 0",
    ),
    "userfaultfd": (
        "uffd-unit-tests", "uffd-stress anon 20 16", "uffd-stress shmem 20 16",
        "uffd-stress shmem-private 20 16", "uffd-wp-mremap",
    ),
}  # fmt: skip
# What the hunter does beside: it must not take pages of a pool that a test counts, or counts on.
BESIDE_A_POOL = ("anon_4k", "thp", "shmem_mmap", "page_tables", "fork_cow")
KINDS = {
    "hugetlb": BESIDE_A_POOL,
    "userfaultfd": BESIDE_A_POOL,
    # khugepaged is given three seconds to find a range.
    "collapsed": ("anon_4k", "page_tables"),
}
# Some pages are collapsed on their way back from swap.
SWAP = "echo 256M > /sys/block/zram0/disksize; mkswap /dev/zram0 >/dev/null; swapon /dev/zram0"
BEFORE = {
    "collapsed": SWAP,
    # One maps as much as there is memory, and touches little of it.
    "anonymous memory": "echo 1 > /proc/sys/vm/overcommit_memory",
}
# The one called migration wants a CPU besides two.
CPUS = {"moved and merged": 3}

RAN = re.compile(
    r"^selftest: (?P<test>.+): (?P<code>\d+) ?(?:# Totals: pass:(?P<passed>\d+).*)?$", re.MULTILINE
)


@dataclass(frozen=True)
class Ran:
    """How a selftest ended: its exit code, and how many of its parts passed (None: it did not say)."""

    code: int
    passed: int | None


TRY = f"""
try() {{
    code=0
    (cd /selftests; timeout -k 10 {SECONDS} ./$1) > /tmp/log 2>&1 || code=$?
    echo "selftest: $1: $code $(grep '^# Totals: ' /tmp/log | tail -n 1)"
    if [ $code != 0 ]; then echo "== $1"; grep '^not ok ' /tmp/log || true; grep -v '^ok ' /tmp/log | tail -n 40; fi >&2
}}
"""


def script(group: str) -> str:
    """Run a group of selftests while the hunter goes on and on."""
    hunt = "leak_hunter --seconds 20 --seed $n --workers 1 --dirty 64"
    hunts = "; ".join(f"{hunt} --kind {kind}" for kind in KINDS.get(group, ())) or hunt
    return f"""{TRY}
{BEFORE.get(group, "")}
echo 50 > {DELAY}; echo 20 > {ZP}/delay_millisecs; echo 0 > {ZP}/mini_order; echo 1 > {ZP}/enabled
(n=1; while [ ! -e /tmp/done ]; do {hunts}; n=$((n + 1)); done) &
hunter=$!
{each(GROUPS[group])}
touch /tmp/done
wait $hunter
grep pgzeroed_ /proc/vmstat
"""


def each(tests: Iterable[str]) -> str:
    """A line of a script for each test."""
    return "\n".join(f"try '{test}'" for test in tests)


def ran(result: BootResult) -> dict[str, Ran]:
    """What the selftests of a guest came to."""
    return {
        found["test"]: Ran(int(found["code"]), int(found["passed"]) if found["passed"] else None)
        for found in RAN.finditer(text(result))
    }


def judge(found: dict[str, Ran], group: str, skips: dict[str, str], failures: dict[str, str]) -> list[str]:
    """What is wrong: a test that did not pass and was not expected to, or passed and was not."""
    wrong = []
    for test in GROUPS[group]:
        if test not in found:
            wrong.append(f"{test}: did not end")
            continue
        how = found[test]
        if how.code == 0 and how.passed == 0:
            how = Ran(SKIPPED, 0)
        if test in skips:
            print(f"{test}: skipped: {skips[test]}")
        elif test in failures:
            print(f"{test}: fails without the series as well: {failures[test]}")
        expected = SKIPPED if test in skips else 1 if test in failures else 0
        if how.code != expected:
            wrong.append(f"{test}: ended with {how.code}, not {expected}")
    return wrong


# Why a test cannot do its work in these guests.
SKIPS = {"soft-dirty": "the lab's kernels have no CONFIG_MEM_SOFT_DIRTY"}
# Why one fails here, and does so on the base kernel: see test_what_fails_fails_without_the_series.
FAILURES = {"map_populate": "it wants a pair of Unix sockets, and the lab's kernels have no CONFIG_UNIX"}


def programs(tests: Iterable[str]) -> list[tuple[Path, str]]:
    """The programs of tests, with their place in a guest."""
    names = dict.fromkeys(test.split()[0] for test in tests)
    return [(selftests.build(name), f"/selftests/{name}") for name in names]


@pytest.mark.timeout(9000)
@pytest.mark.parametrize("group", GROUPS)
def test_selftests(group: str, record_property: Record) -> None:
    result = run(
        script(group),
        devices=[BALLOON],
        cpus=CPUS.get(group, 2),
        memory="2G",
        # A pool's page may come from the area for contiguous allocations, and cannot be pinned for long then.
        append="numa=fake=2 cma=0",
        add=programs(GROUPS[group]),
        timeout=8000.0,
    )
    fine(result)
    wrong = judge(ran(result), group, SKIPS, FAILURES)
    assert not wrong, f"{wrong}\n{result.stderr[-4000:]}"
    hunted(result, record_property)
    found = counters(result)
    expect_at_least(found["pgzeroed_skip"], 1)
    expect_at_least(found["pgzeroed_skip"], 1)


@pytest.mark.timeout(9000)
def test_what_fails_fails_without_the_series() -> None:
    result = run(
        TRY + each(FAILURES),
        kernel="base",
        devices=[],
        cpus=2,
        memory="2G",
        append="numa=fake=2",
        add=programs(FAILURES),
        timeout=8000.0,
    )
    fine(result)
    assert {test: how.code for test, how in ran(result).items()} == dict.fromkeys(FAILURES, 1)
