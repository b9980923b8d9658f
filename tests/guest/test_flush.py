# SPDX-License-Identifier: GPL-2.0
"""The attribute flush: report all free memory now, and come back when it is done."""

from __future__ import annotations

import pytest

from tests.guest.guests import (
    BOTH_AT_NIGHT,
    DELAY,
    DIRTY,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

both = pytest.mark.parametrize("device", BOTH_AT_NIGHT)
# Long enough that nothing is reported but by a flush.
LATE = f"echo 3600000 > {DELAY}"


def free_kb(out: str) -> int:
    """MemFree, in KiB."""
    return next(int(line.split()[1]) for line in out.splitlines() if line.startswith("MemFree"))


def test_good_and_bad_input() -> None:
    values = ["0", "0x0"]
    wrong = ["x", "-1", "0x", "18446744073709551616", "0 0", "1", "512"]
    result = run("; ".join(f"flush -- '{value}'" for value in values + wrong), kernel="knownzero")
    fine(result)
    told = objects(result)
    assert [one["error"] for one in told[: len(values)]] == [None] * len(values)
    for value, one in zip(wrong, told[len(values) :], strict=True):
        assert one["error"] == "EINVAL", value


def test_without_a_reporter() -> None:
    result = run("flush 0", kernel="knownzero", devices=[])
    fine(result)
    assert objects(result)[0]["error"] == "ENODEV"


@both
def test_everything_is_reported_when_it_returns(device: str) -> None:
    # Almost everything is dirtied: what was reported before would not be reported again.
    result = run(
        f"{LATE}; fillfree --share 90 >/dev/null; flush 0; flush 0; grep MemFree /proc/meminfo",
        kernel="knownzero",
        devices=[device],
    )
    fine(result)
    first, second = objects(result)
    free = free_kb(text(result))
    expect_at_least(first["vmstat"]["pgzeroed_set_reported"] * 4, free * 0.8)
    # Nothing was left for the second.
    expect_at_most(second["vmstat"]["pgzeroed_set_reported"] * 4, free * 0.02)


@both
def test_everything_includes_what_the_cpu_keeps(device: str) -> None:
    """Pages in the per-CPU lists are free memory too.

    After a flush of everything all of it is known.
    """
    result = run(
        f"{LATE}; {DIRTY}; flush 0; alloc_once --size 256 --pages thp --verify --mode touch_all; "
        "flush 0; alloc_once --size 256 --pages thp --verify --mode touch_all",
        kernel="knownzero",
        memory="2G",
        devices=[device],
    )
    fine(result)
    skips = [one["vmstat"]["pgzeroed_skip"] for one in objects(result) if "mode" in one]
    expect_at_least(min(skips), 0.99 * (256 << 8))


@both
def test_a_signal_ends_it(device: str) -> None:
    """A signal that comes in meanwhile: EINTR, at least once in many tries, and nothing else."""
    tries = "; ".join(
        f"fillfree --share 70 >/dev/null; flush --signal-after {us} 0"
        for us in (100, 300, 1000, 2000, 5000, 10000)
    )
    result = run(
        f"{LATE}; {tries}; flush 0; alloc_once --size 256 --verify",
        kernel="debug",
        devices=[device],
    )
    fine(result)
    errors = [one["error"] for one in objects(result) if "error" in one]
    expect_at_least(errors.count("EINTR"), 1)
    assert set(errors) <= {"EINTR", None}
    assert errors[-1] is None


@both
def test_the_delay_still_works_by_itself(device: str) -> None:
    result = run(
        f"echo 100 > {DELAY}; {DIRTY}; sleep 3; alloc_once --size 128 --pages thp --verify",
        kernel="knownzero",
        devices=[device],
    )
    fine(result)
    # Not all: what the CPU keeps in its own lists is not reported without a flush.
    expect_at_least(objects(result)[0]["vmstat"]["pgzeroed_skip"], 0.2 * (128 << 8))


@both
def test_a_pass_at_once_after_boot(device: str) -> None:
    """The first pass begins when the driver registers, which it does when the device is ready to
    answer.
    """
    result = run(
        "sleep 1; grep pgzeroed_ /proc/vmstat",
        checked=True,
        devices=[device],
        cpus=2,
        append="page_reporting.page_reporting_delay_ms=0",
    )
    fine(result)
    expect_at_least(counters(result)["pgzeroed_set_reported"], (512 << 20) // 4096)
