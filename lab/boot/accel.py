# SPDX-License-Identifier: GPL-2.0
"""The accelerator that works here, found by running a kernel under it."""

import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from lab.boot import argv, initramfs
from lab.build import programs as guest
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError, UsageError

CHOICES = ("auto", "kvm", "tcg")
PROBE_SECONDS = 20
MARK = b"knownzero-kvm-works"
APPEND = "console=ttyS0 panic=-1"


@functools.cache
def tsc_khz() -> int:
    """The speed of the machine's time stamp counter in kHz; 0 where there is none (not x86_64)."""
    if platform.machine() != "x86_64":
        return 0
    program = guest.build_program(Path(__file__).parents[2] / "guest" / "tsc_khz.c")
    return int(run.output([program], "the time stamp counter cannot be measured", "run `kz doctor`"))


def choose(wanted: str, qemu: Path, kernel: Path, arch: str = "x86_64") -> str:
    """``kvm`` or ``tcg``; ``auto`` is the best that works. Kernels for other processors are emulated."""
    if wanted not in CHOICES:
        raise UsageError(f"Bad --accel: {wanted}", "no accelerator has this name", "use auto, kvm or tcg")
    if arch != "x86_64" and wanted == "kvm":
        raise UsageError("Bad --accel: kvm", f"the kernel is for {arch}", "use --accel auto or tcg")
    if arch != "x86_64" or wanted == "tcg":
        return "tcg"
    works, why = kvm_works(qemu, kernel)
    if wanted == "kvm" and not works:
        fix = "use --accel tcg, or run on a machine with working KVM"
        raise LabError("KVM cannot be used here", why, fix)
    return "kvm" if works else "tcg"


def kvm_works(qemu: Path, kernel: Path) -> tuple[bool, str]:
    """Whether a kernel reaches user space under KVM, and why not; remembered per machine boot."""
    if not os.path.exists("/dev/kvm"):
        return False, "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False, "/dev/kvm may not be opened by this user"
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"), qemu.stat()
    own = "" if paths.cache() in kernel.parents else f"{kernel} {kernel.stat().st_mtime_ns}"
    key = f"{platform.release()} {boot} {qemu} {found.st_size} {found.st_mtime_ns} {own}"
    answer = paths.sub("kvm") / hashlib.sha256(key.encode()).hexdigest()
    with lock.locked("kvm-probe"):
        if not answer.is_file():
            with progress.step("trying KVM"):
                lock.write_atomically(answer, _probe(qemu, kernel))
        why = answer.read_text(encoding="utf-8")
    return not why, why


def _probe(qemu: Path, kernel: Path) -> str:
    """The reason why a kernel does not run under KVM; empty if it does."""
    with tempfile.TemporaryDirectory(prefix=".kvm-", dir=paths.sub("work")) as folder:
        initrd = Path(folder) / "initrd"
        initramfs.write(initrd, ["sh", "-c", f"echo {MARK.decode()} >/dev/console"], "none", [], [])
        words = [str(qemu), *argv.BARE, "-machine", "q35", *argv.cpu("kvm"), "-m", "512M", "-serial", "stdio"]
        words += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", APPEND]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False
            )
            said, why = done.stdout, "/dev/kvm opens, but the kernel ended before user space"
            why = [why, *done.stderr.decode(errors="replace").strip().splitlines()][-1]
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            why = f"/dev/kvm opens, but a kernel does not reach user space within {PROBE_SECONDS} s"
        return "" if MARK in said else why
