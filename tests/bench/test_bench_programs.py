# SPDX-License-Identifier: GPL-2.0
"""The bench of real programs, without a guest: outputs that differ."""

from __future__ import annotations

import pytest

from lab.bench import programs
from lab.core.errors import TestFailure


def test_another_output_fails_the_run() -> None:
    same = {("base", "cold"): ["the sum"], ("ours", "cold"): ["the sum"]}
    programs.compare("sqlite", same)
    with pytest.raises(TestFailure, match="sqlite computes something else") as error:
        programs.compare("sqlite", same | {("kzeropaged", "cold"): ["another sum"]})
    assert "base: the sum\n" in error.value.why and "kzeropaged: another sum" in error.value.why
    assert "--only sqlite" in error.value.fix
