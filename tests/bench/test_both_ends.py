# SPDX-License-Identifier: GPL-2.0
"""The bench of both ends without a guest: its counts, and the inner guest's command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import both_ends, session
from lab.boot import nested
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from tests.bench.fakes import MIB


def test_the_outer_kernel_is_counted_as_the_inner_one() -> None:
    base = {"thp_fault_alloc": 64, "minor_faults": 70, "pool": 0}
    assert both_ends.zeroed(base) == 128 * MIB + 6 * 4096
    pool = {"thp_fault_alloc": 0, "minor_faults": 70, "pool": 64 * 512}
    assert both_ends.zeroed(pool) == 128 * MIB + 6 * 4096
    assert both_ends.zeroed({**base, "pgzeroed_cleared": 3, "pgzeroed_bad": 0}) == 3 * 4096
    with pytest.raises(TestFailure, match="was not"):
        both_ends.zeroed({**base, "pgzeroed_cleared": 3, "pgzeroed_bad": 1})


def test_the_inner_guest_has_kvm_and_needs_no_socket() -> None:
    lines = nested.start(BootSpec(memory="1G", devices=[session.BALLOON], append="quiet"))
    text = "\n".join(lines)
    for words in (
        "-accel kvm",
        "-cpu host",
        "kernel-irqchip=split",
        session.BALLOON,
        "no_timer_check",
    ):
        assert words in text
    assert "socket" not in text
    for name in ("ctl", "out", "err", "in"):
        assert f"name=kz.{name}" in text


def test_a_program_brings_its_libraries() -> None:
    found = nested.libraries(Path("/bin/ls"))
    assert any(file.name.startswith("libc.so") for file in found)
    assert any(file.name.startswith("ld-linux") for file in found) and all(
        file.is_file() for file in found
    )
