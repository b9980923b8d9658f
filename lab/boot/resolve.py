# SPDX-License-Identifier: GPL-2.0
"""From names to files: builds or fetches the kernel and QEMU that a BootSpec names."""

import functools
import os
from pathlib import Path

from lab.boot import accel, argv, initramfs
from lab.boot.argv import Images
from lab.boot.spec import DAEMON, BootSpec
from lab.build import daemon
from lab.build import linux as build
from lab.build.qemu import QEMU_VARIANTS, build_qemu
from lab.core import run
from lab.core.errors import LabError, UsageError
from lab.machine import arches, stock


def images(spec: BootSpec) -> Images:
    """Everything that a guest runs on; UsageError for a guest that cannot be."""
    check(spec)
    archive = None if spec.initrd else initramfs.base_archive(spec.arch)
    program = None
    if spec.daemon_options() is not None:
        program = spec.daemon_program or daemon.build(spec.daemon_profile)
    if spec.arch == "um":
        image, _ = kernel(spec.kernel, "um")
        return Images(image, "um", archive=archive, daemon=program)
    image, modules = kernel(spec.kernel, machine(spec))
    vmm = qemu(spec.qemu, spec.arch)
    chosen = accel.choose(spec.accel, vmm, spec.arch)
    counts = spec.arch == "x86_64" and chosen.name == "tcg"
    return Images(
        image,
        chosen.name,
        vmm,
        tuple(modules),
        front_end=_front_end(vmm) if program else "",
        tsc_khz=accel.tsc_khz() if counts else 0,
        reason=chosen.reason,
        archive=archive,
        daemon=program,
    )


def check(spec: BootSpec) -> None:
    """UsageError for a guest that cannot be, or whose kernel or QEMU is no such file.

    Builds nothing.
    """
    spec.check()
    if spec.accel == "pvm":
        accel.need_pvm()
    if str(spec.kernel) not in (*build.VARIANTS, "stock"):
        file = _kernel_file(spec.kernel)
        if spec.accel == "pvm" and PVM_MARK not in file.read_bytes():
            why = "it is no vmlinux with linux/measure/pvm.patch: kvm_pvm would emulate it"
            fix = f"use {', '.join(build.VARIANTS)}"
            raise UsageError(f"Bad --kernel: {spec.kernel}", why, fix)
    if spec.qemu is not None and str(spec.qemu) not in (*QEMU_VARIANTS, "stock"):
        _qemu_file(spec.qemu)


# What a kernel with linux/measure/pvm.patch prints.
PVM_MARK = b"FOR MEASURING ONLY: runs under kvm_pvm"


def machine(spec: BootSpec) -> str:
    """The name in ``arches.ARCHES`` of the kernels of a guest."""
    return arches.PVM if spec.accel == "pvm" else spec.arch


# What QEMU says of a device that it does not know, up to 11.0 and later.
UNKNOWN_DEVICE = ("is not a valid device model name", "' not found")


@functools.cache
def _front_end(program: Path) -> str:
    """The daemon's front end in this QEMU; UsageError where there is none."""
    for device in (argv.FRONT_END, argv.GENERIC):
        # One device: the list of all would load every module of this QEMU.
        name = device.split(",")[0]
        done = run.ask([program, "-no-user-config", "-device", f"{name},help"])
        # From QEMU 11.1 on, the exit code is 0 for a device that it does not know.
        if f"{name} options:" in done.stdout:
            return device
        if not any(words in done.stderr for words in UNKNOWN_DEVICE):
            raise LabError(f"{program} does not run", done.stderr, "run `kz doctor`")
    why = f"{program} has no {argv.GENERIC.split(',')[0]}"
    raise UsageError(f"Bad --device: {DAEMON}", why, "use --qemu knownzero, or a QEMU from 10.1 on")


def kernel(named: str | Path, arch: str = "x86_64") -> tuple[Path, list[Path]]:
    """The image of a kernel (built when needed) and the modules it must load."""
    if str(named) in build.VARIANTS:
        return build.build_linux(str(named), arch), []
    if str(named) == "stock":
        return stock.kernel()
    return _kernel_file(named), []


def qemu(named: str | Path | None, arch: str = "x86_64") -> Path:
    """A QEMU: by default the patched one, and the distribution's for arm64."""
    if named is None:
        return stock.qemu(arch) if arch == "arm64" else build_qemu("knownzero")
    if str(named) in QEMU_VARIANTS:
        return build_qemu(str(named))
    if str(named) == "stock":
        return stock.qemu("arm64" if arch == "arm64" else "x86_64")
    return _qemu_file(named)


# Where an image says what it is: bzImage, ELF, arm64's Image.
KERNEL_MARKS = ((0x202, b"HdrS"), (0, b"\x7fELF"), (56, b"ARM\x64"))


def _kernel_file(named: str | Path) -> Path:
    file = _file(named, "--kernel", (*build.VARIANTS, "stock"))
    with file.open("rb") as image:
        head = image.read(0x210)
    if not any(head[at:].startswith(mark) for at, mark in KERNEL_MARKS):
        why = "it is no kernel image: neither a bzImage, an ELF file nor an Image of arm64"
        raise UsageError(f"Bad --kernel: {named}", why, "name arch/x86/boot/bzImage of a build")
    return file


def _qemu_file(named: str | Path) -> Path:
    file = _file(named, "--qemu", (*QEMU_VARIANTS, "stock"))
    if not os.access(file, os.X_OK):
        raise UsageError(f"Bad --qemu: {named}", "it is no program", "name a qemu-system-x86_64")
    return file


def _file(named: str | Path, option: str, variants: tuple[str, ...]) -> Path:
    if not Path(named).is_file():
        why = "no file and no variant has this name"
        raise UsageError(f"Bad {option}: {named}", why, f"use {', '.join(variants)}, or a file")
    return Path(named).absolute()
