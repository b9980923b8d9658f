# SPDX-License-Identifier: GPL-2.0
"""A large guest, a small one, 50 daemons on one host, and a day of changing load."""

from __future__ import annotations

import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy
import pytest

from lab.bench.host import fill, release
from lab.bench.plan import available_gb
from lab.bench.session import (
    DROP,
    LATE,
    LOOP,
    MIB,
    PAGE,
    Side,
    resident,
    settle_resident,
)
from lab.boot import balloon
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    BALLOON,
    CHECK,
    CHECKED,
    HUGE_PAGES,
    REPORT,
    SETTLE,
    ZP,
    Record,
    expect_at_least,
)

mark = pytest.mark
pytestmark = [mark.boots, mark.slow, mark.nightly, mark.matrix, mark.timeout(3000)]

GIB, WORD = 1024 * MIB, 8
# struct page of x86_64, without KASLR: flags, private and page type beside the reference count, in
# words.
VMEMMAP, STRUCT_PAGE, FLAGS, INDEX, PRIVATE, TYPE = 0xFFFF_EA00_0000_0000, 64, 0, 4, 5, 6
PG_ZEROMAP, PG_ZEROED, BUDDY, FREE_OF_CPU, MAP_COOKIE, ZERO_LEAF = (
    10,
    14,
    0xF0,
    0xFFFF_FFFF,
    0x6D7A,
    1,
)
MOST_OF_CPU = 8  # pages: orders 0 to 3 are on the lists of a CPU, and DROP drains huge pages
# Builtins only: another program would allocate memory.
COUNTERS = "while read -r n v; do case $n in pgzeroed_*) echo $n $v;; esac; done < /proc/vmstat"
PREZERO = f"echo 1 > {ZP}/enabled"
# kzeropaged leaves reported blocks to the host, and zeroes smaller blocks.
BOTH = f"{REPORT}; {PREZERO}; {SETTLE}"
SMALL_BLOCKS = 32  # MiB that are free in blocks under 2 MiB, which are not reported
DAEMONS, AT_ONCE = 50, 4
DAY, STEPS, LOW, HIGH = 86400, 24, 32, 256  # seconds, and MiB that programs use
# Virtual time jumps to the next timer of an idle guest. With an HPET, 120 s took 8 to 10 s instead
# of 0.4 s.
JUMPS = ["-icount", "shift=3,sleep=off", "-machine", "hpet=off", "-rtc", "clock=vm"]


def counters(side: Side) -> dict[str, int]:
    return {name: int(value) for name, value in map(str.split, side.sh(COUNTERS))}


def marked(guest: Guest, size: int) -> tuple[list[int], int]:
    """Known-zero blocks by order, and those on the lists of CPUs, read from the guest's memory."""
    # QEMU's q35 has the first 2 GiB below a hole, and the rest from 4 GiB on.
    ranges = [(0, size)] if size <= 2 * GIB else [(0, 2 * GIB), (4 * GIB, size - 2 * GIB)]
    blocks, lists, file = [0] * 16, 0, guest.folder / "pages"
    for start, length in ranges:
        at = VMEMMAP + start // PAGE * STRUCT_PAGE
        guest.qmp("memsave", val=at, size=length // PAGE * STRUCT_PAGE, filename=str(file))
        pages = numpy.fromfile(file, dtype="<u8").reshape(-1, STRUCT_PAGE // WORD)
        file.unlink()
        zeroed = pages[:, FLAGS] >> PG_ZEROED & 1 == 1
        free, of_cpu = pages[:, TYPE] >> 24 & 0xFF == BUDDY, pages[:, TYPE] == FREE_OF_CPU
        lists += int(numpy.count_nonzero(zeroed & of_cpu))
        for order in pages[zeroed & free, PRIVATE].tolist():
            blocks[order] += 1
        # A block that is zero in parts: see mm/prezero_map.c.
        in_parts = (free | of_cpu) & (pages[:, FLAGS] >> PG_ZEROMAP & 1 == 1)
        assert not numpy.any(zeroed & in_parts), numpy.flatnonzero(zeroed & in_parts)
        for head in numpy.flatnonzero(in_parts).tolist():
            page, end = head, head + (1 << (int(pages[head, INDEX]) >> 8 & 15))
            while page < end:
                word = int(pages[page, INDEX])
                assert word >> 16 == MAP_COOKIE, hex(word)
                blocks[word & 15] += word >> 4 & 3 == ZERO_LEAF
                page += 1 << (word & 15)
    return blocks, lists


def consistent(side: Side, size: int) -> dict[str, int]:
    """Compare the counters (docs/reference/counters.md) with the known-zero blocks in memory.

    The counters.
    """
    side.sh(DROP)
    found, blocks, lists = {"none": 0}, [0], 0
    while (now := counters(side)) != found:  # an idle guest comes to rest
        found = now
        side.guest.qmp("stop")
        blocks, lists = marked(side.guest, size)
        side.guest.qmp("cont")
    rest = sum(value for name, value in found.items() if "_set_" in name) - found["pgzeroed_skip"]
    rest -= found["pgzeroed_lost"] + sum(count << order for order, count in enumerate(blocks))
    assert lists <= rest <= MOST_OF_CPU * lists and found["pgzeroed_bad"] == 0, (
        found,
        blocks,
        lists,
    )
    return found


def use(side: Side, size_mb: int, pages: str) -> float:
    """A program reads its memory, which must be zero, and makes it dirty.

    The part that was not zeroed again.
    """
    did = side.json(
        "alloc_once", "--size", f"{size_mb}", "--pages", pages, "--verify", "--mode", "touch_all"
    )
    return float(did["vmstat"]["pgzeroed_skip"]) / (size_mb * MIB // PAGE)


@mark.parametrize(
    "memory_mb, cpus, fill_mb, use_mb",
    [(16384, 4, 6144, 1536), (256, 1, 128, 64)],
    ids=["large", "small"],
)
def test_a_guest(
    memory_mb: int, cpus: int, fill_mb: int, use_mb: int, record_property: Record
) -> None:
    """Report dirty memory and use a part again, then have kzeropaged zero it.

    The host gets its memory.
    """
    if available_gb() * 1024 < 2 * fill_mb:
        pytest.skip(f"{2 * fill_mb} MiB of memory must be available")
    spec = BootSpec(
        CHECKED,
        memory=f"{memory_mb}M",
        cpus=cpus,
        devices=[BALLOON],
        append=CHECK,
        timeout=2400,
        command=["sh", "-c", LOOP],
    )
    began, sizes = time.monotonic(), []
    with running(spec) as guest:
        side = Side("guest", guest)

        def settle(command: str) -> None:
            side.sh(command)
            sizes.append(settle_resident(guest.pid, timeout=60, what="the guest") // MIB)
            # The rest: memory that programs use only now, and translated code.
            assert sizes[-1] < sizes[0] + 0.1 * fill_mb + 64, sizes

        settle(f"{LATE}; {HUGE_PAGES}; {REPORT}")
        for kinds, refill in (
            (("thp", "mthp=64", "nothp", "shmem"), REPORT),
            (("mthp=64", "nothp"), BOTH),
        ):
            side.sh(f"fillfree --size {fill_mb}")
            sizes.append(resident(guest.pid) // MIB)
            expect_at_least(sizes[-1], sizes[0] + 0.9 * fill_mb)
            settle(refill)
            for kind in kinds:
                side.sh(refill)  # memory that was used last is allocated first
                least = 1 - SMALL_BLOCKS / use_mb if refill == REPORT else 0.95
                expect_at_least(use(side, use_mb, kind), least)
            job = (
                f"alloc_once --size {use_mb // cpus} --verify --mode touch_all >/dev/null || echo "
                "failed & "
            )
            side.sh(refill)
            assert side.sh(job * cpus + "wait") == []
            found = consistent(side, memory_mb * MIB)
        settle(f"echo 0 > {ZP}/enabled; {REPORT}")
        assert found["pgzeroed_set_prezeroed"] > 0
        record_property("skips_checked", found["pgzeroed_skip"])
        print(f"{time.monotonic() - began:.0f} s, RSS {sizes} MiB, {found}")


@mark.parametrize("devices", [[], [BALLOON]], ids=["allocated", "reported"])
def test_counters_agree_when_blocks_are_zero_in_parts(devices: list[str]) -> None:
    """A block loses the map of its parts when it is allocated or reported: mm/prezero_map.c."""
    spec = BootSpec(
        "knownzero",
        memory="512M",
        devices=devices,
        append=CHECK,
        timeout=2400,
        command=["sh", "-c", LOOP],
    )
    with running(spec) as guest:
        side = Side("guest", guest)
        side.sh(f"{LATE}; {HUGE_PAGES}")
        for _ in range(2):
            fill(side, 256, more="--gaps 4 --nothp", warm=False)
            side.sh(f"{PREZERO}; {SETTLE}; echo 0 > {ZP}/enabled")  # every other page is zero
            release(side)
            side.sh(f"wait; {REPORT}" if devices else "wait")
            for pages in ("thp", "nothp"):
                use(side, 256, pages)
                consistent(side, 512 * MIB)


def about(pid: int) -> tuple[int, int]:
    """File descriptors, and resident KiB of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), resident(pid) // 1024


def one_round(side: Side) -> None:
    """Report, use, inflate half of what is free, deflate."""
    side.sh(REPORT)
    expect_at_least(use(side, 8, "nothp"), 0.5)
    balloon.fill(
        side.guest, side.number("awk '/^MemFree/ { print int($2 / 2048) }' /proc/meminfo") * MIB
    )
    balloon.fill(side.guest, 0)


def test_fifty_daemons(record_property: Record) -> None:
    """Daemons serve guests of 64 MiB in User-Mode Linux.

    No growth, and afterwards no process and no file.
    """
    # The usual order of User-Mode Linux, 10, is reported only while 128 MiB are free.
    spec = BootSpec(
        "debug",
        arch="um",
        memory="64M",
        devices=["daemon,stats-interval=0"],
        daemon_profile="release",
        append="page_reporting.page_reporting_order=3",
        timeout=1500,
        command=["sh", "-c", LOOP],
    )
    seen, slowest = [], 0.0
    with ExitStack() as stack, ThreadPoolExecutor(AT_ONCE) as pool:
        sides = []
        for number in range(DAEMONS):
            sides.append(Side(f"guest {number}", stack.enter_context(running(spec))))
            sides[-1].sh("true")
        devices = [side.guest.daemon for side in sides if side.guest.daemon]
        began = time.monotonic()
        for _ in range(3):
            list(pool.map(one_round, sides))
            seen.append([about(device.process.pid) for device in devices])
            for device in devices:
                asked = time.monotonic()
                status = device.status()
                slowest = max(slowest, time.monotonic() - asked)
                assert status["working"] and not status["malformed"] and not status["refused"], (
                    status
                )
        lasted, found = time.monotonic() - began, [counters(side) for side in sides]
    assert slowest < 1.0
    for (first, early), (second, middle), (third, last) in zip(*seen, strict=True):
        assert first == second == third <= 24
        assert max(early, middle, last) < 8192 and abs(last - middle) <= 256
    assert not any(one["pgzeroed_bad"] for one in found)
    for side, device in zip(sides, devices, strict=True):
        assert device.process.returncode == 0 and not device.folder.exists()
        for pid in (side.guest.pid, device.process.pid):
            with pytest.raises(ProcessLookupError):
                os.killpg(pid, 0)
    assert not list(Path("/dev/shm").glob("vm_file*"))  # the memory of User-Mode Linux
    skips = sum(one["pgzeroed_skip"] for one in found)
    record_property("skips_checked", skips)
    print(
        f"{DAEMONS} daemons, 3 rounds in {lasted:.0f} s: status in {slowest * 1000:.0f} ms at the "
        f"most, descriptors and KiB {min(seen[-1])} to {max(seen[-1])}, {skips} skips"
    )


def test_a_day(record_property: Record) -> None:
    """Programs use most memory at noon; the balloon takes the rest.

    The emulator skips the time of idle guests.
    """
    device = balloon.device(free_page_reporting="on", device_init_on_inflate="on")
    spec = BootSpec(
        CHECKED,
        memory="512M",
        devices=[device],
        append=CHECK,
        accel="tcg",
        extra_qemu=JUMPS,
        timeout=2400,
        command=["sh", "-c", LOOP],
    )
    began, seen = time.monotonic(), []
    with running(spec) as guest:
        side, uptime = Side("guest", guest), "cut -d. -f1 /proc/uptime"
        side.sh(f"{HUGE_PAGES}; echo 1 > {ZP}/enabled")
        start, last = side.number(uptime), counters(side)
        for step in range(STEPS):
            load = LOW + round((HIGH - LOW) * (1 - math.cos(2 * math.pi * step / STEPS)) / 2)
            balloon.fill(guest, (HIGH - load) * MIB)
            use(side, load, ("thp", "nothp", "mthp=64", "shmem")[step % 4])
            side.sh(f"burst 0:{load // 2}:60000 30000:{load // 4}:60000")
            until = start + (step + 1) * DAY // STEPS
            side.sh(f"n=$({uptime}); [ $n -ge {until} ] || sleep $(({until} - $n))")
            found = consistent(side, 512 * MIB)
            assert all(found[name] >= last[name] for name in found), (last, found)
            last = found
            slab = side.sh("awk '/^(Slab|SUnreclaim):/ { print $2 }' /proc/meminfo")
            seen.append((*about(guest.pid), *map(int, slab)))
        lasted = side.number(uptime) - start
    halves = [
        [statistics.median(values) for values in zip(*half, strict=True)]
        for half in (seen[: STEPS // 2], seen[STEPS // 2 :])
    ]
    print(
        f"{lasted} s in {time.monotonic() - began:.0f} s; medians of both halves, descriptors, "
        f"and KiB of RSS, slab and unreclaimable slab: {halves}; {last}"
    )
    assert DAY <= lasted < DAY + DAY // STEPS
    assert halves[1][0] <= halves[0][0] and all(
        b <= 1.05 * a for a, b in zip(*halves, strict=True)
    ), seen
    assert min(last[f"pgzeroed_set_{name}"] for name in ("reported", "freed", "prezeroed")) > 0
    record_property("skips_checked", last["pgzeroed_skip"])
