# SPDX-License-Identifier: GPL-2.0
"""kzeropaged: free memory is zeroed before anyone wants it, by the rules, and only when it is told to."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lab.bench.session import DROP
from lab.boot.guest import BootResult, running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    CHECK,
    CHECKED,
    HUGE_PAGES,
    SETTLE,
    STALE_MEMMAP,
    STRESS_SECONDS,
    STRESS_SEED,
    Record,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    hunted,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

ZP = "/sys/kernel/mm/zero_page"
# What the CPU keeps in lists of its own is out of the thread's reach, so these lists are drained.
FILL = f"fillfree --share 80 >/dev/null; {DROP}"
NOW = f"echo 0 > {ZP}/delay_millisecs; echo 1 > {ZP}/enabled"
COUNTERS = "grep pgzeroed_ /proc/vmstat"


def values(result: BootResult) -> dict[str, int]:
    """The lines `NAME=NUMBER` of the guest's stdout."""
    found = {}
    for line in text(result).splitlines():
        name, sign, value = line.partition("=")
        if sign and value.strip().isdigit():
            found[name] = int(value)
    return found


def test_nothing_happens_while_it_is_off() -> None:
    result = run(
        f"{FILL}; sleep 3; cat {ZP}/enabled; echo bytes=$(cat {ZP}/bytes_zeroed); "
        f"echo cpu=$(cat {ZP}/cpu_millisecs); echo threads=$(grep -l kzeropaged /proc/*/comm | wc -l); "
        f"{COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    assert text(result).splitlines()[0] == "0"
    assert values(result) == {"bytes": 0, "cpu": 0, "threads": 0}
    assert counters(result)["pgzeroed_set_prezeroed"] == 0


@pytest.mark.parametrize("how", ["sysfs", "boot parameter"])
def test_free_memory_becomes_zero_and_is_not_zeroed_again(how: str) -> None:
    result = run(
        f"{FILL}; {NOW}; {SETTLE}; echo bytes=$(cat {ZP}/bytes_zeroed); echo cpu=$(cat {ZP}/cpu_millisecs); "
        f"echo known=$(cat {ZP}/node0/free_zeroed_bytes); echo same=$(cat {ZP}/node0/bytes_zeroed); "
        "echo free=$(awk '/^MemFree/ { print $2 * 1024 }' /proc/meminfo); "
        "alloc_once --size 256 --pages thp --verify --mode touch_all; "
        f"{FILL}; {SETTLE}; alloc_once --size 256 --pages nothp --verify --mode touch_all; {COUNTERS}",
        devices=[],
        checked=how == "sysfs",
        append="prezero=on" if how == "boot parameter" else "",
    )
    fine(result)
    found, count = values(result), counters(result)
    assert found["bytes"] == found["same"]
    expect_at_least(found["bytes"], 0.9 * found["free"])
    assert found["cpu"] > 0
    # What is smaller than mini_order stays dirty.
    expect_at_least(found["known"], 0.95 * found["free"])
    expect_at_most(found["known"], 1.02 * found["free"])
    huge, small = (told["vmstat"] for told in objects(result))
    expect_at_least(huge["pgzeroed_skip_prezeroed"], 0.99 * (256 << 8))
    expect_at_least(small["pgzeroed_skip_prezeroed"], 0.95 * (256 << 8))
    assert count["pgzeroed_set_prezeroed"] * 4096 >= found["bytes"]
    assert count["pgzeroed_bad"] == 0


def test_zeros_go_to_those_who_want_them() -> None:
    """Of dirty and zeroed memory side by side, each job takes what it has a use for."""
    size = 192
    result = run(
        f"{HUGE_PAGES}; {FILL}; {NOW}; {SETTLE}; echo 3600000 > {ZP}/delay_millisecs; "
        # What was freed last is on the list of the CPU, up to an eighth of memory, and is taken first.
        "echo 100000 > /proc/sys/vm/percpu_pagelist_high_fraction; "
        f"alloc_once --size {size} --pages thp --mode touch_all >/dev/null; "
        # From here on that much is free and dirty, before all that is zero.
        f"alloc_once --size {size} --pages thp --verify --mode touch_all; "
        "a=$(awk '/pgzeroed_unwanted/ { print $2 }' /proc/vmstat); "
        "dd if=/proc/self/exe of=/tmp/file bs=1M count=1 2>/dev/null; "
        f"for i in $(seq {size // 2}); do cat /tmp/file; done > /tmp/copy; "
        "b=$(awk '/pgzeroed_unwanted/ { print $2 }' /proc/vmstat); echo unwanted=$((b - a)); "
        f"echo copied=$(stat -c %s /tmp/copy); {COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    wanted = objects(result)[0]["vmstat"]
    expect_at_least(wanted["pgzeroed_skip_prezeroed"], 0.9 * (size << 8))
    found = values(result)
    assert found["copied"] >= (size // 4) << 20
    expect_at_most(found["unwanted"], 0.1 * found["copied"] / 4096)
    assert counters(result)["pgzeroed_bad"] == 0


def test_an_idle_clean_machine_is_not_woken() -> None:
    result = run(
        f"echo 100 > {ZP}/delay_millisecs; echo 1 > {ZP}/enabled; {FILL}; {SETTLE}; "
        f"before=$(cat {ZP}/node0/wakeups); sleep 10; echo woken=$(($(cat {ZP}/node0/wakeups) - before)); "
        # And it has not fallen asleep for good.
        f"{FILL}; {SETTLE}; echo later=$(($(cat {ZP}/node0/wakeups) - before))",
        devices=[],
        checked=True,
    )
    fine(result)
    assert values(result)["woken"] == 0
    assert values(result)["later"] > 0


BAD = {
    "enabled": ["2", "-1", "on", "", "1x", "0 1"],
    "mini_order": ["11", "-1", "x", "4294967296"],
    "delay_millisecs": ["-1", "4294967296", "1s", ""],
    "batch_size": ["0", "4095", "64M", "-4096", "18446744073709551616"],
    "max_rate": ["-1", "1M", "18446744073709551616"],
    "cpus": ["x", "4096", "0-", "1", "0,64"],
    "hugetlb": ["2", "-1", "on", ""],
}
GOOD = {
    "enabled": ["1", "0"],
    "mini_order": ["0", "10", "4"],
    "delay_millisecs": ["0", "4294967295", "1000"],
    "batch_size": ["4096", "18446744073709551615", "67108864"],
    "max_rate": ["1", "18446744073709551615", "0"],
    "cpus": ["0"],
    "hugetlb": ["1", "0"],
}


def test_good_and_bad_input() -> None:
    """What is refused leaves everything as it was, what is accepted can be read back."""
    bad = [
        f"if echo '{value}' 2>/dev/null > {ZP}/{name}; then echo 'accepted {name} {value}'; fi"
        for name, values in BAD.items()
        for value in values
    ]
    good = [
        f"echo {value} > {ZP}/{name}; [ \"$(cat {ZP}/{name})\" = {value} ] || echo 'not kept {name} {value}'"
        for name, values in GOOD.items()
        for value in values
    ]
    state = f"cat {ZP}/enabled {ZP}/mini_order {ZP}/delay_millisecs {ZP}/batch_size {ZP}/max_rate {ZP}/cpus {ZP}/hugetlb"
    result = run(
        f'a=$({state}); {"; ".join(bad)}; [ "$a" = "$({state})" ]; {"; ".join(good)}; '
        f"for f in bytes_zeroed cpu_millisecs node0/wakeups node0/free_zeroed_bytes; do "
        f"[ $(stat -c %a {ZP}/$f) = 444 ]; done; echo done",
        kernel="knownzero",
        devices=[],
    )
    fine(result)
    assert text(result).splitlines() == ["done"]


@pytest.mark.parametrize(
    ("append", "reason"),
    [
        ("page_poison=1", "free pages are poisoned"),
        ("init_on_free=1", "free pages are zero anyway"),
        ("debug_pagealloc=on", "free pages are not mapped"),
    ],
)
def test_it_refuses_where_it_would_do_harm(append: str, reason: str) -> None:
    result = run(
        f"if echo 1 2>/dev/null > {ZP}/enabled; then exit 7; fi; cat {ZP}/enabled; "
        f"fillfree --share 50 >/dev/null; sleep 1; cat {ZP}/bytes_zeroed; "
        "alloc_once --size 64 --verify --mode touch_all >/dev/null",
        devices=[],
        append=f"{append} prezero=on",
    )
    fine(result)
    assert text(result).splitlines() == ["0", "0"]
    # Once at boot, once for the write.
    assert result.console_text.count(f"prezero: free memory cannot be zeroed: {reason}") == 2


def test_pools_of_huge_pages_when_asked() -> None:
    """What a program has left dirty in the pool becomes zero there, but only if that is asked for."""
    pool = "alloc_once --size 128 --pages hugetlb --verify --mode touch_all"
    told = "sed -n 's/^pgzeroed_set_prezeroed //p' /proc/vmstat"
    result = run(
        f"echo 64 > /proc/sys/vm/nr_hugepages; {pool}; {NOW}; {SETTLE}; {pool}; "
        f"echo before=$(cat {ZP}/bytes_zeroed); echo set_before=$({told}); echo 1 > {ZP}/hugetlb; {SETTLE}; "
        f"echo after=$(cat {ZP}/bytes_zeroed); echo set_after=$({told}); {pool}; "
        # What was dirtied again is seen without anybody asking.
        f"{SETTLE}; {pool}; {COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    _, off, on, again = (job["vmstat"] for job in objects(result))
    pages = 128 << 8
    assert off["pgzeroed_cleared"] >= pages
    assert values(result)["after"] - values(result)["before"] >= pages * 4096
    assert values(result)["set_after"] - values(result)["set_before"] >= pages
    for job in (on, again):
        expect_at_least(job["pgzeroed_skip_prezeroed"], 0.99 * pages)
        expect_at_most(job["pgzeroed_cleared"], 0.01 * pages)
    assert counters(result)["pgzeroed_bad"] == 0


def test_small_blocks_only_where_the_rest_is_reported() -> None:
    trace = "/sys/kernel/tracing"
    result = run(
        f"echo 'sources & 8 && order >= 6' > {trace}/events/page_zeroed/page_zeroed_set/filter; "
        f"echo 1 > {trace}/events/page_zeroed/page_zeroed_set/enable; "
        f"{NOW}; {FILL}; sleep 2; {SETTLE}; echo large=$(grep -c page_zeroed_set: {trace}/trace || true); "
        "alloc_once --size 128 --pages thp --verify --mode touch_all; "
        f"echo off > /sys/module/page_zeroed_reporter/parameters/mode; {FILL}; {SETTLE}; "
        f"echo alone=$(grep -c page_zeroed_set: {trace}/trace || true); {COUNTERS}",
        devices=[],
        append="page_zeroed_reporter.mode=honest page_zeroed_reporter.order=6 "
        "page_reporting.page_reporting_delay_ms=100",
    )
    fine(result)
    assert values(result)["large"] == 0
    assert values(result)["alone"] > 0
    expect_at_least(counters(result)["pgzeroed_set_reported"], 1)
    expect_at_least(counters(result)["pgzeroed_set_prezeroed"], 1)
    assert counters(result)["pgzeroed_bad"] == 0


def test_the_rate_and_the_cpus_are_limited() -> None:
    mib = 1 << 20
    result = run(
        f"fillfree --share 80 >/dev/null; echo {16 * mib} > {ZP}/max_rate; echo 1 > {ZP}/cpus; {NOW}; "
        "sleep 1; pid=$(grep -l kzeropaged0 /proc/*/comm | sed 's/[^0-9]//g'); "
        "grep Cpus_allowed_list /proc/$pid/status; "
        f"a=$(cat {ZP}/bytes_zeroed); sleep 4; b=$(cat {ZP}/bytes_zeroed); echo rate=$(((b - a) / 4)); "
        "grep -h policy /proc/$pid/sched; "
        f"echo > {ZP}/cpus; pid=$(grep -l kzeropaged0 /proc/*/comm | sed 's/[^0-9]//g'); sleep 0.2; "
        "grep Cpus_allowed_list /proc/$pid/status; "
        # The end of a batch, which each block is now, does not get round it.
        f"echo {2 * mib} > {ZP}/batch_size; echo 0 > {ZP}/delay_millisecs; sleep 1; "
        f"a=$(cat {ZP}/bytes_zeroed); sleep 4; b=$(cat {ZP}/bytes_zeroed); echo in_batches=$(((b - a) / 4))",
        devices=[],
        checked=True,
        cpus=2,
    )
    fine(result)
    lists = [line.split()[1] for line in text(result).splitlines() if line.startswith("Cpus_allowed_list")]
    assert lists == ["1", "0-1"]
    expect_at_least(values(result)["rate"], 4 * mib)
    expect_at_most(values(result)["rate"], 18 * mib)
    expect_at_least(values(result)["in_batches"], 4 * mib)
    expect_at_most(values(result)["in_batches"], 18 * mib)


def test_each_node_has_its_thread() -> None:
    result = run(
        f"{FILL}; {NOW}; {SETTLE}; for n in 0 1; do "
        f"echo bytes$n=$(cat {ZP}/node$n/bytes_zeroed); echo known$n=$(cat {ZP}/node$n/free_zeroed_bytes); "
        "echo free$n=$(awk '/MemFree/ { print $4 * 1024 }' /sys/devices/system/node/node$n/meminfo); "
        "grep -l kzeropaged$n /proc/*/comm >/dev/null; done; "
        f"alloc_once --size 256 --pages thp --verify --mode touch_all; echo 0 > {ZP}/enabled; "
        f"echo threads=$(grep -l kzeropaged /proc/*/comm | wc -l); {COUNTERS}",
        devices=[],
        checked=True,
        cpus=2,
        append="numa=fake=2",
    )
    fine(result)
    found = values(result)
    for node in (0, 1):
        assert found[f"bytes{node}"] > 0
        expect_at_least(found[f"known{node}"], 0.95 * found[f"free{node}"])
    assert found["threads"] == 0
    assert counters(result)["pgzeroed_bad"] == 0


DISTURBANCES = {
    "compaction, CPU hotplug": ("prezero", "compact", "hotplug"),
    "memory pressure": ("prezero", "pressure"),
    "huge page pool, memory blocks": ("prezero", "hugetlb", "memoryblock"),
    "reporting": ("prezero", "reporter", "flush"),
    "everything": ("prezero", "compact", "hotplug", "pressure", "hugetlb", "memoryblock", "reporter"),
}


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        pytest.param(what, nodes, marks=[] if (what, nodes) == ("everything", 2) else pytest.mark.nightly)
        for what in DISTURBANCES
        for nodes in (1, 2)
    ],
)
@pytest.mark.timeout(600 + 6 * STRESS_SECONDS)
def test_no_byte_leaks(what: str, nodes: int, record_property: Record) -> None:
    drivers = " ".join(DISTURBANCES[what])
    # Otherwise it would do most of the work.
    reporter = "honest" if "reporter" in DISTURBANCES[what] else "off"
    result = run(
        # All is zero in the beginning, so that there is something to lose.
        f"{NOW}; {SETTLE}; echo 20 > {ZP}/delay_millisecs; echo 0 > {ZP}/mini_order; "
        f"echo {reporter} > /sys/module/page_zeroed_reporter/parameters/mode; "
        "echo 200 > /sys/module/page_reporting/parameters/page_reporting_delay_ms; "
        f"stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} {drivers} > /tmp/stress & "
        f"leak_hunter --setup --seconds {STRESS_SECONDS} --seed {STRESS_SEED} --workers 2; "
        f"wait $! || true; cat /tmp/stress; echo 0 > {ZP}/enabled; {COUNTERS}",
        cpus=2,
        memory="1G",
        devices=[],
        append=f"{STALE_MEMMAP} numa=fake={nodes}",
        timeout=300.0 + 4 * STRESS_SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    assert all(stress["steps"].values()), stress
    assert hunter["total_pages"] > 0, hunter["skipped"]
    expect_at_least(hunter["vmstat"]["pgzeroed_skip_prezeroed"], 1)


def test_out_of_memory() -> None:
    """It gives way: programs get all there is, and it goes on when they are gone."""
    result = run(
        f"{HUGE_PAGES}; {NOW}; "
        "for i in 1 2 3; do ( echo 1000 > /proc/self/oom_score_adj; "
        "exec alloc_once --size 4096 --pages nothp --mode touch_all ) 2>/dev/null || echo killed; done; "
        f"{SETTLE}; alloc_once --size 256 --pages thp --verify --mode touch_all; {COUNTERS}",
        devices=[],
        checked=True,
        memory="512M",
        allow_warnings=True,
    )
    assert result.exit_code == 0
    assert "page_zeroed: BUG" not in result.console_text
    assert text(result).count("killed") == 3
    expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip_prezeroed"], 0.9 * (256 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


SWAP_MB = 1024
RESUME_SECONDS = 480
# After the resume the host is not connected to the virtio ports: from there on, the serial console.
RESUME = f"""
mkswap /dev/vda >/dev/null; swapon /dev/vda
{FILL}; {NOW}; {SETTLE}
before=$(cat {ZP}/bytes_zeroed)
echo 0 > {ZP}/mini_order
fillfree --share 30 > /dev/null
echo test_resume > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
echo "before $before"
{SETTLE}
echo "again $(($(cat {ZP}/bytes_zeroed) - before)) free $(awk '/^MemFree/ {{ print $2 * 1024 }}' /proc/meminfo)"
alloc_once --size 128 --pages thp --verify --mode touch_all
alloc_once --size 128 --pages nothp --verify --mode touch_all
leak_hunter --seconds 3
{FILL}; {SETTLE}
echo "known $(cat {ZP}/node0/free_zeroed_bytes) free $(awk '/^MemFree/ {{ print $2 * 1024 }}' /proc/meminfo)"
alloc_once --size 256 --pages thp --verify --mode touch_all
{COUNTERS}
echo resume-test-done
"""


@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_it_is_frozen_and_resumes(tmp_path: Path, cpus: int) -> None:
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)
    spec = BootSpec(
        kernel=CHECKED,
        memory="1G",
        cpus=cpus,
        devices=["virtio-blk-pci,drive=swap"],
        extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe"],
        append=f"{CHECK} resume=/dev/vda",
        timeout=float(RESUME_SECONDS),
        command=[
            "sh",
            "-c",
            f"set -e; trap 'echo resume-test-failed > /dev/ttyS0' EXIT\n{RESUME}trap - EXIT",
        ],
    )
    deadline = time.monotonic() + RESUME_SECONDS
    # Leaving the block judges the console: an oracle report fails the test.
    with running(spec) as guest:
        told = ""
        while "resume-test-done" not in told:
            time.sleep(0.5)
            told = guest.console.read_text(errors="replace")
            assert "resume-test-failed" not in told, told[-3000:]
            assert time.monotonic() < deadline, f"not done after {RESUME_SECONDS} s:\n{told[-3000:]}"
    lines = [line.strip() for line in told.splitlines()]
    jobs = [json.loads(line) for line in lines if line.startswith("{")]
    counted = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    assert "PM: hibernation: hibernation exit" in told
    assert int(next(line.split()[1] for line in lines if line.startswith("before "))) > 0
    assert int(counted["pgzeroed_bad"]) == 0
    # What was free and zero then is not known to be so now, so that it begins anew by itself.
    again = next(line.split() for line in lines if line.startswith("again "))
    expect_at_least(int(again[1]), 0.8 * int(again[3]))
    known = next(line.split() for line in lines if line.startswith("known "))
    # Not the area for contiguous allocations, 16 MB, and little else.
    expect_at_least(int(known[1]), 0.95 * int(known[3]))
    # Which of the free memory a job gets is another matter, after what the hunter did to it.
    expect_at_least(jobs[-1]["vmstat"]["pgzeroed_skip_prezeroed"], 0.75 * (256 << 8))


# Where the host's end of the virtio ports is after it came back is another matter: the serial console.
SUSPEND = f"""
exec > /dev/ttyS0 2>&1
{FILL}; echo {16 << 20} > {ZP}/max_rate; {NOW}
sleep 1
echo "before $(cat {ZP}/bytes_zeroed)"
echo mem > /sys/power/state
echo "after $(cat {ZP}/bytes_zeroed)"
echo 0 > {ZP}/max_rate; {SETTLE}
echo "end $(cat {ZP}/node0/free_zeroed_bytes) free $(awk '/^MemFree/ {{ print $2 * 1024 }}' /proc/meminfo)"
alloc_once --size 256 --pages thp --verify --mode touch_all
{COUNTERS}
echo suspend-test-done
"""


def test_it_is_suspended_and_goes_on() -> None:
    """Suspend to RAM in the middle of its work: memory is kept, and so is what is known of it."""
    spec = BootSpec(
        kernel="debug",
        memory="1G",
        cpus=2,
        timeout=240.0,
        command=["sh", "-c", f"set -e; trap 'echo suspend-test-failed' EXIT\n{SUSPEND}trap - EXIT"],
    )
    slept = False
    deadline = time.monotonic() + 240
    with running(spec) as guest:
        told = ""
        while "suspend-test-done" not in told:
            time.sleep(0.5)
            told = guest.console.read_text(errors="replace")
            assert "suspend-test-failed" not in told, told[-3000:]
            assert time.monotonic() < deadline, f"not done:\n{told[-3000:]}"
            if not slept and guest.qmp("query-status")["status"] == "suspended":
                slept = True
                guest.qmp("system_wakeup")
    assert slept and "PM: suspend exit" in told
    lines = [line.strip() for line in told.splitlines()]
    counted = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    before, after = (next(int(x.split()[1]) for x in lines if x.startswith(w)) for w in ("before ", "after "))
    # It was at work, and had not finished.
    assert 0 < before <= after < 512 << 20
    end = next(line.split() for line in lines if line.startswith("end "))
    expect_at_least(int(end[1]), 0.9 * int(end[3]))
    job = next(json.loads(line) for line in lines if line.startswith("{"))
    expect_at_least(job["vmstat"]["pgzeroed_skip_prezeroed"], 0.9 * (256 << 8))
    assert int(counted["pgzeroed_bad"]) == 0
