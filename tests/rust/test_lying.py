# SPDX-License-Identifier: GPL-2.0
"""The device that lies, for tests of guests.

Each lie reaches the guest, and no other build has one.
"""

from __future__ import annotations

import subprocess

import pytest

from lab.build import daemon
from tests.hostile.peer import ALL, ANSWER, INFLATE, MIB, PLAY, RAM, REPORTING, Device, FrontEnd

pytestmark = pytest.mark.slow
FIRST = PLAY >> 12


# The used length of a report of 1 MiB, what it holds then, the used length and bitmap of three
# inflated pages and one that does not exist.
LIES = {
    None: (MIB, 0, 1, 0b0111),
    "no-discard": (MIB, 0x5A, 1, 0b0111),
    "full-length": (MIB, 0, 1, 0b0111),
    "bit-order": (MIB, 0, 1, 0b1110_0000),
    "stale-bitmap": (MIB, 0, 1, 0xFF),
    "short-length": (MIB // 2, 0, 0, 0b0111),
    "bit6": (MIB >> 12, 0x5A, 1, 0b0111),
}


@pytest.mark.parametrize("lie", LIES, ids=str)
def test_each_false_answer_reaches_the_guest(lie: str | None) -> None:
    device = Device(daemon.build_lying(), *(["--lie", lie] if lie else []))
    try:
        with FrontEnd(device) as vm:
            # This one lies about a bit that the driver has declined.
            vm.start(ALL & ~(1 << 6) if lie == "full-length" else ALL)
            vm.fill(PLAY, 2 * MIB)
            length, byte, answer, bitmap = LIES[lie]
            assert vm.ask(REPORTING, (PLAY + MIB, MIB, True)) == length
            assert vm.holds(PLAY + MIB, MIB) == byte
            assert vm.pages(INFLATE, [FIRST, FIRST + 1, FIRST + 2, RAM >> 8], 1) == answer
            assert vm.memory[ANSWER] == bitmap
    finally:
        device.close()


@pytest.mark.parametrize("profile", ["dev", "release"])
def test_no_other_build_can_lie(profile: str) -> None:
    done = subprocess.run(
        [daemon.build(profile), "--lie", "bit6", "--fd", "3"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"--lie" in done.stderr
