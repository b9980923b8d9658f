# SPDX-License-Identifier: GPL-2.0
"""A selftest counts only if it ended well and had parts that passed.

Kselftest ends with 0 when all were skipped.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from tests.guest.test_selftests import GROUPS, SKIPPED, Ran, judge, parts, ran

GROUP = "hugetlb"
TOTALS = "# Totals: pass:{} fail:0 xfail:0 xpass:0 skip:2 error:0"


def result(stdout: str) -> BootResult:
    return BootResult(stdout, "", 0, Path("console"), "tcg", 1.0, [])


def fine() -> dict[str, Ran]:
    return {test: Ran(0, 1) for test in GROUPS[GROUP]}


def test_lines_are_read() -> None:
    out = f"selftest: a -M: 0 {TOTALS.format(3)}\nselftest: b: 4 \n{{}}\nselftest: c: 124 \n"
    assert ran(result(out)) == {"a -M": Ran(0, 3), "b": Ran(4, None), "c": Ran(124, None)}


def test_all_passed() -> None:
    assert judge(fine(), GROUP, {}, {}) == []
    # Not all of them count their parts.
    assert judge({**fine(), "thuge-gen": Ran(0, None)}, GROUP, {}, {}) == []


@pytest.mark.parametrize("how", [Ran(1, 5), Ran(SKIPPED, None), Ran(0, 0), Ran(124, None)])
def test_one_did_not_pass(how: Ran) -> None:
    wrong = judge({**fine(), "thuge-gen": how}, GROUP, {}, {})
    assert len(wrong) == 1
    assert wrong[0].startswith("thuge-gen: ended with")


def test_one_is_missing() -> None:
    found = fine()
    del found["thuge-gen"]
    assert judge(found, GROUP, {}, {}) == ["thuge-gen: did not end"]


def test_what_is_expected_has_to_be_so() -> None:
    for how in (Ran(SKIPPED, None), Ran(0, 0)):
        assert judge({**fine(), "thuge-gen": how}, GROUP, {"thuge-gen": "why"}, {}) == []
    assert judge({**fine(), "thuge-gen": Ran(1, 0)}, GROUP, {}, {"thuge-gen": "why"}) == []
    assert judge(fine(), GROUP, {"thuge-gen": "why"}, {}) != []
    assert judge(fine(), GROUP, {}, {"thuge-gen": "why"}) != []


def test_parts_compare_without_their_numbers() -> None:
    out = (
        "part: cow -x: ok 1 read 4096 at 0x7f12\npart: cow -x: ok 2 read 8192 at 0x7f99\n"
        "part: cow -x: ok 3 huge # SKIP no pool\npart: cow -x: not ok 4 pinned\nselftest: cow -x: "
        "1 \n"
    )
    assert parts(result(out)) == {
        "cow -x: ok: read N at N",
        "cow -x: skipped: huge # SKIP no pool",
        "cow -x: not ok: pinned",
    }
