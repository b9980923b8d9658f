# SPDX-License-Identifier: GPL-2.0
"""The options of every verb that starts a guest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lab.boot.spec import BootSpec
from lab.core.errors import UsageError

BALLOON = "virtio-balloon-pci,free-page-reporting=on"
FOREVER = 7 * 86400.0  # seconds

Kernel = Annotated[
    str, typer.Option(help="base, knownzero, off, debug, stock (the distribution's), or an image.")
]
Qemu = Annotated[str | None, typer.Option(help="base, knownzero, stock (the distribution's), or a binary.")]
Memory = Annotated[str, typer.Option(help="Guest memory, in the form of QEMU's -m: 2G.")]
Cpus = Annotated[int, typer.Option(min=1, max=255, help="Virtual CPUs.")]
Device = Annotated[
    list[str] | None,
    typer.Option(help="A QEMU device, such as virtio-balloon-pci,free-page-reporting=on. Repeatable."),
]
Append = Annotated[str, typer.Option(help="More kernel command line.")]
Add = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE[:GUESTPATH]", help="Put a file or folder into the guest. Repeatable."),
]
Accel = Annotated[str, typer.Option("--accel", help="auto, kvm or tcg.")]
QemuArg = Annotated[list[str] | None, typer.Option(help="A raw QEMU argument. Repeatable.")]


def spec(
    kernel: str, qemu: str | None, memory: str, cpus: int, device: list[str] | None, append: str, accel: str,
    command: list[str], timeout: float, add: list[str] | None = None, qemu_arg: list[str] | None = None,
) -> BootSpec:  # fmt: skip
    """The BootSpec of these options."""
    return BootSpec(
        kernel=kernel, qemu=qemu, memory=memory, cpus=cpus, devices=device or [], append=append, accel=accel,
        command=command, timeout=timeout, add=[_added(item) for item in add or []], extra_qemu=qemu_arg or [],
    )  # fmt: skip


def _added(item: str) -> tuple[Path, str]:
    name, _, place = item.partition(":")
    if not Path(name).exists():
        raise UsageError(
            f"Bad --add: {name}", "there is no such file", "give --add FILE or --add FILE:GUESTPATH"
        )
    return Path(name), place
