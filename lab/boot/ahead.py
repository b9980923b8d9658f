# SPDX-License-Identifier: GPL-2.0
"""What `kz demo` downloads and builds, side by side.

Imports the standard library and the lab: `kz` starts it before the lab's environment exists.
"""

import ctypes
import itertools
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from lab.boot import initramfs
from lab.build import daemon, linux, qemu
from lab.core import beside, progress
from lab.core.errors import MACHINE, LabError
from lab.machine import fetch, stock, tools
from lab.machine.arches import PVM

Task = Callable[[], object]
# The daemon as the tests have it. It makes the same system calls as a release build.
PROFILE = "dev"
KERNEL = "knownzero"
CONFIG = "small"  # of the kernel, in linux/configs/matrix
MESON = Path(sys.executable).with_name("meson")
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def _source() -> None:
    source = fetch.obtain("linux")
    if tools.has("xz"):
        fetch.pristine(source)


def on_stock_qemu() -> bool:
    """Whether the demo has the daemon on Debian's QEMU; else the lab builds its own QEMU."""
    return tools.can_have_rust()


def first() -> dict[str, Task]:
    """The tasks that need a C compiler at most. They begin while other tools are installed."""
    tasks: dict[str, Task] = {"source": _source, "programs": initramfs.base_archive}
    return tasks | ({"stock QEMU": stock.qemu} if on_stock_qemu() else {})


def then(arch: str = "x86_64") -> dict[str, Task]:
    """The tasks that begin when the tools of the kernel are installed."""
    tasks: dict[str, Task] = {"kernel": lambda: linux.build_linux(KERNEL, arch, CONFIG)}
    if on_stock_qemu():
        return tasks | {"daemon": lambda: daemon.build(PROFILE)}
    least = ".".join(map(str, tools.RUST))
    progress.note(
        f"no Rust from {least} on is or can be installed: the lab's QEMU is built instead of the "
        "daemon"
    )
    # Its build needs the meson and ninja of the lab's environment.
    return tasks | ({"QEMU": qemu.build_qemu} if MESON.exists() else {})


def run(accel: str = "") -> None:
    """Everything that the demo needs with an accelerator; LabError for the first that fails."""
    with beside.running() as tasks:
        tasks.start(first())
        tools.need("linux")
        tasks.start(then(PVM if accel == "pvm" else "x86_64"))


if __name__ == "__main__":
    # Started by `kz` with its arguments, it ends with it. The lab waits for the same builds, and
    # prints their errors.
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(MACHINE))
    words = sys.argv[1:]
    is_native = "--accel=pvm" in words or ("--accel", "pvm") in itertools.pairwise(words)
    try:
        run("pvm" if is_native else "")
    except (LabError, OSError, KeyboardInterrupt):
        sys.exit(MACHINE)
