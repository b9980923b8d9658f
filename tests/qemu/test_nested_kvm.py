# SPDX-License-Identifier: GPL-2.0
"""A KVM without hardware: a guest in a guest, and what both kernels zero of memory that comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.bench.both_ends import ALL, Inner, use
from lab.bench.session import LOOP, MIB, PAGE, Side
from lab.boot import nested
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from tests.guest.guests import BALLOON, CHECK, expect_at_least, expect_at_most

# Its kernel takes five minutes to build, which the day's limit from an empty cache does not have.
pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.nightly]

FILL, USED = 384, 256  # MB


def test_neither_end_zeroes_memory_that_comes_back(image: Callable[..., Path], qemu: Path) -> None:
    shell = ["sh", "-c", LOOP]
    guest = BootSpec(memory="1G", devices=[BALLOON], command=shell, append=CHECK)
    host = BootSpec(
        image("knownzero", config=nested.CONFIG), memory="2G", command=shell, append=CHECK, timeout=240
    )
    with running(nested.outer(host, guest, qemu)) as running_host:
        outer = Side("outer", running_host)
        outer.sh(ALL)
        inner = Inner("ours", outer, guest)
        assert "Hypervisor detected: KVM" in running_host.console.read_text(errors="replace")
        inner.sh(f"fillfree --size {FILL} > /dev/null")
        full = inner.counts()["resident"] * PAGE
        expect_at_least(full - inner.settle(), 0.9 * FILL * MIB)
        found = use(inner, USED, "touch_all")
        expect_at_least(found["idle"], 0.9 * USED * MIB)
        expect_at_most(found["inner"], 0.05 * USED * MIB)
        expect_at_most(found["outer"], 0.05 * USED * MIB)
