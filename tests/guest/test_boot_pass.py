# SPDX-License-Identifier: GPL-2.0
"""The first pass of page reporting: soon after boot, all free memory is known to be zero."""

from __future__ import annotations

import re

import pytest

from lab.boot.guest import BootResult
from tests.guest.guests import (
    BALLOON,
    CHECKED,
    DELAY,
    REPORT,
    VHOST_USER,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

ENABLED = "Free page reporting enabled"
REPORTED = "All free memory has been reported"
LOG = f"dmesg | grep -e '{ENABLED}' -e '{REPORTED}' || true"
# Until the passes that are asked for at boot have reported almost all: those of every two seconds
# are put off.
KNOWN = (
    "for i in $(seq 600); do awk '/^pgzeroed_set_reported / { n += $2 } /^pgzeroed_(skip|lost) / "
    "{ n -= $2 } /^nr_free_pages / { free = $2 } END { exit n < 0.96 * free }' /proc/vmstat && "
    "break; sleep 0.2; done"
)
LATE = "page_reporting.page_reporting_delay_ms=3600000"
WAIT = f"for i in $(seq 600); do dmesg | grep -q '{REPORTED}' && break; sleep 0.1; done"
COUNTERS = "grep pgzeroed_ /proc/vmstat; grep ^MemFree /proc/meminfo"
# Where the kernel puts the virtio balloon.
BALLOON_DRIVER = "/sys/bus/virtio/drivers/virtio_balloon"


def seconds(result: BootResult, message: str) -> list[float]:
    """When the kernel logged ``message``, in seconds since it started."""
    return [
        float(at) for at in re.findall(rf"^\[ *([\d.]+)\] .*{message}", text(result), re.MULTILINE)
    ]


def free_bytes(result: BootResult) -> int:
    """MemFree, in bytes."""
    found = re.search(r"^MemFree: +(\d+) kB", text(result), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def known_bytes(result: BootResult) -> int:
    """Free bytes that are known to be zero: those that were marked and not used or lost since."""
    count = counters(result)
    return 4096 * (count["pgzeroed_set_reported"] - count["pgzeroed_skip"] - count["pgzeroed_lost"])


@pytest.mark.parametrize(
    ("memory", "cpus", "device", "program_mb"),
    [
        pytest.param("2G", 1, BALLOON, 1024, id="2 GiB"),
        pytest.param("512M", 4, BALLOON, 256, id="512 MiB, 4 CPUs"),
        pytest.param("2G", 1, VHOST_USER, 1024, id="2 GiB, vhost-user", marks=pytest.mark.nightly),
        pytest.param("2G", 4, BALLOON, 1024, id="2 GiB, 4 CPUs", marks=pytest.mark.nightly),
        pytest.param("512M", 1, BALLOON, 256, id="512 MiB"),
        pytest.param("8G", 4, BALLOON, 1024, id="8 GiB, 4 CPUs", marks=pytest.mark.nightly),
    ],
)
def test_a_fresh_guest_knows_its_memory(
    memory: str, cpus: int, device: str, program_mb: int
) -> None:
    """Without the sixteenths that Linux reports every two seconds: `kz bench boot` has the times.

    The first program zeroes what is left in pieces of less than 2 MiB: 2 % of a small guest.
    """
    result = run(
        f"{KNOWN}; {COUNTERS}; {LOG}; alloc_once --size {program_mb} --verify --mode touch_all",
        kernel="knownzero",
        append=LATE,
        memory=memory,
        cpus=cpus,
        devices=[device],
    )
    fine(result)
    expect_at_least(known_bytes(result), 0.95 * free_bytes(result))
    assert len(seconds(result, ENABLED)) == len(seconds(result, REPORTED)) == 1
    program = objects(result)[0]
    pieces = 0.035 if program_mb < 1024 else 0.02
    expect_at_most(program["vmstat"]["pgzeroed_cleared"], pieces * (program_mb << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_a_device_that_promises_nothing_gets_no_flood() -> None:
    result = run(
        f"{COUNTERS}; {LOG}",
        kernel=CHECKED,
        append="virtio_balloon.device_init_reported=0",
    )
    fine(result)
    assert len(seconds(result, ENABLED)) == 1
    assert seconds(result, REPORTED) == []
    assert counters(result)["pgzeroed_set_reported"] == 0


def test_only_the_first_registration_reports_all() -> None:
    """Later, memory that the guest has used is reported as usual."""
    marked = "$(sed -n 's/^pgzeroed_set_reported //p' /proc/vmstat)"
    result = run(
        # A pass that was asked for before has its usual delay.
        f"{WAIT}; echo 3600000 > {DELAY}; sleep 2.5; fillfree --share 70 >/dev/null; n={marked}; "
        f"cd {BALLOON_DRIVER}; for d in virtio*; do echo $d > unbind; echo $d > bind; done; "
        f"m={marked}; for i in $(seq 600); do sleep 1; b=$m; m={marked}; "
        f"[ $m -gt $n ] && [ $m = $b ] && break; done; echo more $((m - n)); {COUNTERS}",
        kernel=CHECKED,
        timeout=900,
    )
    fine(result)
    more = re.search(r"^more (\d+)$", text(result), re.MULTILINE)
    assert more and int(more[1]) > 0, "nothing was reported after the driver was bound again"
    # The driver's question whether the host wants all begins a pass: a sixteenth of each list, and
    # at least 32 of its blocks. That was 35 % of this guest's memory.
    assert int(more[1]) * 4096 < 0.6 * free_bytes(result)


def test_a_flush_reports_small_zones_too() -> None:
    """ZONE_DMA, 3 % of this guest, never has 64 MiB above its low watermark."""
    result = run(f"{REPORT}; {COUNTERS}", kernel="knownzero", memory="512M")
    fine(result)
    expect_at_least(known_bytes(result), 0.97 * free_bytes(result))


def test_a_flush_asks_again() -> None:
    """A block that the device did not confirm, as during a migration, is reported again."""
    mode = "/sys/module/page_zeroed_reporter/parameters/mode"
    result = run(
        f"({COUNTERS}) | sed 's/^/before_/'; echo honest > {mode}; {REPORT}; {COUNTERS}",
        devices=[],
        append="page_zeroed_reporter.mode=partial page_reporting.page_reporting_delay_ms=3600000",
    )
    fine(result)
    # The boot has two passes; the reporter confirms a half in each. No other one begins before the
    # flush.
    refused = re.search(r"^before_pgzeroed_set_reported (\d+)", text(result), re.MULTILINE)
    assert refused and int(refused[1]) * 4096 < 0.85 * free_bytes(result)
    expect_at_least(known_bytes(result), 0.95 * free_bytes(result))


def test_boot_and_unregistration_do_not_wait_for_a_pass() -> None:
    """Neither the boot nor an unregistration waits for a pass of 24 reports, five seconds each."""
    parameters = "/sys/module/page_zeroed_reporter/parameters"
    off = f"n=$(cat {parameters}/calls); echo off > {parameters}/mode; "
    during = f"$(($(cat {parameters}/calls) - n))"
    result = run(
        f"echo booted $(cat {parameters}/calls); {off} echo left {during}; "
        f"echo honest > {parameters}/mode; sleep 0.2; (flush 0 &) ; sleep 0.2; "
        f"{off} echo off {during}; "
        f"sleep 1; {COUNTERS}; {LOG}; alloc_once --size 1024 --verify --mode touch_all",
        memory="3G",
        devices=[],
        append="page_zeroed_reporter.mode=honest page_zeroed_reporter.delay_ms=5000",
    )
    fine(result)
    calls = {word: int(value) for word, value in re.findall(r"^(\w+) (\d+)$", text(result), re.M)}
    assert 0 < calls["booted"] < 24
    # Each waits for the report that is under way; one more can begin before it asks.
    assert calls["left"] <= 1
    assert calls["off"] <= 1
    assert seconds(result, REPORTED) == []
    expect_at_most(known_bytes(result), 0.5 * free_bytes(result))
    assert '"ENODEV"' in text(result)
    assert counters(result)["pgzeroed_bad"] == 0
