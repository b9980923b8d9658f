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
from lab.core.errors import LabError, UsageError
from lab.machine import stock

PROBE_SECONDS = 20
LATE = "/dev/kvm opens, but Debian's kernel does not reach user space within"
MARK = b"knownzero-kvm-works"
APPEND = "console=ttyS0 panic=-1"
MODULES = Path("/sys/module")
PVM, HARDWARE = "kvm_pvm", ("kvm_intel", "kvm_amd")
NO_PVM = "PVM cannot be used here"


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
    """An accelerator, ``kvm``, ``pvm`` or ``tcg``, and the reason for it."""

    name: str
    reason: str


def choose(wanted: str, qemu: Path, arch: str = "x86_64") -> Choice:
    """The accelerator of a guest: ``wanted``, one of ``spec.ACCELS``.

    Auto is KVM where it runs Debian's kernel. PVM runs other kernels, so auto never chooses it.

    LabError if ``wanted`` is kvm and KVM does not run that kernel; see ``need_pvm``.
    """
    if arch != "x86_64":
        return Choice("tcg", f"the kernel is for {arch}")
    if wanted == "tcg":
        return Choice("tcg", "--accel tcg")
    if wanted == "pvm":
        need_pvm()
        return Choice("pvm", f"/dev/kvm is of {PVM}, and the kernel supports that")
    why = kvm_obstacle(qemu)
    if wanted == "kvm" and why:
        fix = "use --accel tcg, or run on a machine with working KVM"
        if module() == PVM:
            fix = "use --accel pvm, which runs kernels of its own, or --accel tcg"
        raise LabError("KVM cannot be used here", why, fix)
    return Choice("tcg", why) if why else Choice("kvm", "KVM runs Debian's kernel")


def module() -> str:
    """The loaded module that runs the guests of /dev/kvm; empty if none is."""
    return next((name for name in (*HARDWARE, PVM) if (MODULES / name).is_dir()), "")


def need_pvm() -> None:
    """LabError where kernels with linux/measure/pvm.patch do not run natively; builds nothing."""
    if (found := module()) in HARDWARE:
        why = f"/dev/kvm is of {found}, which runs every kernel"
        raise UsageError("Bad --accel: pvm", why, "use --accel kvm: it needs no patch of the guest")
    if why := _device_obstacle():
        raise LabError(NO_PVM, why, f"load {PVM}, run it as root, or use --accel tcg")
    if found != PVM:
        why = f"the module {PVM} is not loaded ({MODULES / PVM} does not exist)"
        raise LabError(NO_PVM, why, f"load {PVM}, or use --accel auto")


def _device_obstacle() -> str:
    if not os.path.exists("/dev/kvm"):
        return "there is no /dev/kvm"
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm may not be opened by this user"
    return ""


def kvm_obstacle(qemu: Path) -> str:
    """The reason why KVM cannot be used with this QEMU; empty if it can.

    Remembered until the machine boots again.

    The probe runs Debian's kernel, which is known to run under KVM: a kernel under test that fails
    there must fail its test, and not be emulated instead.
    """
    if why := _device_obstacle():
        return why
    if module() == PVM:
        return f"/dev/kvm is of {PVM}, which emulates kernels other than those of --accel pvm"
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
                why = _probe(qemu, kernel)
            if why.startswith(LATE):  # the machine may be busy; the next run tries it again
                return why
            lock.write_atomically(answer, why)
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
            why = f"{LATE} {PROBE_SECONDS} s"
        return "" if MARK in said else why
