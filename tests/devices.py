# SPDX-License-Identifier: GPL-2.0
"""Daemons of tests: one without a front end, and what a test waits for."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.build import daemon
from lab.core.errors import TestFailure


def program(profile: str = "dev") -> Path:
    """The daemon to test; KNOWNZERO_DAEMON names another build, for example one with a mistake."""
    return Path(os.environ.get("KNOWNZERO_DAEMON") or daemon.build(profile))


@contextlib.contextmanager
def running(arguments: list[str] | None = None, profile: str = "dev") -> Iterator[daemon.Daemon]:
    """A daemon without a front end; ended with the block."""
    device = daemon.Daemon(program(profile), arguments or [])
    try:
        yield device
    finally:
        device.close()


PATIENCE = 120.0  # seconds, on a busy machine


def wait_for(
    device: daemon.Daemon, what: str, holds: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Wait until ``holds(status)``; raises TestFailure when it does not."""
    deadline = time.monotonic() + PATIENCE
    while not holds(status := device.status()):
        if time.monotonic() > deadline:
            why = json.dumps(status, indent=1)
            raise TestFailure(
                f"the device does not get there: {what}", why, f"read its log: {device.log}"
            )
        time.sleep(0.05)
    return status


def statistics(device: daemon.Daemon) -> dict[str, int]:
    """The guest's statistics: asked for until it answers, which it does late on a busy machine."""
    deadline = time.monotonic() + PATIENCE
    while "stats" not in (answer := device.ask(command="stats")):
        if time.monotonic() > deadline:
            why, fix = json.dumps(answer), f"read its log: {device.log}"
            raise TestFailure("the guest sends no statistics", why, fix)
    found: dict[str, int] = answer["stats"]
    return found


def logs(log: Path, words: str) -> None:
    """Wait until a log has these words."""
    deadline = time.monotonic() + PATIENCE
    while words not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            raise TestFailure(f"the log never says: {words}", log.read_text(), f"read {log}")
        time.sleep(0.05)
