# SPDX-License-Identifier: GPL-2.0
"""The device against a fuzzer, for some minutes each night."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.core import paths
from tests.rust import fuzzing as fuzz

SECONDS = int(os.environ.get("KNOWNZERO_FUZZ_SECONDS", "300"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.fuzz,
    pytest.mark.timeout(SECONDS + 1800),
]


@pytest.fixture(scope="module")
def programs() -> Path:
    return fuzz.build()


@pytest.fixture
def corpus(target: str) -> Iterator[Path]:
    """Seeds of a target, in a folder that nobody else removes.

    Pytest's are gone after its third run from then.
    """
    with tempfile.TemporaryDirectory(prefix=f".fuzz-{target}-", dir=paths.sub("work")) as folder:
        fuzz.seed(Path(folder))
        yield Path(folder) / target


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_nothing_is_found(
    target: str, programs: Path, corpus: Path, record_property: Callable[[str, object], None]
) -> None:
    seeds = list(corpus.iterdir())
    assert len(seeds) >= 8
    done = fuzz.fuzz(programs, target, corpus, SECONDS)
    record_property("fuzz_inputs", done.runs)
    record_property("fuzz_edges", done.edges)
    assert done.runs > 10 * SECONDS
    # It has got somewhere: what is found is added to the seeds.
    assert done.edges > 100
    assert len(list(corpus.iterdir())) > len(seeds)
