# SPDX-License-Identifier: GPL-2.0
"""Beside unpatched partners: nothing breaks, and nothing is skipped wrongly."""

from __future__ import annotations

import pytest

from tests.guest.guests import BOTH_DEVICES, DELAY, DIRTY, REPORT, counters, fine, objects, run, text

pytestmark = pytest.mark.boots

JOB = (
    "alloc_once --size 128 --pages thp --verify --mode touch_all; alloc_once --size 64 --pages nothp --verify"
)
VERIFIED = [128 << 20, 64 << 20]  # bytes that JOB has read back as zeros


@pytest.mark.parametrize("kernel", ["knownzero", "debug"])
def test_our_kernel_on_the_distributions_qemu(kernel: str) -> None:
    """Such a QEMU returns used lengths that mean nothing: without the bit they are not looked at."""
    result = run(f"{DIRTY}; {REPORT}; {JOB}; grep pgzeroed_ /proc/vmstat", kernel=kernel, qemu="stock")
    fine(result)
    found = counters(result)
    assert found["pgzeroed_set_reported"] == 0
    assert found["pgzeroed_skip"] == 0
    assert found["pgzeroed_bad"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_the_base_kernel_on_our_qemu(device: str) -> None:
    """It does not know the bit: it has no counter of known-zero pages, and its memory is zero all the same."""
    result = run(f"echo 100 > {DELAY}; {DIRTY}; sleep 2; {JOB}", kernel="base", devices=[device])
    fine(result)
    told = objects(result)
    assert [one["bytes"] for one in told] == VERIFIED
    assert [one["vmstat"]["pgzeroed_bad"] for one in told] == [None, None]


@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_the_distributions_kernel_on_our_qemu(device: str) -> None:
    result = run(
        "uname -r; fillfree --share 60; fillfree --share 60; " + JOB, kernel="stock", devices=[device]
    )
    fine(result)
    assert [one["bytes"] for one in objects(result)[2:]] == VERIFIED, text(result)
