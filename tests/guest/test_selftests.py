# SPDX-License-Identifier: GPL-2.0
"""The kernel's own selftests of memory management, on the oracle kernel beside the leak hunter and
on the base.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from lab.build import linux as build
from lab.machine import fetch
from tests.guest import selftests
from tests.guest.guests import (
    BALLOON,
    DELAY,
    KERNEL,
    KZEROPAGED,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    run,
    text,
)

pytestmark = [pytest.mark.boots, pytest.mark.nightly, pytest.mark.slow, pytest.mark.hunt]

# Both kernels have the options that the selftests need.
CONFIG = "selftests"
SECONDS = 600  # for each of them, under emulation
SKIPPED = 4  # what kselftest ends with then
# As run_vmtests.sh runs them, with smaller sizes where it takes a machine's.
GROUPS = {
    "anonymous memory": (
        "cow",
        "madv_populate",
        "guard-regions",
        "merge",
        "mremap_test",
        "mremap_dontunmap",
        "mkdirty",
        "process_madv",
        "droppable",
        "mseal_test",
        "mdwe_test",
        "map_fixed_noreplace",
        "map_populate",
        "soft-dirty",
        "pagemap_ioctl",
        "mincore/mincore_selftest",
    ),
    "pinned and locked": (
        "gup_longterm",
        "gup_test -ct -F 0x1 0 19 0x1000",
        "gup_test -u -n 1",
        "gup_test -u -n -1",
        "gup_test -a -n 1",
        "gup_test -a -n -1",
        "mlock-random-test",
        "mlock2-tests",
        "on-fault-limit",
        "memfd_secret",
        "memfd/memfd_test",
        "mrelease_test",
        "pfnmap",
    ),
    "huge pages": (
        "split_huge_page_test",
        "folio_split_race_test",
        "prctl_thp_disable",
        "transhuge-stress -d 20 64",
    ),
    "collapsed": (
        "khugepaged",
        "khugepaged all:shmem",
        "khugepaged -s 4 all:shmem",
        "khugepaged -c 4 mthp_khugepaged:anon",
    ),
    "hugetlb": (
        "hugetlb-mmap",
        "hugetlb-shm",
        "hugetlb-mremap",
        "hugetlb-madvise",
        "hugetlb_dio",
        "hugetlb_fault_after_madv",
        "hugetlb_madv_vs_map",
        "thuge-gen",
    ),
    "moved and merged": (
        "compaction_test",
        "migration",
        "rmap",
        "ksm_functional_tests",
        "ksm_tests -M -p 10",
        "ksm_tests -U",
        "ksm_tests -H -s 100",
        "ksm_tests -P -s 100",
        "ksm_tests -Z -p 10 -z 0",
        "ksm_tests -Z -p 10 -z 1",
        "ksm_tests -N -m 0",
    ),
    "userfaultfd": (
        "uffd-unit-tests",
        "uffd-stress anon 20 16",
        "uffd-stress hugetlb 128 32",
        "uffd-stress hugetlb-private 128 32",
        "uffd-stress shmem 20 16",
        "uffd-stress shmem-private 20 16",
        "uffd-wp-mremap",
    ),
    "failing memory": ("memory-failure", "hugetlb-soft-offline", "hugetlb-read-hwpoison"),
    "processors": ("pkey_sighandler_tests", "va_high_addr_switch"),
    "cgroups": ("cgroup/test_memcontrol", "cgroup/test_hugetlb_memcg"),
    "proc": (
        "proc/proc-pid-vm",
        "proc/proc-empty-vm",
        "proc/proc-self-map-files-001",
        "proc/proc-self-map-files-002",
        "proc/proc-maps-race",
    ),
}
# What the hunter does beside: it must not take pages of a pool that a test counts, or counts on.
BESIDE_A_POOL = ("anon_4k", "thp", "shmem_mmap", "page_tables", "fork_cow")
KINDS = {
    "pinned and locked": BESIDE_A_POOL,
    "hugetlb": BESIDE_A_POOL,
    "userfaultfd": BESIDE_A_POOL,
    "failing memory": BESIDE_A_POOL,
    "cgroups": BESIDE_A_POOL,
    # khugepaged is given three seconds to find a range.
    "collapsed": ("anon_4k", "page_tables"),
}
# Some pages are collapsed on their way back from swap.
SWAP = "echo 256M > /sys/block/zram0/disksize; mkswap /dev/zram0 >/dev/null; swapon /dev/zram0"
BEFORE = {
    "collapsed": SWAP,
    # One maps as much as there is memory, and touches little of it.
    "anonymous memory": "echo 1 > /proc/sys/vm/overcommit_memory",
    "cgroups": f"{SWAP}; mount -o remount,memory_hugetlb_accounting /sys/fs/cgroup",
    "hugetlb": "echo 8 > /proc/sys/vm/nr_hugepages",
    # run_vmtests.sh makes such a pool for it.
    "userfaultfd": "echo 256 > /proc/sys/vm/nr_hugepages",
    "processors": "echo 16 > /proc/sys/vm/nr_hugepages",
    # One leaves eight of them poisoned.
    "failing memory": "echo 16 > /proc/sys/vm/nr_hugepages",
}
# Root may lock more than the limit that this one is about.
AS = {"on-fault-limit": "su nobody -c"}
# A processor with protection keys and five levels of page tables.
PROCESSOR = {group: ["-cpu", "max"] for group in ("processors", "proc")}
# The one called migration wants a CPU besides two.
CPUS = {"moved and merged": 3}

RAN = re.compile(
    r"^selftest: (?P<test>.+): (?P<code>\d+) ?(?:# Totals: pass:(?P<passed>\d+).*)?$", re.MULTILINE
)
NUMBER = r"\b0x[0-9a-f]+|\d+"
PART = re.compile(r"^part: (.+): (ok|not ok) (?:\d+ )?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Ran:
    """How a selftest ended: its exit code, and how many of its parts passed.

    None: it did not print that.
    """

    code: int
    passed: int | None


TRY = f"""
try() {{
    code=0
    rm -f /tmp/log
    (cd /selftests; timeout -k 10 {SECONDS} $2 ./$1) > /tmp/log 2>&1 || code=$?
    sed -nE "s=^(not ok|ok) =part: $1: &=p" /tmp/log
    echo "selftest: $1: $code $(grep '^# Totals: ' /tmp/log | tail -n 1)"
    if [ $code != 0 ]; then
        echo "== $1"; grep '^not ok ' /tmp/log || true; grep -v '^ok ' /tmp/log | tail -n 40
    fi >&2
}}
"""


def script(group: str) -> str:
    """Run a group of selftests."""
    return f"{TRY}\n{BEFORE.get(group, '')}\n{each(GROUPS[group])}"


def beside_the_hunter(group: str) -> str:
    """Run a group of selftests while the hunter goes on and on."""
    hunt = "leak_hunter --seconds 20 --seed $n --workers 1 --dirty 64"
    hunts = "; ".join(f"{hunt} --kind {kind}" for kind in KINDS.get(group, ())) or hunt
    return f"""{TRY}
{BEFORE.get(group, "")}
echo 50 > {DELAY}; {KZEROPAGED}
(n=1; while [ ! -e /tmp/done ]; do {hunts}; n=$((n + 1)); done) &
hunter=$!
{each(GROUPS[group])}
touch /tmp/done
wait $hunter
grep pgzeroed_ /proc/vmstat
"""


def each(tests: Iterable[str]) -> str:
    """A line of a script for each test."""
    return "\n".join(f"try '{test}' '{AS.get(test, '')}'" for test in tests)


def ran(result: BootResult) -> dict[str, Ran]:
    """What the selftests of a guest came to."""
    return {
        found["test"]: Ran(int(found["code"]), int(found["passed"]) if found["passed"] else None)
        for found in RAN.finditer(text(result))
    }


def parts(result: BootResult) -> set[str]:
    """How the parts of the selftests of a guest ended, without the numbers in their names.

    These may differ.
    """
    return {
        f"{test}: {'skipped' if '# SKIP' in name else state}: {re.sub(NUMBER, 'N', name)}"
        for test, state, name in PART.findall(text(result))
    }


def judge(
    found: dict[str, Ran], group: str, skips: dict[str, str], failures: dict[str, str]
) -> list[str]:
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
SKIPS = {"pfnmap": "these kernels have no /dev/mem: CONFIG_VIRTIO_MEM depends on a strict one"}
# Programs of selftests/mm in no group, and why. Of its scripts, test_vmalloc and test_page_frag
# load modules, and charge_reserved_hugetlb and hugetlb_reparenting_test need bash: the guests have
# neither. cgroup/test_kmem fails here, as a tmpfs keeps no negative dentries, and its test of
# deletions fails at times on the base kernel. There, memfd_test hugetlbfs aborts without a message,
# ksm_tests -N -m 1 fails in one run of eight, and khugepaged -s 2 in two of nine, on ours in three.
LEFT_OUT = {
    "hmm-tests": "on the base kernel as well it ends with 1, without totals, after its benchmark",
    "protection_keys": "on the base kernel it ends with 0 after 21, 50, 52, 91 or 78 of its 462 "
    "parts",
    "write_to_hugetlbfs": "a helper of charge_reserved_hugetlb",
}
# Why one fails in these guests, without the series as well.
FAILURES = {
    "map_populate": "it wants a pair of Unix sockets, and these kernels have no CONFIG_UNIX",
    "cgroup/test_memcontrol": "it wants files on a disk, sockets and inotify",
    "mincore/mincore_selftest": "a tmpfs, as the root is one, reads nothing ahead",
    "hugetlb-soft-offline": "it looks at errno after a call that returned 0",
}


def programs(tests: Iterable[str]) -> list[tuple[Path, str]]:
    """The programs of tests, with their place in a guest."""
    names = dict.fromkeys(test.split()[0] for test in tests)
    return [(selftests.build(name), f"/selftests/{name}") for name in names]


def guest(group: str, kernel: str | Path, script: str, devices: list[str]) -> BootResult:
    """Run a group of selftests."""
    return run(
        script,
        kernel=kernel,
        devices=devices,
        cpus=CPUS.get(group, 2),
        memory="2G",
        # A pool's page may come from the area for contiguous allocations, and cannot be pinned for
        # long then.
        append="numa=fake=2 cma=0",
        extra_qemu=PROCESSOR.get(group, []),
        add=programs(GROUPS[group]),
        timeout=8000.0,
    )


@pytest.mark.timeout(17000)
@pytest.mark.parametrize("group", GROUPS)
def test_selftests(group: str, record_property: Record) -> None:
    kernel = build.build_linux(KERNEL, config=CONFIG) if KERNEL in build.VARIANTS else KERNEL
    ours = guest(group, kernel, beside_the_hunter(group), [BALLOON])
    fine(ours)
    base = guest(group, build.build_linux("base", config=CONFIG), script(group), [])
    fine(base)
    for result in (base, ours):
        wrong = judge(ran(result), group, SKIPS, FAILURES)
        assert not wrong, f"{wrong}\n{result.stderr[-4000:]}"
    assert ran(base) == ran(ours)
    only = parts(base) ^ parts(ours)
    assert not only, f"these parts ended differently without the series: {sorted(only)}"
    states = Counter(part.split(": ")[1] for part in parts(ours))
    print(
        f"{len(GROUPS[group])} selftests ended alike on both kernels; kinds of parts: "
        f"{dict(states)}"
    )
    hunted(ours, record_property)
    expect_at_least(counters(ours)["pgzeroed_skip"], 1)


def test_no_program_of_mm_is_forgotten() -> None:
    folder = fetch.pristine(fetch.obtain("linux")) / "tools" / "testing" / "selftests" / "mm"
    main = re.compile(r"^(?:int main\(|TEST_HARNESS_MAIN)", re.MULTILINE)
    there = {
        file.stem for file in folder.glob("*.c") if main.search(file.read_text(encoding="utf-8"))
    }
    run_here = {test.split()[0] for tests in GROUPS.values() for test in tests if "/" not in test}
    assert there == run_here | LEFT_OUT.keys()
