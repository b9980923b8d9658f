# SPDX-License-Identifier: GPL-2.0
"""Download and unpack for a later step while an earlier one leaves a CPU idle.

QEMU's configure runs on one CPU for the time that unpacking the kernel's source takes.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

from lab.core import paths, run
from lab.machine import debs, fetch

PACKAGES = ("seabios", "busybox-static")
GRACE = 10.0  # seconds to remove its unfinished work


@contextlib.contextmanager
def of_kernels() -> Iterator[None]:
    """Download and unpack the kernel's source and Debian's packages for guests while the block runs.

    The end of the block waits for it; a failure of the block interrupts it. It is a silent process of its own: a
    failure is reported when the files are needed.
    """
    log = paths.log_file("ahead")
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield
        process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        if process.poll() is None:
            run.end_group(process)


def main() -> None:
    """The other process."""
    fetch.pristine(fetch.obtain("linux"))
    for package in PACKAGES:
        debs.unpacked(package)


if __name__ == "__main__":
    main()
