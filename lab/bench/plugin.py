# SPDX-License-Identifier: GPL-2.0
"""TCG plugins of the lab (lab/plugins/NAME.c), compiled when needed, and the kernel's symbols for
their counts.
"""

import bisect
import hashlib
import sys
import time
from pathlib import Path
from typing import NamedTuple

from lab.core import lock, paths
from lab.core import run as runner
from lab.machine import fetch

WRITTEN_S = 0.05  # the plugin writes its counts every few milliseconds
SOURCES = paths.REPO / "lab" / "plugins"


class Symbols(NamedTuple):
    """The addresses of a kernel's functions, sorted, and their names."""

    addresses: list[int]
    names: list[str]

    def function_at(self, address: int) -> str:
        """The function that an address lies in, or "?" before the first."""
        at = bisect.bisect_right(self.addresses, address) - 1
        return self.names[at] if at >= 0 else "?"


def symbols(system_map: Path) -> Symbols:
    lines = (line.split()[:3] for line in system_map.read_text(encoding="utf-8").splitlines())
    found = sorted((int(address, 16), name) for address, kind, name in lines if kind in "tTwW")
    return Symbols([address for address, _ in found], [name for _, name in found])


def stored(file: Path) -> int:
    """Bytes stored by ``rep stos`` so far, by the file of the plugin zerobytes."""
    time.sleep(WRITTEN_S)
    return int.from_bytes(file.read_bytes(), sys.byteorder)


def build_plugin(name: str) -> Path:
    """Compile a plugin against QEMU's own header; cached by content.

    LabError when it does not build.
    """
    source = SOURCES / f"{name}.c"
    header = fetch.pristine(fetch.obtain("qemu")) / "include" / "qemu"
    sources = (source, SOURCES / "plugin.h", header / "qemu-plugin.h")
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sources))
    target = paths.sub("plugins") / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    fix = "install libglib2.0-dev and pkg-config, or correct the source"
    flags = runner.output(
        ["pkg-config", "--cflags", "glib-2.0"], "cannot find GLib's headers", fix
    ).split()
    with lock.new_file(target) as work:
        argv = [
            "cc",
            "-std=gnu11",
            "-O2",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
        ]
        log = paths.log_file("plugin")
        what = f"the TCG plugin {name} does not compile"
        runner.logged([*argv, f"-I{header}", *flags, "-o", work, source], log, what, fix)
    return target
