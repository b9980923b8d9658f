# SPDX-License-Identifier: GPL-2.0
"""The accelerator that works here, found by running a kernel under it."""

import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lab.boot import argv, initramfs
from lab.build import programs as guest
from lab.core import lock, paths, progress, run
from lab.core.errors import LabError
from lab.machine import stock

PROBE_SECONDS = 20
MARK = b"knownzero-kvm-works"
APPEND = "console=ttyS0 panic=-1"


@functools.cache
def tsc_khz() -> int:
    """The speed of the machine's time stamp counter in kHz; 0 where there is none (not x86_64)."""
    if platform.machine() != "x86_64":
        return 0
    program = guest.build_program(Path(__file__).parents[2] / "guest" / "tsc_khz.c")
    return int(
        run.output([program], "the time stamp counter cannot be measured", "run `kz doctor`")
    )


@dataclass(frozen=True)
class Choice:
    """An accelerator, ``kvm`` or ``tcg``, and the reason for it."""

    name: str
    reason: str


def choose(wanted: str, qemu: Path, arch: str = "x86_64") -> Choice:
    """The accelerator of a guest: ``wanted``, one of ``spec.ACCELS``.

    Auto is KVM where it runs Debian's kernel.

    LabError if ``wanted`` is kvm and KVM does not run that kernel.

    """
    if arch != "x86_64":
        return Choice("tcg", f"the kernel is for {arch}")
    if wanted == "tcg":
        return Choice("tcg", "--accel tcg")
    why = kvm_obstacle(qemu)
    if wanted == "kvm" and why:
        fix = "use --accel tcg, or run on a machine with working KVM"
        raise LabError("KVM cannot be used here", why, fix)
    return Choice("tcg", why) if why else Choice("kvm", "KVM runs Debian's kernel")


def kvm_obstacle(qemu: Path) -> str:
    """The reason why KVM cannot be used with this QEMU; empty if it can.

    Remembered until the machine boots again.

    The probe runs Debian's kernel, which is known to run under KVM: a kernel under test that fails
    there must fail its test, and not be emulated instead.
    """
    if not os.path.exists("/dev/kvm"):
        return "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm may not be opened by this user"
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8"), qemu.stat()
    key = f"{platform.release()} {boot} {qemu} {found.st_size} {found.st_mtime_ns}"
    answer = paths.sub("kvm") / hashlib.sha256(key.encode()).hexdigest()
    with lock.locked("kvm-probe"):
        if not answer.is_file():
            try:
                kernel, _ = stock.kernel()
            except LabError as error:  # without a network; the next run tries it again
                return f"Debian's kernel, which tries KVM, cannot be had: {error.what}"
            with progress.step("trying KVM with Debian's kernel"):
                lock.write_atomically(answer, _probe(qemu, kernel))
        return answer.read_text(encoding="utf-8")


def _probe(qemu: Path, kernel: Path) -> str:
    """The reason why a kernel does not run under KVM; empty if it does."""
    with tempfile.TemporaryDirectory(prefix=".kvm-", dir=paths.sub("work")) as folder:
        initrd = Path(folder) / "initrd"
        initramfs.write(initrd, ["sh", "-c", f"echo {MARK.decode()} >/dev/console"], "none", [], [])
        words = [
            str(qemu),
            *argv.BARE,
            "-machine",
            "q35",
            *argv.cpu("kvm"),
            "-m",
            "512M",
            "-serial",
            "stdio",
        ]
        words += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", APPEND]
        try:
            done = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_SECONDS,
                check=False,
            )
            said, why = done.stdout, "/dev/kvm opens, but Debian's kernel ended before user space"
            why = [why, *done.stderr.decode(errors="replace").strip().splitlines()][-1]
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
            why = (
                "/dev/kvm opens, but Debian's kernel does not reach user space within "
                f"{PROBE_SECONDS} s"
            )
        return "" if MARK in said else why
