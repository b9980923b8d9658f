# SPDX-License-Identifier: GPL-2.0
"""What is repeated until it is known well enough.

The interval is what it says, and the end comes when it should.
"""

from __future__ import annotations

import itertools

import pytest

from lab.bench import repeat
from lab.bench.repeat import is_narrow, until_known


@pytest.mark.parametrize(
    ("values", "narrow"),
    [
        ([], False),
        ([100.0] * 5, False),
        ([100.0] * 6, True),
        ([0.0] * 6, True),
        ([95.0, 100, 100, 100, 100, 105], True),
        ([94.9, 100, 100, 100, 100, 100], False),
        ([100.0, 100, 100, 100, 100, 105.1], False),
        # One wild value of nine decides nothing.
        ([100.0] * 8 + [900], True),
    ],
)
def test_narrow(values: list[float], narrow: bool) -> None:
    assert is_narrow(values) is narrow


@pytest.mark.parametrize(
    ("pairs", "least", "spread", "times"),
    [
        (3, 0, 0.0, 3),
        (10, 0, 0.0, 6),
        (10, 0, 50.0, 10),
        (0, 0, 0.0, 0),
        (10, 8, 0.0, 8),
        (10, 8, 50.0, 10),
        (3, 8, 0.0, 3),
    ],
)
def test_it_ends_when_all_is_known_or_pairs_have_been_made(
    pairs: int, least: int, spread: float, times: int
) -> None:
    found: dict[str, list[float]] = {"calm": [], "other": []}
    turns = []
    for turn in until_known(pairs, found.values(), least):
        turns.append(turn)
        found["calm"].append(10.0)
        found["other"].append(100.0 + spread * (turn % 2))
    assert turns == list(range(times))


def test_every_guest_comes_first_and_last() -> None:
    for number in (2, 3, 5):
        orders = [repeat.by_turns(range(number), turn) for turn in range(-1, 2 * number - 1)]
        assert (
            {order[0] for order in orders} == {order[-1] for order in orders} == set(range(number))
        )
        assert all(sorted(order) == list(range(number)) for order in orders)
        after = {pair for order in orders for pair in itertools.pairwise(order)}
        assert {(b, a) for a, b in after} == after


def test_warm_ups_do_not_count() -> None:
    begun: list[int] = []
    found = list(repeat.turns(("base", "ours"), 2, before=lambda: begun.append(len(begun))))
    assert [(side, counts) for side, counts in found[:2]] == [("base", False), ("ours", False)]
    assert [counts for _, counts in found[2:]] == [True] * 4 and begun == [0, 1, 2]
    assert found[2][0] != found[4][0]  # the other side goes first
