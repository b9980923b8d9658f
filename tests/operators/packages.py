# SPDX-License-Identifier: GPL-2.0
"""The package of QEMU, for tests."""

from __future__ import annotations

import shutil
from pathlib import Path

from lab.build import package, qemu
from lab.core import run
from lab.machine import debs


def unpacked_qemu(folder: Path) -> Path:
    """The package, with the firmware that it depends on, unpacked; returns its /usr."""
    root = folder / "root"
    made = package.package_qemu(folder / "out")
    run.output(["dpkg-deb", "-x", made, root], "the package cannot be unpacked", "make it again")
    for name, place in qemu.FIRMWARE.items():
        shutil.copytree(debs.unpacked(name) / place, root / place)
    return root / "usr"
