# SPDX-License-Identifier: GPL-2.0
"""TCG plugins of the lab (lab/plugins/NAME.c), compiled when needed."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lab.core import lock, paths
from lab.core import run as runner
from lab.machine import fetch

SOURCES = paths.REPO / "lab" / "plugins"


def build_plugin(name: str) -> Path:
    """Compile a plugin against QEMU's own header; cached by content. LabError when it does not build."""
    source = SOURCES / f"{name}.c"
    tree = fetch.pristine(fetch.obtain("qemu"))
    header = tree / "include" / "qemu"
    digest = hashlib.sha256(source.read_bytes() + (header / "qemu-plugin.h").read_bytes())
    target = paths.sub("plugins") / f"{name}-{digest.hexdigest()[:16]}.so"
    if target.is_file():
        return target
    fix = "install libglib2.0-dev and pkg-config, or mend the error above"
    flags = runner.output(["pkg-config", "--cflags", "glib-2.0"], "cannot find GLib's headers", fix).split()
    with lock.new_file(target) as work:
        argv = ["cc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", f"-I{header}", *flags]
        runner.logged(
            [*argv, "-o", work, source], paths.log_file("plugin"), "the TCG plugin does not compile", fix
        )
    return target
