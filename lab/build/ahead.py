# SPDX-License-Identifier: GPL-2.0
"""What a later step downloads and unpacks, done beside an earlier one that leaves a CPU idle.

QEMU's configure runs on one CPU for as long as it takes to unpack the kernel's source.
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
GRACE = 10.0  # seconds, for it to take away what it has half done


@contextlib.contextmanager
def of_kernels() -> Iterator[None]:
    """Download and unpack the kernel's source and what guests need of Debian's while the block runs.

    The block's end waits for it; when the block fails it is interrupted. It is a process of its own and
    says nothing: what fails here fails again, and is reported, where it is needed.
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
