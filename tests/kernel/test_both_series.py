# SPDX-License-Identifier: GPL-2.0
"""Both series fit, read well and survive saving."""

from __future__ import annotations

import pytest

from lab import check


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linux", "qemu"])
def test_series_is_in_order(name: str) -> None:
    problems = check.check(name)
    assert not problems, "\n".join(f"{p.check}: {p.where}: {p.text}" for p in problems)
