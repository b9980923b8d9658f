# SPDX-License-Identifier: GPL-2.0
"""QEMU's own tests of the balloon, run on our QEMU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab.build.qemu import build_qemu
from lab.core import paths, run
from lab.testing import suite as testing
from tests import hugepages

pytestmark = pytest.mark.slow

NAMES = testing.QTESTS


# As many as those of the qtests ask for that need some.
HUGE_PAGES = 64
WANT_OF_HUGE_PAGES = f"needs {HUGE_PAGES} free huge pages"
WANT_OF_GIB_PAGES = "the host has no huge pages of 1 GiB"
GIB_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-1048576kB")


def qtest(name: str, log: Path) -> None:
    """Run one of QEMU's qtests on our QEMU; raises LabError (code 1) when it fails."""
    obj = testing.build_qtests()
    # This QEMU finds its firmware, and the one in the object folder does not.
    environment = {
        **os.environ,
        "QTEST_QEMU_BINARY": str(build_qemu("knownzero")),
        "G_TEST_DBUS_DAEMON": "",
    }
    argv = [str(obj / "tests" / "qtest" / name), "--tap", "-k"]
    run.logged(
        argv, log, f"QEMU's {name} fails", "read the log", env=environment, cwd=obj, timeout=300
    )


def results(name: str, log_name: str = "qtest") -> tuple[list[str], int]:
    """TAP result lines of one qtest, and how many huge pages were there for it."""
    log = paths.log_file(f"{log_name}-{name}")
    with hugepages.reserved(HUGE_PAGES) as free:
        qtest(name, log)
    lines = [line for line in log.read_text().splitlines() if line.startswith(("ok ", "not ok "))]
    assert lines, f"no test ran (log: {log})"
    return lines, free


def check_skips(lines: list[str], free: int) -> None:
    """AssertionError when a test was skipped, unless the machine lacks the huge pages for it.

    Pytest's skip then.
    """
    lacking = [WANT_OF_HUGE_PAGES] if free < HUGE_PAGES else []
    lacking += [] if GIB_PAGES.exists() else [WANT_OF_GIB_PAGES]
    skipped = [line for line in lines if "# SKIP" in line]
    assert not [line for line in skipped if not any(reason in line for reason in lacking)]
    if skipped:
        pytest.skip("; ".join(skipped))


def judge(lines: list[str], free: int) -> None:
    """Some cases ran, and all of them passed; see ``check_skips``."""
    assert not [line for line in lines if line.startswith("not ok")]
    assert [line for line in lines if "# SKIP" not in line]
    check_skips(lines, free)


@pytest.mark.parametrize("name", NAMES)
def test_qtest(name: str) -> None:
    """All cases pass; one is skipped only for want of huge pages, and so is the test then."""
    judge(*results(name))


def test_a_skip_for_another_reason_is_found() -> None:
    ran, for_pages, other = (
        "ok 1 /a",
        f"ok 2 /b # SKIP {WANT_OF_HUGE_PAGES} of 2 MiB",
        "ok 3 /c # SKIP no memfd",
    )
    check_skips([ran], 0)
    with pytest.raises(pytest.skip.Exception, match="ok 2 /b"):
        check_skips([ran, for_pages], HUGE_PAGES - 1)
    for lines, free in (([ran, for_pages], HUGE_PAGES), ([other], 0), ([for_pages, other], 0)):
        with pytest.raises(AssertionError):
            check_skips(lines, free)
