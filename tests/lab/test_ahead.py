# SPDX-License-Identifier: GPL-2.0
"""What is got ahead of its time is there when it is wanted, and is nobody's trouble when it fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lab.build import ahead
from lab.core import lock, paths
from lab.machine import fetch
from tests.lab.test_fetch import GOOD


@pytest.fixture
def source(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tarball that is taken for the kernel's source."""
    archive = tmp_path / "linux-7.3.4.tar.xz"
    archive.write_bytes(GOOD)
    monkeypatch.setenv("KNOWNZERO_LINUX_SOURCE", str(archive))
    monkeypatch.setenv("PYTHONPATH", str(paths.REPO))
    return archive


def test_the_source_is_unpacked_when_the_block_has_ended(source: Path) -> None:
    with ahead.of_kernels():
        pass
    assert (fetch.identify("linux").tree / "mm" / "a.c").read_text() == "int a;\n"


def test_a_source_that_cannot_be_unpacked_is_left_to_whoever_needs_it(source: Path) -> None:
    source.write_bytes(GOOD[: len(GOOD) // 2])
    with ahead.of_kernels():
        pass
    assert not fetch.identify("linux").tree.exists()


def test_it_is_interrupted_when_the_block_fails(source: Path) -> None:
    with pytest.raises(KeyboardInterrupt), lock.locked("unpack-linux"), ahead.of_kernels():
        time.sleep(2.0)
        began = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - began < ahead.GRACE
    tree = fetch.identify("linux").tree
    assert not tree.exists() and not list(tree.parent.glob(".*"))
