# SPDX-License-Identifier: GPL-2.0
"""Reported memory is used again without being zeroed again, and it is zero: on the oracle kernel.

Where nothing may be skipped there is nothing for the oracle to check: that is asked of the kernel
that ships.
"""

from __future__ import annotations

import pytest

from tests.guest.guests import (
    BALLOON,
    BOTH_AT_NIGHT,
    DIRTY,
    REPORT,
    VHOST_USER,
    counters,
    expect_at_least,
    fine,
    most_by_day,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots


@pytest.mark.parametrize("device", BOTH_AT_NIGHT)
@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize(("pages", "at_least"), [("nothp", 0.9), ("mthp=64", 0.9), ("thp", 0.99)])
def test_report_and_use_again(pages: str, at_least: float, cpus: int, device: str) -> None:
    result = run(
        f"{DIRTY}; {REPORT}; alloc_once --size 128 --pages {pages} --verify --mode touch_all; "
        "grep pgzeroed_ /proc/vmstat",
        cpus=cpus,
        devices=[device],
        checked=True,
    )
    fine(result)
    delta = objects(result)[-1]["vmstat"]
    skipped = delta["pgzeroed_skip"] * 4096 / (128 << 20)
    expect_at_least(skipped, at_least)
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(counters(result)["pgzeroed_set_reported"], 1)


@pytest.mark.parametrize("device", BOTH_AT_NIGHT)
def test_used_again_and_again(device: str) -> None:
    """What was used and freed is dirty until it has been reported again."""
    once = f"{REPORT}; alloc_once --size 128 --pages thp --verify --mode touch_all"
    # All free memory but 64 MB: at least half of the 128 MB that are dirty again must be among it.
    rest = "$(awk '/^MemFree/ { print int($2 / 1024) - 64 }' /proc/meminfo)"
    result = run(
        f"echo 3600000 > /sys/module/page_reporting/parameters/page_reporting_delay_ms; {DIRTY}; "
        f"{once}; {once}; alloc_once --size {rest} --pages thp --verify --mode touch_all",
        devices=[device],
        checked=True,
    )
    fine(result)
    skips = [told["vmstat"]["pgzeroed_skip"] for told in objects(result)]
    expect_at_least(skips[0], 0.99 * (128 << 8))
    expect_at_least(skips[1], 0.99 * (128 << 8))
    assert objects(result)[2]["vmstat"]["pgzeroed_cleared"] >= 0.4 * (128 << 8)


REFUSALS = {
    "driver told to": (BALLOON, "virtio_balloon.device_init_reported=0"),
    "device does not offer": (BALLOON + ",x-device-init-reported=off", ""),
    "no reporting": ("virtio-balloon-pci", ""),
    "poisoned pages": (BALLOON, "page_poison=1"),
    "zeroed on free": (BALLOON, "init_on_free=1"),
    "driver told to, vhost-user": (VHOST_USER, "virtio_balloon.device_init_reported=0"),
    "device does not offer, vhost-user": (VHOST_USER + ",device-init-reported=off", ""),
    "no reporting, vhost-user": (VHOST_USER + ",free-page-reporting=off", ""),
    "poisoned pages, vhost-user": (VHOST_USER, "page_poison=1"),
    "zeroed on free, vhost-user": (VHOST_USER, "init_on_free=1"),
}


@pytest.mark.parametrize("why", most_by_day(REFUSALS))
def test_nothing_is_skipped_when(why: str) -> None:
    device, append = REFUSALS[why]
    report = "true" if why.startswith("no reporting") else REPORT
    result = run(
        f"{DIRTY}; {report}; alloc_once --size 128 --pages thp --verify --mode touch_all; "
        "grep pgzeroed_ /proc/vmstat",
        devices=[device],
        append=append,
        checked="page_poison" not in append,
    )
    fine(result)
    found = counters(result)
    assert found["pgzeroed_set_reported"] == 0
    assert found["pgzeroed_skip"] == 0
    assert found["pgzeroed_bad"] == 0


@pytest.mark.parametrize(("offered", "accepted"), [("on", "11"), ("off", "00")])
def test_poisoned_pages_are_reported_with_bit_4_only(offered: str, accepted: str) -> None:
    """Without it, the device may give back pages without the poison."""
    result = run(
        "cut -c5-6 /sys/bus/virtio/drivers/virtio_balloon/virtio*/features",
        devices=[f"{BALLOON},page-poison={offered}"],
        append="page_poison=1",
    )
    fine(result)
    assert text(result).split() == [accepted]


@pytest.mark.parametrize(
    "append",
    [
        "init_on_alloc=1",
        pytest.param("debug_pagealloc=on", marks=pytest.mark.nightly),
        "init_on_alloc=1 debug_pagealloc=on",
    ],
)
def test_debugging_aids_live_with_it(append: str) -> None:
    result = run(
        f"{DIRTY}; {REPORT}; alloc_once --size 128 --pages thp --verify --mode touch_all; "
        "grep pgzeroed_ /proc/vmstat",
        append=append,
        checked="debug" not in append,
    )
    fine(result)
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(counters(result)["pgzeroed_skip"], 1)


def test_huge_pages_that_are_off_are_not_measured() -> None:
    result = run("alloc_once --size 8 --pages thp", memory="256M", devices=[], checked=True)
    assert result.exit_code == 3
    assert "huge pages are off" in result.stderr
