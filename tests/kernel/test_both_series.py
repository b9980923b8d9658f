# SPDX-License-Identifier: GPL-2.0
"""Both series fit, read well and survive saving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab.core import paths
from lab.series import check
from tests.kernel import unchanged


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linux", "qemu"])
def test_series_is_in_order(name: str, record_property: Callable[[str, object], None]) -> None:
    with unchanged.since_it_passed(f"series-{name}", [paths.REPO / name, Path(__file__)]) as same:
        record_property("unchanged since it passed", same)
        if not same:
            problems = check.check(name)
            assert not problems, "\n".join(f"{p.check}: {p.where}: {p.text}" for p in problems)
