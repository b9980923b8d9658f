# SPDX-License-Identifier: GPL-2.0
"""QEMU's own tests of the balloon, run on our QEMU."""

from __future__ import annotations

import functools

import pytest

from lab import paths, testing

pytestmark = pytest.mark.slow

NAMES = ["virtio-balloon-reporting-test", "virtio-balloon-test"]


def test_the_series_brings_its_qtest() -> None:
    assert "virtio-balloon-reporting-test" in testing.qtest_programs()


@functools.cache
def results(name: str) -> list[str]:
    """TAP result lines of one qtest."""
    log = paths.log_file(f"qtest-{name}")
    testing.qtest(name, log)
    lines = [line for line in log.read_text().splitlines() if line.startswith(("ok ", "not ok "))]
    assert lines, f"no test ran (log: {log})"
    return lines


@pytest.mark.parametrize("name", NAMES)
def test_qtest(name: str) -> None:
    assert not [line for line in results(name) if line.startswith("not ok")]
    assert [line for line in results(name) if "# SKIP" not in line]


@pytest.mark.parametrize("name", NAMES)
def test_qtest_skips_nothing(name: str) -> None:
    skipped = [line.partition(" - ")[2] or line for line in results(name) if "# SKIP" in line]
    if skipped:
        pytest.skip("; ".join(skipped))
