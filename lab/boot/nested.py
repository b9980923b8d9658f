# SPDX-License-Identifier: GPL-2.0
"""A guest in a guest.

QEMU emulates AMD's SVM, so the outer guest has a KVM that runs the inner one.
"""

import hashlib
import re
import shlex
from dataclasses import replace
from pathlib import Path

from lab.boot import argv, initramfs, resolve
from lab.boot.argv import Ends, Images
from lab.boot.spec import BootSpec
from lab.build import qemu as build
from lab.core import lock, paths, run

CONFIG = "kvm"  # of the outer kernel, in linux/configs/matrix
CPU = "qemu64,+svm,+npt,+nrip-save,+vgif,+pdpe1gb"
PLACE = "/kz/inner"
LOG = f"{PLACE}/vmm.log"
# The outer kernel has no sockets: each channel is a file, or a pair of FIFOs.
CHANNELS = {"ctl": "file", "out": "pipe", "err": "file", "in": "pipe"}
# Without it, the floor kernel hung: a timer interrupt waited for a clock that was being set. The
# idle task sets it, with interrupts disabled, when its tick has paused.
TICK = "nohz=off"
# Runs a line of shell in the inner guest, whose loop ends the output with "@done" and the exit
# code.
FUNCTION = (
    'inner() { echo "$1" >&7; while IFS= read -r line <&8; do case "$line" in '
    '"@done "*) return ${line#@done };; esac; echo "$line"; done; '
    f"cat {LOG}; return 1; }}"
)


def libraries(program: Path) -> list[Path]:
    """The shared libraries that a program loads, with its loader."""
    found = run.output(
        ["ldd", program], f"cannot list the libraries of {program}", "run `kz doctor`"
    )
    return [Path(name) for name in re.findall(r"(/\S+) \(0x", found)]


def _initrd(inner: BootSpec) -> Path:
    """The initramfs of the inner guest, in the cache."""
    key = hashlib.sha256(f"{initramfs.base_archive().stem} {inner.command}".encode()).hexdigest()
    target = paths.sub("initramfs") / f"inner-{key[:16]}.cpio"
    if not target.is_file():
        with lock.new_file(target) as work:
            initramfs.write(work, inner.command, "ports in", inner.add, [])
    return target


def outer(spec: BootSpec, inner: BootSpec, qemu: Path) -> BootSpec:
    """``spec``, whose kernel has KVM, on a processor with SVM, with the inner guest's ``qemu``, an
    image of the lab.
    """
    kernel, _ = resolve.kernel(inner.kernel)
    files = [
        (kernel, f"{PLACE}/kernel"),
        (_initrd(inner), f"{PLACE}/initrd"),
        (qemu.parents[1], "/usr"),
    ]
    files += [(library, str(library)) for library in libraries(qemu)]
    return replace(
        spec, accel="tcg", extra_qemu=[*spec.extra_qemu, "-cpu", CPU], add=[*spec.add, *files]
    )


def start(inner: BootSpec) -> tuple[str, ...]:
    """Lines for the outer guest's shell that start the inner one.

    ``inner LINE`` runs a line in it, $vmm is its QEMU.
    """
    # Its interrupt controllers are QEMU's, since the outer kernel has none; its clock is an
    # emulated one after all.
    more = [*inner.extra_qemu, "-machine", "kernel-irqchip=split"]
    for name, kind in CHANNELS.items():
        more += ["-chardev", f"{kind},id=kz{name},path={PLACE}/{name}"]
        more += ["-device", f"virtserialport,chardev=kz{name},name=kz.{name}"]
    append = f"{argv.APPEND_TCG} {TICK} {inner.append}".strip()
    spec = replace(inner, extra_qemu=more, append=append)
    images = Images(Path(f"{PLACE}/kernel"), "kvm", "/" / build.PROGRAM)
    # Both kernels write to one console, where the faults of either are found.
    words = argv.make(spec, images, Ends(Path(f"{PLACE}/initrd"), Path("/dev/console"), {}))
    fifos = " ".join(f"{PLACE}/{name}.{end}" for name in ("in", "out") for end in ("in", "out"))
    # A QEMU that fails opens no FIFO: the shell opens it after QEMU's end, and the first read ends.
    return (
        f"mkfifo {fifos}; exec 7<> {PLACE}/in.in",
        f"({shlex.join(words)} > {LOG} 2>&1; : > {PLACE}/out.out) & exec 8< {PLACE}/out.out",
        f"vmm=$(pidof {build.PROGRAM.name}); {FUNCTION}",
    )
