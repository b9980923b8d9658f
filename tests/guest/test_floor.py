# SPDX-License-Identifier: GPL-2.0
"""The kernel to measure with, which does not zero the memory of large mappings."""

from __future__ import annotations

import pytest

from lab.build.linux import build_linux
from tests.guest.guests import fine, run, text

TAINT_TEST = 1 << 18


@pytest.mark.boots
@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("pages", ["thp", "nothp"])
def test_it_warns_and_leaves_only_large_mappings_dirty(pages: str) -> None:
    result = run(
        "dmesg | grep 'FOR MEASURING ONLY'; echo tainted $(cat /proc/sys/kernel/tainted); "
        f"fillfree --share 80 >/dev/null; alloc_once --size 32 --mode read_all --pages {pages} "
        f">/dev/null; ! alloc_once --size 256 --mode read_all --pages {pages}",
        kernel=build_linux("floor"),
        devices=[],
    )
    fine(result)
    told = text(result)
    assert "FOR MEASURING ONLY" in told
    assert int(told.partition("tainted ")[2].split()[0]) & TAINT_TEST
