# SPDX-License-Identifier: GPL-2.0
"""Guests without a machine, and runs without images, for the tests of the benches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lab.bench.plan import BenchOptions, Images
from lab.bench.runner import Run
from lab.bench.session import Side
from lab.bench.table import BENCHES
from lab.report.results import Metric

MIB = 1 << 20
KERNELS = ("base", "ours", "floor", "off", "outer_base", "outer_ours")
IMAGES = Images(
    Path("q"),
    {name: Path(name) / "bzImage" for name in KERNELS},
    {name: Path(name) for name in ("zerobytes", "lockhold")},
    Path("daemon"),
)


class FakeSide:
    """A guest that notes each command.

    ``answer`` makes the JSON of programs, ``line`` is the output of the shell.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[..., dict[str, Any]] = lambda *argv: {},
        line: str = "1000",
    ) -> None:
        self.name = self.kernel = name
        self.guest: Any = SimpleNamespace(
            pid=os.getpid(), accel="tcg", accel_reason="", daemon=None
        )
        self.has_flush = True
        self.asked: list[str] = []
        self.answer = answer
        self.line = line

    def sh(self, command: str) -> list[str]:
        self.asked.append(command)
        return [self.line]

    def number(self, command: str) -> int:
        return int(self.sh(command)[-1])

    def vmstat(self) -> dict[str, int]:
        return {"pgfault": 1000}

    def json(self, *argv: str) -> dict[str, Any]:
        self.asked.append(" ".join(argv))
        return self.answer(*argv)

    def settle(self) -> int:
        return MIB


def side(name: str, *more: Any) -> Side:
    return cast(Side, FakeSide(name, *more))


def fake(one: Side) -> FakeSide:
    return cast(FakeSide, one)


def run_of(name: str = "thp", **options: Any) -> Run:
    """A run of a bench that has begun."""
    return Run(BENCHES[name], BenchOptions(**options), IMAGES)


def by_name(run: Run) -> dict[str, Metric]:
    return {metric.name: metric for metric in run.metrics}
