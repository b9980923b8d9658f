# SPDX-License-Identifier: GPL-2.0
"""The device that lies, built for tests only."""

from __future__ import annotations

from pathlib import Path

from lab.build import daemon
from lab.core import paths


def liar() -> Path:
    """The daemon with the cargo feature ``lying``, in a folder of its own."""
    folder = daemon.target_dir() / "lying"
    arguments = [
        "build",
        "--locked",
        "-p",
        daemon.NAME,
        "--features",
        "lying",
        "--target-dir",
        str(folder),
    ]
    daemon.cargo(arguments, paths.log_file("daemon-lying"), "the lying device does not build", 800)
    return folder / "debug" / daemon.NAME
