# SPDX-License-Identifier: GPL-2.0
"""The device against a fuzzer, for some minutes each night."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import fuzz

SECONDS = int(os.environ.get("KNOWNZERO_FUZZ_SECONDS", "300"))

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.fuzz, pytest.mark.timeout(SECONDS + 1800)]


@pytest.fixture(scope="module")
def programs() -> Path:
    return fuzz.build()


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_is_found(
    target: str, programs: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    fuzz.seed(tmp_path)
    seeds = list((tmp_path / target).iterdir())
    assert len(seeds) >= 8
    done = fuzz.fuzz(programs, target, tmp_path / target, SECONDS)
    record_property("fuzz_inputs", done.runs)
    record_property("fuzz_edges", done.edges)
    assert done.runs > 10 * SECONDS
    # It has got somewhere: what is found is added to the seeds.
    assert done.edges > 100
    assert len(list((tmp_path / target).iterdir())) > len(seeds)
