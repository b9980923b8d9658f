# SPDX-License-Identifier: GPL-2.0
"""A guest's clock is as fast as the host's: what a guest times is told in figures."""

from __future__ import annotations

import re

import pytest

from lab.boot import accel
from tests.guest.guests import fine, run, text

pytestmark = pytest.mark.boots


def test_an_emulated_kernel_gets_the_rate_of_its_counter() -> None:
    source = "cat /sys/devices/system/clocksource/*/current_clocksource"
    result = run(
        # Linux replaces tsc-early about a second after its start.
        f"dmesg | grep 'tsc: '; while [ $({source}) = tsc-early ]; do sleep 0.1; done; {source}",
        accel="tcg",
    )
    fine(result)
    found = re.search(
        r"tsc: Detected (\d+)\.(\d{3}) MHz (?:TSC|processor)\n(?!.*Detected)", text(result)
    )
    assert found
    assert int(found[1] + found[2]) == accel.tsc_khz()
    assert text(result).rstrip().endswith("\ntsc")


def test_the_counter_is_measured_exactly() -> None:
    """By a clock and a counter that are read together, it is the same each time."""
    program = accel.tsc_khz.__wrapped__
    several = [program() for _ in range(3)]
    assert max(several) - min(several) <= 1e-4 * min(several)
