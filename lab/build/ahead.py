# SPDX-License-Identifier: GPL-2.0
"""Download and unpack for a later step while QEMU's configure leaves a CPU idle."""

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
    """Get the kernel's source and Debian's packages in a silent process while the block runs."""
    with paths.log_file("ahead").open("ab") as out:
        argv = [sys.executable, "-m", __name__]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield
        process.wait()
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signal.SIGINT)
            process.wait(GRACE)
        run.end_group(process)


def main() -> None:
    fetch.pristine(fetch.obtain("linux"))
    for package in PACKAGES:
        debs.unpacked(package)


if __name__ == "__main__":
    main()
