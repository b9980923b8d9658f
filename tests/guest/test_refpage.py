# SPDX-License-Identifier: GPL-2.0
"""Reference pages.

The kernel's selftest, with a boot for each test that needs its own, and the fuzzer.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from lab.boot.guest import BootResult
from lab.build import linux as build
from tests.guest import selftests
from tests.guest.guests import (
    DIRTY,
    REPORT,
    OutOfLuck,
    Record,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

SECONDS = int(os.environ.get("KNOWNZERO_FUZZ_SECONDS", "180"))
SEED = int(os.environ.get("KNOWNZERO_FUZZ_SEED", "1"))

SWAP = "echo 256M > /sys/block/zram0/disksize; mkswap /dev/zram0 >/dev/null; swapon /dev/zram0; "
RESULT = re.compile(
    r"^(ok|not ok) \d+ (?:refpage\.)?(?P<name>\S+)(?: # (?P<skip>SKIP.*))?$", re.MULTILINE
)
# Each has a boot of its own below.
SPECIAL = {"pressure", "migration"}
# A pattern of zeros has no page that could be charged or have a memory error.
NOT_OF_ZEROS = {"zero.memcg", "zero.memory_error", "zero.core_dump_with_memory_error"}
# Each fails on a kernel that treats the mapping as that of a file: findings that are closed stay
# so.
AS_ANONYMOUS_MEMORY = {
    "core_dump",
    "core_dump_with_memory_error",
    "rss",
    "seal",
    "neighbours_merge",
    "large_folios",
    "lazy_free",
    "wipe_on_fork",
    "name",
    "read_back",
    "userfaultfd_missing",
    "memlock",
    "no_truncation",
}
# The tests of memory tags, which are compiled for arm64 only: of five contents, seven each.
TAGS = "mte."
NUMBER_OF_TAGS_TESTS = 5 * 7
# User-Mode Linux has no swap, KSM, userfaultfd, memory errors, control groups, gup_test, larger
# folios.
NOT_IN_UM = {
    "swap",
    "ksm",
    "userfaultfd_wp",
    "userfaultfd_missing",
    "memory_error",
    "core_dump_with_memory_error",
    "memcg",
    "longterm_pin",
    "longterm_pin_fast",
    "process_vm",
    "large_folios",
    "name",
    "seal",
    "read_back",
}


def selftest(
    arguments: str = "", arch: str = "x86_64", **more: object
) -> tuple[BootResult, dict[str, list[str]]]:
    """Run the selftest, with swap if there is any.

    Its tests by how they ended (passed, failed, skipped).
    """
    options: dict[str, object] = {"devices": [], "timeout": 420.0} | more
    result = run(
        f"{'' if arch == 'um' else SWAP}refpage_test {arguments}",
        arch=arch,
        add=[(selftests.build("refpage", arch), "/bin/refpage_test")],
        **options,  # type: ignore[arg-type]
    )
    found: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for match in RESULT.finditer(text(result)):
        state = "skipped" if match["skip"] else "passed" if match[1] == "ok" else "failed"
        found[state].append(match["name"])
    return result, found


def names(tests: list[str]) -> set[str]:
    """Without the pattern they ran for."""
    return {test.rpartition(".")[2] for test in tests}


def left_out(found: dict[str, list[str]]) -> set[str]:
    """The names of skipped tests, except where a pattern of zeros has nothing to test."""
    return names([test for test in found["skipped"] if test not in NOT_OF_ZEROS])


@pytest.mark.parametrize(
    ("cpus", "append"),
    [
        (2, "init_on_alloc=1"),
        pytest.param(1, "", marks=pytest.mark.nightly),
        pytest.param(2, "", marks=pytest.mark.nightly),
        pytest.param(1, "init_on_free=1", marks=pytest.mark.nightly),
        pytest.param(1, "page_poison=1", marks=pytest.mark.nightly),
    ],
)
def test_the_selftest(cpus: int, append: str) -> None:
    result, found = selftest(cpus=cpus, append=append)
    assert not found["failed"], (
        f"{found['failed']} (console: {result.console})\n{text(result)[-3000:]}"
    )
    fine(result)
    assert left_out(found) <= SPECIAL
    assert names(found["passed"]) >= AS_ANONYMOUS_MEMORY
    # Each of the tests that are left has run for all three patterns.
    assert len(found["passed"]) >= 3 * 30


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("append", ["", "init_on_alloc=1"])
def test_the_selftest_with_memory_tags(append: str) -> None:
    """On arm64, emulated."""
    result, found = selftest(
        arch="arm64",
        kernel=build.build_linux("debug", "arm64"),
        mte=True,
        cpus=2,
        append=append,
        timeout=3000.0,
    )
    assert not found["failed"], (
        f"{found['failed']} (console: {result.console})\n{text(result)[-3000:]}"
    )
    fine(result)
    tagged = {test for test in found["passed"] if test.startswith(TAGS)}
    assert len(tagged) == NUMBER_OF_TAGS_TESTS
    assert left_out(found) <= SPECIAL
    assert len(found["passed"]) >= len(tagged) + 3 * 30


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_selftest_on_a_processor_without_memory_tags() -> None:
    result, found = selftest(
        arch="arm64", kernel=build.build_linux("debug", "arm64"), cpus=2, timeout=3000.0
    )
    assert not found["failed"], (
        f"{found['failed']} (console: {result.console})\n{text(result)[-3000:]}"
    )
    fine(result)
    assert {test for test in found["skipped"] if test.startswith(TAGS)}
    assert names([test for test in found["skipped"] if not test.startswith(TAGS)]) <= SPECIAL | {
        test.rpartition(".")[2] for test in NOT_OF_ZEROS
    }
    assert len(found["passed"]) >= 3 * 30


@pytest.mark.nightly
def test_the_selftest_in_user_mode_linux() -> None:
    # Each page that these two map is a mapping of the host, which allows 65,530 (vm.max_map_count).
    # Beyond that, User-Mode Linux kills the process with a lock held.
    many = ("neighbours_merge", "rss")
    result, found = selftest(
        " ".join(f"-T {test}" for test in many), arch="um", memory="512M", timeout=900.0
    )
    assert not found["failed"], (
        f"{found['failed']} (console: {result.console})\n{text(result)[-3000:]}"
    )
    fine(result)
    skipped = left_out(found)
    print(f"skipped: {sorted(skipped)}")
    assert skipped <= SPECIAL | NOT_IN_UM
    assert len(found["passed"]) >= 3 * 20


def test_first_writes_in_user_mode_linux() -> None:
    """In seconds what mutants of the fill must fail."""
    tests = ("first_write", "nothing_uninitialised", "fork")
    result, found = selftest(" ".join(f"-t {test}" for test in tests), arch="um", memory="256M")
    assert not found["failed"], f"{found['failed']} (console: {result.console})"
    fine(result)
    assert names(found["passed"]) == set(tests)


@pytest.mark.nightly
def test_memory_pressure() -> None:
    result, found = selftest("-t pressure", memory="192M", cpus=2, append="init_on_alloc=1")
    fine(result)
    assert found["skipped"] == found["failed"] == []
    assert len(found["passed"]) == 3


def test_migration_between_nodes() -> None:
    result, found = selftest("-t migration", append="numa=fake=2")
    fine(result)
    assert found["skipped"] == found["failed"] == []
    assert len(found["passed"]) == 3


READ_AND_GROW = r"""
set +e
echo 1 > /proc/sys/vm/overcommit_memory
refpage_bench --method refpage --map 1073741824 --touch 4096 --loops 1000 --check >/dev/null &
reader=
for i in $(seq 90); do
  sleep 1
  for d in /proc/[0-9]*; do
    k=$(sed -n 's/^VmPTE:[^0-9]*\([0-9]*\).*/\1/p' $d/status 2>/dev/null)
    [ "${k:-0}" -gt 1000 ] && reader=${d#/proc/}
  done
  [ -n "$reader" ] && break
done
echo rss $(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\).*/\1/p' /proc/$reader/status)
tail /dev/zero
dmesg | sed -n 's/.*Killed process [0-9]* (\(.*\)) total.*/killed \1/p'
[ -d /proc/$reader ] && echo reader lives
kill $reader
"""


def test_the_oom_killer_leaves_a_reader_alone() -> None:
    """A process reads twice the memory or more of a mapping, another one takes all memory.

    Killing the reader frees nothing.
    """
    result = run(READ_AND_GROW, devices=[], memory="256M", allow_warnings=True, checked=True)
    told = text(result)
    match = re.search(r"^rss (\d+)$", told, re.MULTILINE)
    assert match and int(match[1]) < 64 << 10, told
    assert re.findall("^killed (.*)$", told, re.MULTILINE) == ["tail"], told
    assert "reader lives" in told


def test_zero_content_needs_no_zeroing() -> None:
    """An all-zero pattern is anonymous memory by another name.

    Reported memory is not zeroed again.
    """
    job = (
        "refpage_bench --method refpage --byte {} --map 67108864 --touch 67108864 --loops 1 --check"
    )
    result = run(
        f"{DIRTY}; {REPORT}; {job.format(0)}; {REPORT}; {job.format(170)}; grep pgzeroed_ "
        "/proc/vmstat",
        checked=True,
    )
    fine(result)
    zero, pattern = (told["vmstat"] for told in objects(result))
    # A little less than other single pages get from reported memory.
    expect_at_least(zero["pgzeroed_skip"], 0.8 * (64 << 8))
    # Zeros are of no use to a pattern, and it is not zeroed either.
    expect_at_most(pattern["pgzeroed_skip"], 0.05 * (64 << 8))
    expect_at_most(pattern["pgzeroed_cleared"], 0.05 * (64 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_an_allocator_that_uses_it() -> None:
    # The last command of a shell takes over its process, and the shell's RSS would count.
    both = "refpage_heap --init memset; refpage_heap --init auto; true"
    result = run(both, devices=[], checked=True)
    fine(result)
    before, after = objects(result)
    assert after["init"] == "refpage"
    expect_at_most(after["minor_faults"], before["minor_faults"] / 4)
    assert after["max_rss_kb"] < before["max_rss_kb"]


# What the fuzzer can count for each operation that has a part in reference pages, at least.
SUCCEED = {
    "refpage_create",
    "mmap_refpage",
    "mmap_other",
    "munmap",
    "mremap",
    "mremap_dontunmap",
    "mprotect",
    "madvise_dontneed",
    "madvise_free",
    "madvise_wipeonfork",
    "madvise_mergeable",
    "madvise_hugepage",
    "madvise_cold",
    "madvise_pageout",
    "madvise_populate_read",
    "madvise_populate_write",
    "madvise_dontfork",
    "mlock",
    "munlock",
    "munlockall",
    "fork",
    "load",
    "store",
    "process_vm_readv",
    "process_vm_writev",
    "write_from",
    "read_into",
    "mem_read",
    "mem_write",
    "fd_close",
    "fd_dup",
}
REFUSED = {
    "refpage_create": {"EINVAL", "EFAULT", "EMFILE"},
    "mmap_refpage": {"EINVAL", "EACCES", "EEXIST"},
    "mprotect": {"ENOMEM"},
    "madvise_remove": {"EACCES"},
    "mremap_bad": {"EINVAL"},
}
NEVER = (
    "fd_read",
    "fd_write",
    "fd_pread",
    "fd_pwrite",
    "fd_fallocate",
    "fd_ftruncate",
    "fd_sendfile",
)
KSM = "echo 1000 > /sys/kernel/mm/ksm/pages_to_scan; echo 1 > /sys/kernel/mm/ksm/run; "


def fuzz(
    arguments: tuple[str, ...], beside: str = "", **more: object
) -> tuple[BootResult, list[dict[str, Any]]]:
    """Run a fuzzer with each of the arguments, side by side, with swap and KSM.

    The report of each.
    """
    started = "".join(f'refpage_fuzz {one} & jobs="$jobs $!"; ' for one in arguments)
    result = run(
        f"{SWAP}{KSM}jobs=; {beside}{started}for job in $jobs; do wait $job; done; "
        "grep -E 'pswp|ksm_swpin' /proc/vmstat",
        cpus=2,
        devices=[],
        **more,  # type: ignore[arg-type]
    )
    fine(result)
    reports = [told for told in objects(result) if "operations" in told]
    assert len(reports) == len(arguments)
    for told in reports:
        assert told["violations"] == 0
        for name in NEVER:
            assert "ok" not in told["operations"][name], name
    return result, reports


def together(reports: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """What all fuzzers did: calls by operation and by errno."""
    sums: dict[str, dict[str, int]] = {}
    for told in reports:
        for name, counts in told["operations"].items():
            mine = sums.setdefault(name, {})
            for error, number in counts.items():
                mine[error] = mine.get(error, 0) + number
    return sums


def all_had_their_turn(reports: list[dict[str, Any]]) -> None:
    """Chance decides what is called; with seeds that are given, it is the same calls each time."""
    sums = together(reports)
    missing = {f"{name} succeeds" for name in SUCCEED if not sums[name].get("ok")}
    missing |= {
        f"{name}: {error}" for name, errors in REFUSED.items() for error in errors - set(sums[name])
    }
    if missing:
        raise OutOfLuck(f"what never came: {sorted(missing)}")
    expect_at_least(min(told["checked_pages"] for told in reports), 1000)


def tell(reports: list[dict[str, Any]], record: Record) -> None:
    """How much was fuzzed goes into the report of the tests."""
    record("fuzz_calls", sum(sum(counts.values()) for counts in together(reports).values()))
    record("fuzz_pages", sum(told["checked_pages"] for told in reports))


def swapped(result: BootResult) -> dict[str, int]:
    """The counters of /proc/vmstat that the fuzzers' guest printed."""
    return {
        name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", text(result), re.MULTILINE)
    }


@pytest.mark.fuzz
def test_random_system_calls(record_property: Record) -> None:
    result, reports = fuzz(
        tuple(f"--seconds 10 --steps 1000 --seed {SEED + i}" for i in range(2)), timeout=480.0
    )
    tell(reports, record_property)
    all_had_their_turn(reports)
    expect_at_least(swapped(result)["pswpin"], 1)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("append", ["", "init_on_free=1"])
@pytest.mark.timeout(600 + 3 * SECONDS)
def test_random_system_calls_under_pressure(append: str, record_property: Record) -> None:
    """The areas do not fit into memory together, and compaction moves their pages."""
    result, reports = fuzz(
        tuple(
            f"--seconds {SECONDS} --steps 1000 --seed {SEED + 10 + i} --pages {pages}"
            for i, pages in enumerate((1024, 8192, 8192))
        ),
        beside=f"stress --seconds {SECONDS} --seed {SEED} compact >/dev/null & jobs=$!; ",
        memory="160M",
        append=append,
        timeout=400.0 + 2 * SECONDS,
    )
    tell(reports, record_property)
    all_had_their_turn(reports)
    expect_at_least(swapped(result)["pswpin"], 1000)


def test_the_fuzzer_notices() -> None:
    """Told to expect something wrong from step 50 on, it finds that, and says where."""
    breaks = ("content", "access", "errno")
    result = run(
        "; ".join(
            f"code=0; refpage_fuzz --seed 5 --steps 2000 --break-model {what} || code=$?; [ $code "
            f"= 1 ]; refpage_fuzz --seed 5 --steps 40 --break-model {what}"
            for what in breaks
        ),
        devices=[],
        timeout=480.0,
    )
    fine(result)
    told = objects(result)
    found = [one["violation"] for one in told if "violation" in one]
    assert {"content", "readable", "refpage_create"} <= {one["what"] for one in found}
    assert all(one["seed"] == 5 and one["step"] >= 50 for one in found)
    reports = [one for one in told if "operations" in one]
    # A child may be the one that notices; the parent then sees to it that the run fails.
    assert [one["violations"] > 0 for one in reports] == [True, False] * len(breaks)
