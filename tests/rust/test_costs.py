# SPDX-License-Identifier: GPL-2.0
"""System calls that the daemon makes for what a guest reports."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import devices
from tests.hostile.peer import MIB, REPORTING, Device, FrontEnd, eventually

pytestmark = pytest.mark.slow
BLOCK = 4 * MIB
BATCH = 32  # as Linux reports
BATCHES = 8


def test_a_report_costs_little_more_than_its_holes(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    device = Device(devices.program("release"))
    try:
        with FrontEnd(device, size=(BATCH + 1) * BLOCK) as vm:
            vm.start()
            vm.works()
            count = tmp_path / "count"
            argv = [strace, "-f", "-c", "-o", str(count), "-p", str(device.process.pid)]
            with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as tracer:
                assert eventually(lambda: device.about("TracerPid") == tracer.pid)
                began = time.monotonic()
                for _ in range(BATCHES):
                    for n in range(1, BATCH + 1):
                        vm.put(REPORTING, (n * BLOCK, BLOCK, True))
                    vm.kick(REPORTING)
                    assert [vm.used(REPORTING) for _ in range(BATCH)] == [BLOCK] * BATCH
                seconds = time.monotonic() - began
                tracer.send_signal(signal.SIGINT)
                tracer.wait(10)
        rows = re.findall(
            r"^ *[\d.]+ +[\d.]+ +\d+ +(\d+)(?: +\d+)? +(\w+)$", count.read_text(), re.M
        )
        calls = {name: int(number) for number, name in rows if name != "total"}
        gib = BATCHES * BATCH * BLOCK / (1 << 30)
        record_property("calls_per_gib", sum(calls.values()) / gib)
        record_property("calls", calls)
        # For each block a hole and a check that it has no data; a few calls for each batch, with a
        # wait and a timer.
        assert calls["fallocate"] == BATCHES * BATCH
        assert sum(calls.values()) <= BATCHES * (2 * BATCH + 12) + 20 * (1 + seconds), calls
    finally:
        device.close()
