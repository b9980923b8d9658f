# SPDX-License-Identifier: GPL-2.0
"""Memory that is added to a running guest is known to be zero as fast as memory at boot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab.bench.session import LATE, LOOP, Side
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    BALLOON,
    CHECK,
    CHECKED,
    KERNEL,
    expect_at_most,
)

pytestmark = pytest.mark.boots

MB = 1 << 20
PATIENCE_S = 120.0
VIRTIO_MEM = [
    *("-object", "memory-backend-ram,id=vmem,size=1G"),
    *("-device", "virtio-mem-pci,id=vm0,memdev=vmem,requested-size=0"),
]


@contextmanager
def guest(
    state: str = "online_movable",
    *,
    kernel: str = CHECKED,
    devices: tuple[str, ...] = (BALLOON,),
    memory: str = "768M",
    append: str = CHECK,
) -> Iterator[Side]:
    """A running guest in which only new memory is reported from now on."""
    spec = BootSpec(
        kernel=kernel,
        devices=list(devices),
        memory=memory,
        append=f"{append} memhp_default_state={state}",
        extra_qemu=["-m", "slots=2,maxmem=4G", *VIRTIO_MEM],
        timeout=300.0,
        command=["sh", "-c", LOOP],
    )
    with running(spec) as one:
        side = Side("ours", one)
        side.sh(LATE)
        side.sh("until dmesg | grep -q 'All free memory has been'; do sleep 0.1; done")
        yield side


def known(side: Side) -> int:
    """Free bytes that are known to be zero."""
    count = side.vmstat()
    return 4096 * (count["pgzeroed_set_reported"] - count["pgzeroed_skip"] - count["pgzeroed_lost"])


def total(side: Side) -> int:
    return int(side.sh("awk '/^MemTotal/ { print $2 }' /proc/meminfo")[-1]) * 1024


def dimm(side: Side, size: int) -> None:
    side.guest.qmp("object-add", **{"qom-type": "memory-backend-ram", "id": "m0", "size": size})
    side.guest.qmp("device_add", driver="pc-dimm", id="d0", memdev="m0")


def virtio_mem(side: Side, size: int) -> None:
    side.guest.qmp("qom-set", path="/machine/peripheral/vm0", property="requested-size", value=size)


def until_total(side: Side, least: int, most: int = 1 << 62) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not least <= total(side) <= most:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_known(side: Side, before: int, size: int) -> None:
    """Until the new memory is known to be zero: after 100 ms on an idle host.

    The next pass that nobody asks for begins after the test (LATE).
    """
    deadline = time.monotonic() + PATIENCE_S
    while known(side) - before < 0.95 * size:
        assert time.monotonic() < deadline, known(side) - before
        time.sleep(0.05)


def expect_known(side: Side, before: int, size: int) -> None:
    """The new memory becomes known, and a program that uses most of it zeroes none."""
    until_known(side, before, size)
    cleared = side.vmstat()["pgzeroed_cleared"]
    # Use what was there before, too: the program's pages may come from either.
    side.sh(f"alloc_once --size {size * 9 // 10 // MB} --pages thp --verify --mode touch_all")
    expect_at_most((side.vmstat()["pgzeroed_cleared"] - cleared) * 4096, 0.05 * size)
    assert side.vmstat()["pgzeroed_bad"] == 0


def test_a_dimm() -> None:
    with guest() as side:
        size, before, had = 256 * MB, known(side), total(side)
        dimm(side, size)
        until_total(side, had + size * 9 // 10)
        expect_known(side, before, size)


def test_what_a_device_refused_is_not_reported_again() -> None:
    """The reporter for tests confirms every second block, so half of the new memory."""
    reporter = "page_zeroed_reporter.mode=partial"
    with guest(kernel=KERNEL, devices=(), memory="1536M", append=reporter) as side:
        size, before, had = 256 * MB, known(side), total(side)
        dimm(side, size)
        until_total(side, had + size * 9 // 10)
        deadline = time.monotonic() + PATIENCE_S
        while known(side) - before < 0.4 * size:
            assert time.monotonic() < deadline, known(side) - before
            time.sleep(0.05)
        # Half of what it had refused of the rest would be more.
        time.sleep(2)
        expect_at_most(known(side) - before, 0.7 * size)


def test_blocks_onlined_by_hand() -> None:
    with guest("offline") as side:
        size, before, had = 256 * MB, known(side), total(side)
        dimm(side, size)
        side.sh(
            "cd /sys/devices/system/memory; "
            "until [ $(grep -l offline memory*/state | wc -l) = 2 ]; do sleep 0.1; done; "
            "for b in $(grep -l offline memory*/state); do echo online_movable > $b; done"
        )
        until_total(side, had + size * 9 // 10)
        expect_known(side, before, size)


def test_virtio_mem_plugs_unplugs_and_plugs_again() -> None:
    """192 MiB are one memory block and a half: its rest comes online without a notifier."""
    with guest() as side:
        had = total(side)
        for size, more in ((192 * MB, 192 * MB), (448 * MB, 256 * MB)):
            before = known(side)
            virtio_mem(side, size)
            until_total(side, had + size * 9 // 10)
            until_known(side, before, more)
        virtio_mem(side, 0)
        until_total(side, 0, had + 64 * MB)
        before, had = known(side), total(side)
        virtio_mem(side, 448 * MB)
        until_total(side, had + 350 * MB)
        expect_known(side, before, 384 * MB)
