# SPDX-License-Identifier: GPL-2.0
"""``kz boot --dry-run``: the commands of a boot, without a build, a download or a guest."""

import shlex
from pathlib import Path

from lab.boot import accel, argv, resolve
from lab.boot.argv import Ends, Images
from lab.boot.spec import BootSpec
from lab.build import daemon
from lab.build import linux as build
from lab.build import qemu as qemus
from lab.machine import stock
from lab.patches import parts

FOLDER = Path("out/boot/TIME")
DAEMON_SOCKET = Path("/tmp/kz-vub/front")
CHANNELS = ("ctl", "out", "err", "qmp", "in")


def commands(spec: BootSpec) -> list[str]:
    """The commands of ``guest.boot(spec)`` as lines for a shell.

    What builds missing images comes first, as comments. The descriptors, the folder of the run and
    the socket of the daemon are placeholders. UsageError as by ``resolve.check``.
    """
    resolve.check(spec)
    lines = []
    kernel, build_kernel = _kernel(spec)
    if not kernel.is_file():
        lines.append(f"# first: {build_kernel}")
    program, build_qemu, names = Path(), "", [*CHANNELS]
    chosen = accel.Choice("um", "")
    if spec.arch == "um":
        names = [*argv.UM_LINES]
    else:
        program, build_qemu = _qemu(spec)
        if program.is_file():
            chosen = accel.choose(spec.accel, program, spec.arch)
        else:
            lines.append(f"# first: {build_qemu}")
            chosen = accel.Choice(
                "tcg" if spec.accel == "auto" else spec.accel, "KVM is tried when QEMU is there"
            )
        lines.append(f"# accelerator: {chosen.name} ({chosen.reason})")
    socket = None
    if (options := spec.daemon_options()) is not None:
        socket = DAEMON_SOCKET
        binary = daemon.target_dir() / daemon.PROFILES[spec.daemon_profile] / daemon.NAME
        if not binary.is_file():
            lines.append(f"# first: ./kz build daemon --profile {spec.daemon_profile}")
        lines.append(shlex.join([str(binary), "--socket-path", str(socket), *options]) + " &")
    front_end = argv.GENERIC if spec.qemu == "stock" else argv.FRONT_END
    images = Images(kernel, chosen.name, program, front_end=front_end, reason=chosen.reason)
    sockets = {name: number for number, name in enumerate(names, 3)}
    initrd, huge = spec.initrd or FOLDER / "initrd.cpio", chosen.name == "pvm" and spec.pool
    ends = Ends(initrd, FOLDER / "console.log", sockets, socket, huge_pages=huge)
    return [*lines, shlex.join(argv.make(spec, images, ends))]


def _kernel(spec: BootSpec) -> tuple[Path, str]:
    """The image, and the command that makes it."""
    if spec.kernel == "stock":
        return Path(
            "DEBIAN/vmlinuz"
        ), f"a download of Debian's {stock.KERNEL_PACKAGE}, unless the cache has it"
    if str(spec.kernel) not in build.VARIANTS:
        return Path(spec.kernel).absolute(), ""
    arch = resolve.machine(spec)
    image = build.planned_linux(str(spec.kernel), arch)
    older = f" --linux {series}" if (series := parts.older()) else ""
    return image, f"./kz build linux --variant {spec.kernel} --arch {arch}{older}"


def _qemu(spec: BootSpec) -> tuple[Path, str]:
    """The program, and the command that makes it."""
    named = spec.qemu or ("stock" if spec.arch == "arm64" else "knownzero")
    if named == "stock":
        arch = "arm64" if spec.arch == "arm64" else "x86_64"
        return stock.planned_qemu(arch), f"a download of Debian's {stock.QEMUS[arch][0]}"
    if str(named) not in qemus.QEMU_VARIANTS:
        return Path(named).absolute(), ""
    return qemus.planned_qemu(str(named)), f"./kz build qemu --variant {named}"
