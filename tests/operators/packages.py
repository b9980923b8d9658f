# SPDX-License-Identifier: GPL-2.0
"""The package of QEMU, for tests."""

from __future__ import annotations

from pathlib import Path

from lab.build import package
from lab.core import run


def unpacked_qemu(folder: Path) -> Path:
    """The /usr of the package."""
    made = package.package_qemu(folder / "out")
    run.output(["dpkg-deb", "-x", made, folder / "root"], "the package cannot be unpacked", "make it again")
    return folder / "root" / "usr"
