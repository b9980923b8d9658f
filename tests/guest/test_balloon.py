# SPDX-License-Identifier: GPL-2.0
"""Memory that comes out of the balloon is not zeroed again, and it is zero.

On the oracle kernel.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lab.bench.session import LOOP, Side
from lab.boot import balloon
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from tests import devices
from tests.guest.guests import (
    CHECK,
    CHECKED,
    HUGE_PAGES,
    KERNEL,
    VHOST_USER,
    expect_at_least,
    expect_at_most,
    lying_daemon,
    most_by_day,
)

pytestmark = pytest.mark.boots

MB = 1 << 20
ALL = 512 * MB
TAKEN = 256 * MB
TELLS = balloon.device(device_init_on_inflate="on")
PROCESS = f"{VHOST_USER},free-page-reporting=off"
PROCESS_TELLS = f"{PROCESS},device-init-on-inflate=on"
both = pytest.mark.parametrize(
    "device",
    [
        pytest.param(TELLS, id="in QEMU"),
        pytest.param(PROCESS_TELLS, id="vhost-user", marks=pytest.mark.nightly),
    ],
)
DIRTY = "fillfree --share 85 >/dev/null; echo 3 > /proc/sys/vm/drop_caches"
VERIFY = ("--verify", "--mode", "touch_all")


def pages(size: int) -> int:
    return size // 4096


@contextmanager
def guest(device: str = TELLS, checked: bool = True, **more: Any) -> Iterator[Side]:
    """A running guest of 512 MB with a balloon; its console is judged at the end.

    ``checked``: see CHECKED.
    """
    if checked:
        more["append"] = f"{CHECK} {more.get('append', '')}".strip()
    fields: dict[str, Any] = {
        "kernel": CHECKED if checked else KERNEL,
        "devices": [device],
        "memory": "512M",
        "timeout": 300.0,
        "command": ["sh", "-c", LOOP],
    }
    with running(BootSpec(**(fields | more))) as one:
        side = Side("ours", one)
        side.sh(HUGE_PAGES)
        yield side


def ask(guest: Guest, size: int, all_of_it: int = ALL) -> None:
    """Tell the device that the guest's memory is to be ``size`` bytes."""
    if guest.daemon:
        guest.daemon.ask(command="target", bytes=all_of_it - size)
    else:
        guest.qmp("balloon", value=size)


def resize(guest: Guest, size: int, all_of_it: int = ALL) -> None:
    """The same, and wait until it is."""
    if guest.daemon:
        ask(guest, size, all_of_it)
        taken = all_of_it - size
        devices.wait_for(guest.daemon, f"{size >> 20} MB", lambda status: status["actual"] == taken)
    else:
        balloon.resize(guest, size)


def stats(guest: Guest) -> dict[str, Any]:
    """What the device has discarded and called zero, and why not, in bytes."""
    if guest.daemon:
        status = guest.daemon.status()
        return {
            "zero": status["proven_zero"],
            **{name: status[name] for name in ("discarded", "skipped")},
        }
    found: dict[str, Any] = guest.qmp("query-balloon")["inflated"]
    return {**found, "skipped": {one["reason"]: one["bytes"] for one in found["skipped"]}}


def vmstat(side: Side, prefix: str = "pgzeroed_") -> dict[str, int]:
    """Counters of the guest whose names begin with ``prefix``."""
    lines = side.sh(f"grep ^{prefix} /proc/vmstat || true")
    return {name: int(value) for name, value in (line.split() for line in lines)}


def in_and_out(side: Side, taken: int = TAKEN) -> None:
    """Dirty memory into the balloon and out again."""
    side.sh(DIRTY)
    resize(side.guest, ALL - taken)
    resize(side.guest, ALL)


def judge(side: Side, kind: str = "thp") -> dict[str, int]:
    """Use nearly all memory and see that all of it is zero; the counters afterwards."""
    side.json("alloc_once", "--size", "300", "--pages", kind, *VERIFY)
    found = vmstat(side)
    assert found.get("pgzeroed_bad", 0) == 0
    return found


@both
@pytest.mark.parametrize(
    ("kind", "cpus"),
    [
        ("nothp", 2),
        ("thp", 1),
        pytest.param("nothp", 1, marks=pytest.mark.nightly),
        pytest.param("thp", 2, marks=pytest.mark.nightly),
    ],
)
def test_used_again_after_deflation(kind: str, cpus: int, device: str) -> None:
    with guest(device, cpus=cpus) as side:
        in_and_out(side)
        found = vmstat(side)
        assert found["pgzeroed_set_freed"] == pages(TAKEN)
        told = side.json("alloc_once", "--size", "128", "--pages", kind, *VERIFY)
        # The CPUs' own lists still have some of what was used before.
        expect_at_least(told["vmstat"]["pgzeroed_skip"], 0.85 * pages(128 * MB))
        expect_at_most(told["vmstat"]["pgzeroed_cleared"], 0.15 * pages(128 * MB))
        counted = stats(side.guest)
        assert counted["zero"] == counted["discarded"] == TAKEN
        assert sum(counted["skipped"].values()) == 0
        judge(side, kind)
        # It was dirtied since: no page is taken for zero twice.
        side.json("alloc_once", "--size", "128", "--pages", kind, *VERIFY)
        assert vmstat(side)["pgzeroed_skip"] <= found["pgzeroed_set_freed"]


@pytest.mark.parametrize(
    ("lie", "least", "most"), [("stale-bitmap", 0, 0), ("short-length", MB, TAKEN - 1)]
)
def test_a_wrong_bitmap(monkeypatch: pytest.MonkeyPatch, lie: str, least: int, most: int) -> None:
    """Only what the device has written counts.

    Not what was there before, nothing past the used length.
    """
    lying_daemon(monkeypatch)
    with guest(f"{PROCESS_TELLS},lie={lie}") as side:
        in_and_out(side)
        assert stats(side.guest)["discarded"] == TAKEN
        assert pages(least) <= vmstat(side)["pgzeroed_set_freed"] <= pages(most)
        judge(side)


@both
def test_again_and_again(device: str) -> None:
    with guest(device, cpus=2) as side:
        for _ in range(3):
            in_and_out(side, 128 * MB)
            side.json("alloc_once", "--size", "64", "--pages", "thp", *VERIFY)
        assert judge(side)["pgzeroed_set_freed"] == 3 * pages(128 * MB)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            balloon.device(device_init_on_inflate="on", free_page_reporting="on"), id="in QEMU"
        ),
        pytest.param(
            f"{VHOST_USER},device-init-on-inflate=on", id="vhost-user", marks=pytest.mark.nightly
        ),
    ],
)
def test_together_with_reporting(device: str) -> None:
    """Both kinds of knowledge meet in the same free blocks."""
    with guest(device, cpus=2) as side:
        side.sh("echo 100 > /sys/module/page_reporting/parameters/page_reporting_delay_ms")
        for _ in range(3):
            in_and_out(side)
            side.sh("sleep 0.3")
            side.json("alloc_once", "--size", "128", "--pages", "thp", *VERIFY)
        found = judge(side)
        expect_at_least(found["pgzeroed_set_freed"], 1)
        expect_at_least(found["pgzeroed_set_reported"], 1)
        expect_at_least(found["pgzeroed_skip"], pages(128 * MB))


REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "device does not offer": (balloon.device(), {}),
    "driver told to": (TELLS, {"append": "virtio_balloon.device_init_on_inflate=0"}),
    "poisoned pages": (TELLS, {"append": "page_poison=1"}),
    "zeroed on free": (TELLS, {"append": "init_on_free=1"}),
    "device does not offer, vhost-user": (PROCESS, {}),
    "driver told to, vhost-user": (
        PROCESS_TELLS,
        {"append": "virtio_balloon.device_init_on_inflate=0"},
    ),
    "poisoned pages, vhost-user": (PROCESS_TELLS, {"append": "page_poison=1"}),
    "zeroed on free, vhost-user": (PROCESS_TELLS, {"append": "init_on_free=1"}),
    "the distribution's QEMU": (balloon.device(), {"qemu": "stock"}),
    # The device answers, and the answer is no: what it discards may come back.
    "private file": (
        TELLS,
        {
            "extra_qemu": [
                "-object",
                "memory-backend-memfd,id=ram,size=512M,share=off",
                "-machine",
                "memory-backend=ram",
            ]
        },
    ),
}


@pytest.mark.parametrize("why", most_by_day(REFUSALS))
def test_nothing_is_skipped_when(why: str) -> None:
    device, more = REFUSALS[why]
    checked = "page_poison" not in more.get("append", "")
    with guest(device, checked, **more) as side:
        in_and_out(side)
        found = judge(side)
        assert found["pgzeroed_set_freed"] == 0
        assert found["pgzeroed_skip"] == 0
        assert vmstat(side, "balloon_")["balloon_deflate"] >= pages(TAKEN)


# Half of the memory is of a kind of which nothing is promised: an answer for each page.
MIXED = [
    "-object",
    "memory-backend-ram,id=m0,size=256M",
    "-object",
    "memory-backend-memfd,id=m1,size=256M,share=off",
    "-numa",
    "node,nodeid=0,memdev=m0",
    "-numa",
    "node,nodeid=1,memdev=m1",
]


def test_some_are_zero_and_some_are_not() -> None:
    with guest(extra_qemu=MIXED) as side:
        for _ in range(2):
            in_and_out(side, 352 * MB)
            counted = stats(side.guest)
            assert 0 < counted["zero"] < counted["discarded"]
            # Pages that were moved meanwhile were asked about as well, and not given back as zero.
            assert 0 < vmstat(side)["pgzeroed_set_freed"] <= pages(counted["zero"])
        judge(side)


@pytest.mark.parametrize(
    ("device", "extra"),
    [
        pytest.param(TELLS, [], id="all zero"),
        pytest.param(TELLS, MIXED, id="some zero", marks=pytest.mark.nightly),
        pytest.param(PROCESS_TELLS, [], id="all zero, vhost-user", marks=pytest.mark.nightly),
    ],
)
def test_migrated_while_inflated(device: str, extra: list[str]) -> None:
    """Compaction moves pages of the balloon.

    The old one is nothing, the new one what was said of it.
    """
    with guest(device, cpus=2, extra_qemu=extra) as side:
        side.sh(DIRTY)
        # Small pages held between those of the balloon, so that there is something to compact.
        resize(side.guest, ALL - 192 * MB)
        for _ in range(3):
            side.sh("fillfree --size 100 --nothp >/dev/null; echo 1 > /proc/sys/vm/compact_memory")
            resize(side.guest, ALL - 128 * MB)
            side.sh("echo 1 > /proc/sys/vm/compact_memory")
            resize(side.guest, ALL - 192 * MB)
        moved = vmstat(side, "balloon_")["balloon_migrate"]
        assert moved > 100, "nothing was moved: this tests nothing"
        resize(side.guest, ALL)
        found = judge(side)
        expect_at_least(found["pgzeroed_set_freed"], 1)
        expect_at_least(found["pgzeroed_skip"], 1)


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            balloon.device(device_init_on_inflate="on", deflate_on_oom="on"), id="in QEMU"
        ),
        pytest.param(PROCESS_TELLS, id="vhost-user", marks=pytest.mark.nightly),
    ],
)
def test_deflated_when_out_of_memory(device: str) -> None:
    with guest(device, cpus=2) as side:
        side.sh(DIRTY)
        resize(side.guest, ALL - 320 * MB)
        # Far more than there is without the balloon.
        told = side.json("alloc_once", "--size", "240", "--pages", "nothp", *VERIFY)
        expect_at_least(told["vmstat"]["pgzeroed_skip"], pages(50 * MB))
        assert vmstat(side, "balloon_")["balloon_deflate"] > pages(50 * MB)
        assert vmstat(side)["pgzeroed_bad"] == 0


# The lab's own channels are virtio ports, and the host is not connected to them after a resume:
# the test speaks on the serial console.
HIBERNATE = f"""
exec > /dev/ttyS0 2>&1
wait_for() {{
    until [ "$(grep ^nr_balloon_pages /proc/vmstat)" = "nr_balloon_pages $1" ]; do sleep 0.1; done
}}
{HUGE_PAGES}
mkswap /dev/vda > /dev/null; swapon /dev/vda
{DIRTY}
echo step-inflate
wait_for {pages(128 * MB)}
echo test_resume > /sys/power/disk; echo disk > /sys/power/state
echo "out $(grep balloon_deflate /proc/vmstat)"
wait_for {pages(128 * MB)}
echo step-deflate
wait_for 0
alloc_once --size 300 --pages nothp --verify --mode touch_all
grep pgzeroed_ /proc/vmstat
echo step-done
"""


@both
def test_hibernated_while_inflated(device: str, tmp_path: Path) -> None:
    """Suspend empties the balloon, resume forgets what is free and fills it again."""
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(ALL)
    spec = BootSpec(
        kernel=CHECKED,
        memory="512M",
        cpus=2,
        devices=[device, "virtio-blk-pci,drive=swap"],
        extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe"],
        append=f"{CHECK} resume=/dev/vda",
        timeout=300.0,
        command=[
            "sh",
            "-c",
            f"set -e; trap 'echo step-failed > /dev/ttyS0' EXIT\n{HIBERNATE}trap - EXIT",
        ],
    )

    def wait_for(step: str) -> str:
        deadline = time.monotonic() + 240
        while f"step-{step}" not in (seen := one.console.read_text(errors="replace")):
            assert "step-failed" not in seen, seen[-3000:]
            assert time.monotonic() < deadline, f"no {step}:\n{seen[-3000:]}"
            time.sleep(0.2)
        return seen

    with running(spec) as one:
        wait_for("inflate")
        ask(one, ALL - 128 * MB)
        wait_for("deflate")
        ask(one, ALL)
        lines = [line.strip() for line in wait_for("done").splitlines()]
    counters = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    emptied = next(line.split()[2] for line in lines if line.startswith("out balloon_deflate"))
    assert int(emptied) >= pages(128 * MB)
    assert int(counters["pgzeroed_bad"]) == 0
    # Before the resume, and again at the end.
    expect_at_least(int(counters["pgzeroed_set_freed"]), 2 * pages(128 * MB))
    expect_at_least(int(counters["pgzeroed_skip"]), 1)


@both
@pytest.mark.parametrize("kernel", ["stock", pytest.param("base", marks=pytest.mark.nightly)])
def test_kernels_that_do_not_know_the_bit(kernel: str, device: str) -> None:
    with guest(device, checked=False, kernel=kernel) as side:
        in_and_out(side)
        side.json("alloc_once", "--size", "300", "--pages", "nothp", *VERIFY)
        counted = stats(side.guest)
        assert counted["discarded"] == TAKEN
        assert counted["zero"] == 0
