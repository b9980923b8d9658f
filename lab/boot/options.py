# SPDX-License-Identifier: GPL-2.0
"""The options of every verb that starts a guest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from lab.boot.spec import BootSpec
from lab.core.errors import UsageError
from lab.core.options import Several

BALLOON = "virtio-balloon-pci,free-page-reporting=on"
FOREVER = 7 * 86400.0  # seconds
KERNEL = "knownzero"


@dataclass
class GuestOptions:
    """The guest that the command line describes."""

    kernel: Annotated[str, Option(help="base, knownzero, off, debug, stock (Debian's) or a file.")] = KERNEL
    qemu: Annotated[str | None, Option(help="base, knownzero, stock (Debian's) or a file.")] = None
    memory: Annotated[str, Option(help="Guest memory, in the form of QEMU's -m: 2G.")] = "2G"
    cpus: Annotated[int, Option(min=1, max=255, help="Virtual CPUs.")] = 1
    device: Annotated[
        Several, Option(help=f"A QEMU device, as {BALLOON}, or daemon,OPTION=…. Repeatable.")
    ] = None
    append: Annotated[str, Option(help="More kernel command line.")] = ""
    add: Annotated[Several, Option(metavar="FILE[:GUESTPATH]", help="Copy this in. Repeatable.")] = None
    accel: Annotated[str, Option(help="auto, kvm or tcg.")] = "auto"
    qemu_arg: Annotated[Several, Option(help="A raw QEMU argument. Repeatable.")] = None

    def spec(self, command: list[str], timeout: float = FOREVER, device: str = "") -> BootSpec:
        """The BootSpec; ``device``: the one of a guest that is given none."""
        names = ("kernel", "qemu", "memory", "cpus", "append", "accel")
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        devices, added = self.device or [device] * bool(device), [_added(item) for item in self.add or []]
        more: dict[str, Any] = {"devices": devices, "add": added, "extra_qemu": self.qemu_arg or []}
        return BootSpec(**same, **more, command=command, timeout=timeout)


def _added(item: str) -> tuple[Path, str]:
    name, _, place = item.partition(":")
    if not Path(name).exists():
        why, fix = "there is no such file", "give --add FILE or --add FILE:GUESTPATH"
        raise UsageError(f"Bad --add: {name}", why, fix)
    return Path(name), place
