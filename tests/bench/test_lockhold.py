# SPDX-License-Identifier: GPL-2.0
"""How long zone->lock is held.

What the plugin writes is read as it is meant, and what it counts is so.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path

import pytest

from lab.bench import lockhold
from lab.bench.host import fill, release
from lab.bench.lockhold import Holds, Seen
from lab.bench.plan import BenchOptions
from lab.bench.plugin import Symbols, build_plugin, symbols
from lab.bench.session import DROP, spec_for
from lab.build import linux as build
from lab.build.qemu import build_qemu
from lab.core.errors import LabError, TestFailure

SYSTEM_MAP = """ffffffff81000000 T _stext
ffffffff81000100 t free_pcppages_bulk
ffffffff81000200 t free_one_page.part.0
ffffffff81000300 t page_reporting_process
ffffffff81000400 T _raw_spin_trylock
ffffffff81000440 T _raw_spin_unlock
ffffffff81000480 T _raw_write_unlock
ffffffff810004c0 T _raw_spin_lock_irqsave
ffffffff81000500 T queued_spin_lock_slowpath
ffffffff81000600 t free_one_pager
ffffffff81000700 T _etext
"""
BASE = 0xFFFFFFFF81000000


@pytest.fixture
def table(tmp_path: Path) -> Symbols:
    file = tmp_path / "System.map"
    file.write_text(SYSTEM_MAP, encoding="utf-8")
    return symbols(file)


def written(
    holds: list[tuple[int, int, int]], lost: int = 0, wrong: int = 0, slots: int = 8
) -> bytes:
    """A file as the plugin writes it."""
    taken = sum(count for *_, count in holds)
    head = struct.pack("<8s6Q", b"KZLOCKS1", slots, lost, wrong, taken, taken, 2)
    filled = [*holds, *[(0, 0, 0)] * (slots - len(holds))]
    locks = struct.pack("<32Q", 0xA0, 0xB0, *[0] * 30)
    return head + locks + b"".join(struct.pack("<3Q", *one) for one in filled)


def test_the_file_is_read() -> None:
    seen = lockhold.parse(
        written([(BASE + 0x105, 50, 7), (BASE + 0x105, 60, 1), (BASE + 0x305, 900, 2)])
    )
    assert seen.locks == (0xA0, 0xB0) and seen.taken == seen.released == 10
    assert seen.holds == {(BASE + 0x105, 50): 7, (BASE + 0x105, 60): 1, (BASE + 0x305, 900): 2}


@pytest.mark.parametrize(
    ("data", "error", "why"),
    [
        (b"", LabError, "does not begin"),
        (b"KZLOCKS2" + written([])[8:], LabError, "does not begin"),
        (written([])[:-1], LabError, "bytes for 8 slots"),
        (written([], lost=1), TestFailure, "1 holds did not fit"),
        (written([], wrong=3), TestFailure, "3 times a held lock was taken"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(
    data: bytes, error: type[LabError], why: str
) -> None:
    with pytest.raises(error) as told:
        lockhold.parse(data)
    assert why in told.value.why


def test_the_plugin_gets_the_places_of_locks(table: Symbols) -> None:
    assert lockhold.ranges(table) == [
        "lock=ffffffff81000400-ffffffff81000440",
        "lock=ffffffff810004c0-ffffffff81000500",
        "unlock=ffffffff81000440-ffffffff81000480",
        "learn=ffffffff81000100-ffffffff81000200",
        "learn=ffffffff81000200-ffffffff81000300",
    ]
    others = [name.replace("free_", "other_") for name in table.names]
    with pytest.raises(LabError, match="Cannot watch") as told:
        lockhold.ranges(Symbols(table.addresses, others))
    assert "learn" in told.value.why


def test_a_step_is_broken_down_by_function(table: Symbols) -> None:
    before = Seen(0, 0, (), Counter({(BASE + 0x105, 50): 7, (BASE + 0x305, 9000): 1}))
    after = Seen(
        0, 0, (), Counter({(BASE + 0x105, 50): 107, (BASE + 0x200, 60): 1, (BASE + 0x305, 9000): 1})
    )
    holds = Holds.between(before, after, table)
    # A call at the very end of a function returns to where the next one begins.
    assert holds.by_function == {"free_pcppages_bulk": Counter({50: 100, 60: 1})}
    assert holds.longest == (60, "free_pcppages_bulk")


def test_a_step_without_a_hold_is_no_zero(table: Symbols) -> None:
    nothing = Seen(0, 0, (), Counter())
    with pytest.raises(TestFailure, match="never taken"):
        _ = Holds.between(nothing, nothing, table).longest
    with pytest.raises(TestFailure, match="never taken"):
        _ = Holds({"free_one_page": Counter({5: 1})}).of(lockhold.REPORTING).longest


@pytest.mark.boots
@pytest.mark.slow
@pytest.mark.parametrize("variant", [pytest.param("base", marks=pytest.mark.nightly), "knownzero"])
def test_holds_are_counted_as_they_are(variant: str) -> None:
    """Reading /proc/pagetypeinfo takes the lock a known number of times, and walks each list under
    it.
    """
    options, kernel = BenchOptions(memory="512M"), build.build_linux(variant)
    spec = spec_for(options, kernel, build_qemu("knownzero"), devices=[])
    with lockhold.watched(variant, spec, build_plugin("lockhold")) as (side, watch):
        zones = len(side.sh("cat /proc/buddyinfo"))
        # So that there are long lists, and that few of them are left to chance.
        fill(side, 192, more="--nothp --gaps 4", warm=False)
        side.sh(DROP)
        with watch.during() as reading:
            text = side.sh("cat /proc/pagetypeinfo")
        with watch.during() as bulk:
            told = side.json(
                "alloc_once", "--size", "32", "--mode", "touch_line", "--pages", "nothp"
            )
        release(side)
        side.sh("wait")
        seen = watch.look()

    # Every zone's lock was learnt, each in a struct of the same size in one array.
    assert len(seen.locks) == zones == 2
    assert 0 <= seen.taken - seen.released <= 1

    lists = [
        [int(entry.lstrip(">")) for entry in found[1].split()]
        for line in text
        if (found := re.search(r"zone\s+\S+, type\s+\S+(.*)", line))
    ]
    entries = sorted(number for row in lists for number in row)
    holds = reading.by_function["pagetypeinfo_show"]
    # After each list it lets go; then for each zone once to end, and once to count blocks by type.
    assert sum(holds.values()) == len(entries) + 2 * zones
    # The longest list is that of the gaps. A few instructions for each entry, and some to print the
    # number.
    assert entries[-1] > 5000
    assert 3 * entries[-1] < max(holds) < 10 * entries[-1]

    # Thousands of pages taken from the buddy lists, so many at a time, with dozens of instructions
    # for each.
    pages = told["bytes"] // 4096
    refills = bulk.by_function["__rmqueue_pcplist"]
    assert pages / 2016 / 2 <= sum(refills.values()) <= pages / 10
    instructions = sum(length * count for length, count in refills.items())
    assert 20 * pages <= instructions <= 1000 * pages
