# SPDX-License-Identifier: GPL-2.0
"""The architectures of kernels and guests: the only place that lists them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """An architecture: ``image`` is what is booted, ``differs`` the fragment that comes last.

    ``guests``: it boots guests, with Debian's name ``debian`` of their busybox where that differs
    from the machine's. ``packages``: the cross compiler with the prefix ``prefix``. ``each``: every
    patch is built for it. ``kbuild``: its name in Kbuild, where that differs. ``measure``: patches
    of linux/measure that its kernels have.
    """

    image: str
    like: str = ""
    differs: str = ""
    prefix: str = ""
    packages: tuple[str, ...] = ()
    guests: bool = True
    debian: str = ""
    each: bool = False
    kbuild: str = ""
    measure: tuple[str, ...] = ()


# Guests of `--accel pvm`: x86_64, and not packed, since the hypervisor would emulate the unpacking.
PVM = "pvm"
ARCHES = {
    "x86_64": Arch("arch/x86/boot/bzImage", each=True),
    "um": Arch("linux", each=True),
    "i386": Arch(
        "arch/x86/boot/bzImage",
        "x86_64",
        "i386",
        "i686-linux-gnu-",
        ("gcc-i686-linux-gnu", "libc6-dev-i386-cross"),
        debian="i386",
    ),
    "arm64": Arch(
        "arch/arm64/boot/Image",
        "x86_64",
        "arm64",
        "aarch64-linux-gnu-",
        ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"),
        debian="arm64",
    ),
    "riscv": Arch(
        "arch/riscv/boot/Image",
        "",
        "riscv",
        "riscv64-linux-gnu-",
        ("gcc-riscv64-linux-gnu",),
        guests=False,
    ),
    PVM: Arch("vmlinux", "x86_64", PVM, guests=False, kbuild="x86_64", measure=(PVM,)),
}
GUESTS = tuple(name for name, arch in ARCHES.items() if arch.guests)
EACH = tuple(name for name, arch in ARCHES.items() if arch.each)
CROSS = {name: arch.packages for name, arch in ARCHES.items() if arch.packages}
