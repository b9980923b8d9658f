# SPDX-License-Identifier: GPL-2.0
"""Do the tests find anything?

Kernels with one mistake each, of which a test must fail, and say why.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kernel import mutants

pytestmark = [pytest.mark.nightly, pytest.mark.matrix, pytest.mark.boots, pytest.mark.slow]


@pytest.mark.timeout(7200)
def test_none(tmp_path: Path) -> None:
    """The control: without a mistake all these tests pass."""
    found = mutants.every()
    kernels = {arch: mutants.build(arch, tmp_path) for arch in sorted({one.arch for one in found})}
    done = mutants.run_tests(kernels, sorted({one.found_by for one in found}))
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(patch.stem for patch in mutants.FOLDER.glob("*.patch")))
def test_mutant(name: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    mutant = mutants.read(mutants.FOLDER / f"{name}.patch")
    kernel = mutants.build(mutant.arch, tmp_path, mutant.patch)
    began = time.monotonic()
    done = mutants.run_tests({mutant.arch: kernel}, [mutant.found_by])
    record_property("seconds", seconds := round(time.monotonic() - began))
    print(f"{name}: {seconds} s")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, (
        f"not found: {done.stdout[-2000:]}{done.stderr}"
    )
    assert re.search(mutant.says, done.stdout), f"found for another reason:\n{done.stdout[-4000:]}"
