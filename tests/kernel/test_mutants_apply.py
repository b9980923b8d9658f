# SPDX-License-Identifier: GPL-2.0
"""The night's mutants fit the series of today."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.patches.repo import Repo
from tests.kernel import mutants

FOLDERS = {"linux": mutants.FOLDER, "qemu": mutants.FOLDER / "qemu"}


@pytest.mark.images
@pytest.mark.parametrize("what", FOLDERS)
def test_each_applies(what: str) -> None:
    patches: list[Path] = sorted(FOLDERS[what].glob("*.patch"))
    assert patches
    with mutants.tree_with(None, what) as tree:
        for patch in patches:
            done = Repo(tree).ask("apply", "--check", str(patch))
            assert done.returncode == 0, f"{patch.name}: {done.stderr}"
