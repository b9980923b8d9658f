# SPDX-License-Identifier: GPL-2.0
"""Instructions of a kernel are attributed to its functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.bench import hotpath
from lab.bench.plugin import build_plugin


def test_instructions_are_added_up_by_function(tmp_path: Path) -> None:
    system_map = tmp_path / "System.map"
    system_map.write_text(
        "ffffffff81000100 T second\nffffffff81000000 t first\nffffffff81000180 D not_code\n"
        "ffffffff81000200 W third\n",
        encoding="utf-8",
    )
    table = hotpath.symbols(system_map)
    assert table[1] == ["first", "second", "third"]
    counted = (
        "ffffffff81000000 5\nffffffff810000f0 2\nffffffff81000190 7\nffffffff82000000 1\nffffffff80000000 9\n"
    )
    assert hotpath.by_function(counted, *table) == {"first": 7, "second": 7, "third": 1}


@pytest.mark.parametrize("name", ["functions", "zerobytes"])
def test_plugins_compile(name: str) -> None:
    assert build_plugin(name).is_file()
