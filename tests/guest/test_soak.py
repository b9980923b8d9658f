# SPDX-License-Identifier: GPL-2.0
"""Read every page whose zeroing is skipped, a million of each source, size and machine."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

from lab.bench.session import LOOP, MIB, PAGE, Side
from lab.boot import balloon
from lab.boot.guest import BootResult, boot, running
from lab.boot.spec import BootSpec
from lab.build.linux import build_linux
from tests.guest.guests import (
    BALLOON,
    CHECK,
    DELAY,
    FLUSH,
    HUGE_PAGES,
    STALE_MEMMAP,
    ZP,
    Record,
    counters,
    fine,
    objects,
)

pytestmark = [
    pytest.mark.boots,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.hunt,
    pytest.mark.timeout(7200),
]

# Pages for each case. A case that needs more than ROUNDS times as many uses fails.
WANTED = int(os.environ.get("KNOWNZERO_SOAK_PAGES", "1000000"))
ROUNDS = 20
REPORT, ZERO = f"echo 0 > {FLUSH}", "zeroed"
USES = {
    "thp": "--pages thp",
    "4k": "--pages nothp",
    "64k": "--pages mthp=64",
    "hugetlb": "--pages hugetlb",
}
# Half a second at the most, or until kzeropaged has zeroed as much as is used.
PREZERO = f"""
echo 1 > {ZP}/enabled
zeroed() {{
	end=$(($(sed -n 's/^pgzeroed_skip //p' /proc/vmstat) + $pages))
	for i in 1 2 3 4 5; do
		sleep 0.1
		[ $(sed -n 's/^pgzeroed_set_prezeroed //p' /proc/vmstat) -lt $end ] || break
	done
}}
"""


@dataclass(frozen=True)
class Case:
    """A machine; ``refill`` makes what a program has freed known zero again."""

    refill: str
    pages: str
    size_mb: int = 384
    cpus: int = 1
    append: str = ""
    kernel: str = "debug"
    arch: str = "x86_64"
    config: str = ""
    before: str = ""


# Between two uses, memory moves and a memory block goes offline and online.
MOVED = """
moved() {
	echo 1 > /proc/sys/vm/compact_memory
	for block in $(ls -dr /sys/devices/system/memory/memory*/state); do
		! echo offline > $block 2> /dev/null || break
	done
	grep -q offline $block; echo online > $block
	echo 0 > $FLUSH
}
"""
# Instead of a device.
HONEST = "page_zeroed_reporter.mode=honest"
POOL = "echo 1000 > /proc/sys/vm/nr_overcommit_hugepages"
CASES = {
    "reported, thp": Case(REPORT, "thp"),
    "reported, thp, 2 CPUs": Case(REPORT, "thp", cpus=2),
    "reported, thp, 4 CPUs": Case(REPORT, "thp", cpus=4),
    "reported, thp, 2 nodes": Case(REPORT, "thp", cpus=2, append="numa=fake=2"),
    "reported, thp, debug_pagealloc": Case(REPORT, "thp", append="debug_pagealloc=on"),
    "reported, thp, shuffled": Case(REPORT, "thp", append="page_alloc.shuffle=1"),
    "reported, thp, init_on_alloc": Case(REPORT, "thp", append="init_on_alloc=1"),
    "reported, thp, compaction, hotplug": Case(
        "moved", "thp", append=STALE_MEMMAP, before=f"FLUSH={FLUSH}; {MOVED}"
    ),
    "reported, thp, KASAN": Case(REPORT, "thp", config="kasan", size_mb=256),
    "reported, thp, as it ships": Case(REPORT, "thp", kernel="knownzero"),
    "reported, thp, high memory": Case(REPORT, "thp", arch="i386", append="highmem=512M"),
    "reported, thp, arm64": Case(REPORT, "thp", arch="arm64", append=HONEST),
    # By default it reports 512 MiB at once.
    "reported, arm64 with pages of 64 KiB": Case(
        *(REPORT, "4k"),
        arch="arm64",
        config="arm64-64k",
        append=f"{HONEST} page_reporting.page_reporting_order=5",
    ),
    "reported, 64k": Case(REPORT, "64k"),
    "reported, 4k": Case(REPORT, "4k"),
    "reported, 4k, 2 CPUs": Case(REPORT, "4k", cpus=2),
    "reported, 4k, 4 CPUs, 2 nodes": Case(REPORT, "4k", cpus=4, append="numa=fake=2"),
    "reported, hugetlb": Case(REPORT, "hugetlb", before=POOL),
    "reported, hugetlb, 2 CPUs, 2 nodes": Case(
        REPORT, "hugetlb", cpus=2, append="numa=fake=2", before=POOL
    ),
    "pre-zeroed, thp": Case(ZERO, "thp", before=PREZERO),
    "pre-zeroed, thp, 2 CPUs, 2 nodes": Case(
        ZERO, "thp", cpus=2, append="numa=fake=2", before=PREZERO
    ),
    "pre-zeroed, thp, as it ships": Case(ZERO, "thp", kernel="knownzero", before=PREZERO),
    "pre-zeroed, 4k": Case(ZERO, "4k", before=PREZERO),
    "pre-zeroed, hugetlb": Case(ZERO, "hugetlb", before=POOL + PREZERO),
    "pre-zeroed, User-Mode Linux": Case(ZERO, "4k", size_mb=96, arch="um", before=PREZERO),
    "reported, User-Mode Linux": Case(REPORT, "4k", size_mb=96, arch="um", append=HONEST),
}


def told(result: BootResult, record: Record, name: str = "skips_checked") -> int:
    """Record and return the skipped pages; the kernel has found none of them dirty."""
    fine(result)
    found = counters(result)
    assert found["pgzeroed_bad"] == 0
    record(name, found["pgzeroed_skip"])
    print(
        f"{found['pgzeroed_skip']} pages were not zeroed, and checked, in {result.seconds:.0f} s: "
        f"{found}"
    )
    return found["pgzeroed_skip"]


@pytest.mark.parametrize("name", CASES)
def test_used_again(name: str, record_property: Record) -> None:
    """A program checks that its memory is zero and makes it dirty.

    The next one allocates as much.
    """
    case = CASES[name]
    um, pages = case.arch == "um", case.size_mb * MIB // PAGE
    job = (
        f"alloc_once --size {case.size_mb} {USES[case.pages]} --mode touch_all --verify > /dev/null"
    )
    script = (
        f"{'' if um else HUGE_PAGES + '; '}pages={pages}; {case.before or 'true'}\n"
        f"for round in $(seq {ROUNDS * (WANTED // pages + 1)}); do {case.refill}; {job}; "
        f"[ $(sed -n 's/^pgzeroed_skip //p' /proc/vmstat) -lt {WANTED} ] || break; done; "
        "grep pgzeroed_ /proc/vmstat"
    )
    spec = BootSpec(
        kernel=build_linux(case.kernel, case.arch, case.config),
        arch=case.arch,
        devices=[] if HONEST in case.append or case.refill == ZERO else [BALLOON],
        cpus=case.cpus,
        memory="192M" if um else "1G",
        append=f"{CHECK} {case.append}".strip(),
        timeout=7000.0,
        command=["sh", "-ec", script],
    )
    assert told(boot(spec), record_property) >= WANTED


def test_out_of_the_balloon(record_property: Record) -> None:
    """The device confirms pages in the balloon as zero (bit 7).

    Programs use them after deflation.
    """
    most, taken = 6000.0, 512 * MIB
    device = balloon.device(device_init_on_inflate="on")
    spec = BootSpec(
        "debug", memory="1G", devices=[device], timeout=most, command=["sh", "-c", LOOP]
    )
    with running(spec) as guest:
        side, done = Side("guest", guest), 0
        side.sh(f"echo 1000000 > {DELAY}")
        for _ in range(ROUNDS * (WANTED * PAGE // taken + 1)):
            if done >= WANTED:
                break
            balloon.fill(guest, taken)
            balloon.fill(guest, 0)
            for pages in ("thp", "nothp"):
                side.json(
                    "alloc_once",
                    "--size",
                    "240",
                    "--pages",
                    pages,
                    "--verify",
                    "--mode",
                    "touch_all",
                )
            done = side.number("sed -n 's/^pgzeroed_skip //p' /proc/vmstat")
        found = {
            name: int(value)
            for name, value in map(str.split, side.sh("grep pgzeroed_ /proc/vmstat"))
        }
    assert done >= WANTED
    assert found["pgzeroed_bad"] == found["pgzeroed_set_reported"] == 0
    record_property("skips_checked", found["pgzeroed_skip"])
    print(
        f"{found['pgzeroed_skip']} pages out of the balloon were not zeroed, and checked: {found}"
    )


@pytest.mark.parametrize("pages", ["", "--nothp"], ids=["thp", "4k"])
def test_filled_from_a_pattern(pages: str, record_property: Record) -> None:
    """A program compares each page with the pattern before and after it writes to the page."""
    size = 256 * MIB
    loops = max(1, WANTED * PAGE // size)
    job = (
        f"refpage_bench --method refpage --check --map {size} --touch {size} --loops {loops} "
        f"{pages}"
    )
    script = f"{HUGE_PAGES}; {job}; grep pgzeroed_ /proc/vmstat"
    spec = BootSpec(
        "debug", memory="1G", devices=[BALLOON], timeout=7000.0, command=["sh", "-ec", script]
    )
    result = boot(spec)
    told(result, record_property, "skips_beside")
    assert objects(result)[-1]["loops"] == loops
    record_property("pages_compared", loops * (size // PAGE))
