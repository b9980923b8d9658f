# SPDX-License-Identifier: GPL-2.0
"""The kernel's own unit tests, in User-Mode Linux and on x86_64."""

from __future__ import annotations

import pytest

from tests.kernel import kunit

pytestmark = pytest.mark.boots


@pytest.mark.parametrize("arch", ["um", "x86_64"])
def test_unit_tests_of_known_zero_blocks(arch: str) -> None:
    cases = kunit.run(arch, "page_zeroed*")
    failed = [f"{c.name}: {c.text}" for c in cases if c.state == "failed"]
    assert not failed, "\n".join(failed)
    assert any(c.state == "passed" for c in cases)
    if arch == "x86_64":
        # User-Mode Linux has no hugetlb; here it must not be left out.
        pool = [c.state for c in cases if "page_zeroed_hugetlb_pool" in c.name]
        assert pool and set(pool) == {"passed"}
