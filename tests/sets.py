# SPDX-License-Identifier: GPL-2.0
"""The sets of parts that a series can be built with."""

from __future__ import annotations

from lab.patches.parts import Series


def sets(series: Series) -> list[tuple[str, ...]]:
    """Every set of parts that is closed under what its parts stand on, the smallest first."""
    found: list[tuple[str, ...]] = [()]
    for part in series.parts:
        found += [(*one, part.name) for one in found if set(part.on) <= set(one)]
    return sorted((one for one in found if one), key=lambda one: (len(one), one))
