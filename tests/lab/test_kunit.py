# SPDX-License-Identifier: GPL-2.0
"""The kernel's own parser reads KTAP; the lab tells its results by name and misses no failure."""

from __future__ import annotations

import pytest

from tests.kernel import kunit

pytestmark = pytest.mark.slow  # it unpacks the kernel's source
LOG = """
[    0.1] booting
[    0.2] KTAP version 1
[    0.2] 1..2
[    0.2]     KTAP version 1
[    0.2]     # Subtest: page_zeroed
[    0.2]     # module: page_zeroed_kunit
[    0.2]     1..4
[    0.3]     ok 1 merge_both
[    0.3]     # merge_one: EXPECTATION FAILED at mm/tests/x.c:12
[    0.3]     not ok 2 merge_one
[    0.3]     ok 3 split # SKIP no memory
[    0.3]         KTAP version 1
[    0.3]         # Subtest: orders
[    0.3]         ok 1 order 0
[    0.3]         ok 2 order 9
[    0.3]     # orders: pass:2 fail:0 skip:0 total:2
[    0.3]     ok 4 orders
[    0.3] # page_zeroed: pass:2 fail:1 skip:1 total:4
[    0.3] not ok 1 page_zeroed
[    0.3]     KTAP version 1
[    0.3]     # Subtest: other
[    0.3]     1..1
[    0.3]     ok 1 fine
[    0.3] ok 2 other
[    0.4] Run /init as init process
"""


def test_a_whole_log() -> None:
    found = {c.name: c.state for c in kunit.parse(LOG)}
    assert found == {
        "page_zeroed.merge_both": "passed",
        "page_zeroed.merge_one": "failed",
        "page_zeroed.split": "skipped",
        "page_zeroed.orders.order 0": "passed",
        "page_zeroed.orders.order 9": "passed",
        "other.fine": "passed",
    }
    failed = next(c for c in kunit.parse(LOG) if c.state == "failed")
    assert "EXPECTATION FAILED" in failed.text


def test_a_log_that_ends_early_has_failed() -> None:
    cut = LOG[: LOG.index("[    0.3]     ok 3 split")]
    states = [c.state for c in kunit.parse(cut) if "unfinished" in c.name]
    assert states
    assert set(states) == {"failed"}
