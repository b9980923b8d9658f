# SPDX-License-Identifier: GPL-2.0
"""Guests that run natively under kvm_pvm, on a machine that has it."""

from __future__ import annotations

import json
import os

import pytest

from lab.boot import accel, hugepages
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.core.errors import LabError
from tests.guest.guests import (
    DELAY,
    FLUSH,
    STRESS_SEED,
    ZP,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    run,
    text,
)

TAINT_TEST = 1 << 18
SECONDS = int(os.environ.get("KNOWNZERO_STRESS_SECONDS", "600"))


def obstacle() -> str:
    try:
        accel.need_pvm()
    except LabError as error:
        return f"{error.what}: {error.why}"
    return ""


pytestmark = [
    pytest.mark.boots,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.native,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "PVM works"),
]


def pool() -> int:
    return int(hugepages.POOL.read_text())


@pytest.mark.parametrize("qemu", ["knownzero", "stock"])
@pytest.mark.parametrize("kernel", ["base", "knownzero"])
def test_a_guest_runs_natively(kernel: str, qemu: str) -> None:
    """A loop of 1e9 additions takes seconds at most, and five minutes in the emulator."""
    before = pool()
    script = "dmesg | grep 'FOR MEASURING'; cat /proc/sys/kernel/tainted; native_costs"
    result = run(script, kernel=kernel, qemu=qemu, accel="pvm", memory="1G")
    fine(result)
    warning, taint, costs = text(result).splitlines()
    assert "kvm_pvm" in warning and int(taint) & TAINT_TEST
    assert json.loads(costs)["loop_ns"] < 5e9
    assert result.accel == "pvm"
    assert pool() == before


def test_an_interrupt_leaves_nothing_in_the_pool() -> None:
    before = pool()
    spec = BootSpec(kernel="base", accel="pvm", memory="1G", command=["sleep", "100"])
    with pytest.raises(KeyboardInterrupt), running(spec) as guest:
        assert guest.huge_pages and guest.huge_pages.pages == 512
        assert pool() == before + 512
        raise KeyboardInterrupt
    assert pool() == before


@pytest.mark.timeout(900 + 4 * SECONDS)
def test_no_byte_leaks_natively(record_property: Record) -> None:
    """Reports, kzeropaged and the balloon's flush as sources, at the speed of the CPU."""
    script = (
        f"echo 50 > {DELAY}; echo 1 > {ZP}/enabled; "
        f"stress --seconds {SECONDS} --seed {STRESS_SEED} compact pressure hugetlb flush "
        f"> /tmp/stress & leak_hunter --setup --whole-round --seconds {SECONDS} "
        f"--seed {STRESS_SEED} --workers 2; wait $!; cat /tmp/stress; echo 0 > {FLUSH}; "
        "grep pgzeroed_ /proc/vmstat"
    )
    result = run(script, kernel="debug", accel="pvm", memory="1G", timeout=600.0 + 4 * SECONDS)
    fine(result)
    hunter = hunted(result, record_property)
    found = counters(result)
    record_property("skips_per_minute", found["pgzeroed_skip"] * 60 // SECONDS)
    expect_at_least(len(hunter["checked_pages"]), 10)
    expect_at_least(found["pgzeroed_skip"] * 60 / SECONDS, 10000)
    assert found["pgzeroed_bad"] == 0
