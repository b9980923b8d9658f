# SPDX-License-Identifier: GPL-2.0
"""The bench of both ends without a guest: its counts."""

from __future__ import annotations

import pytest

from lab.bench import both_ends
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
