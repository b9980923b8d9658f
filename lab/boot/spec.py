# SPDX-License-Identifier: GPL-2.0
"""The description of a guest, as plain data."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from lab.core.errors import UsageError
from lab.machine import arches

ACCELS = ("auto", "kvm", "pvm", "tcg")
DAEMON = "daemon"
# The forms of QEMU's -m (slots and maxmem may follow), and of User-Mode Linux's mem=.
MEMORY = re.compile(r"(?:size=)?(?=[\d.]*[1-9])\d+(?:\.\d+)?[BKMGT]?(?:,.*)?", re.IGNORECASE)
MEMORY_UM = re.compile(r"(?=\d*[1-9])\d+[KMG]", re.IGNORECASE)


@dataclass
class BootSpec:
    """One boot. ``kernel``: base, knownzero, off, debug, floor, stock, or the path of an image.

    The device ``daemon,target=256M`` is the project's vhost-user-balloon with --target 256M,
    started beside the guest.
    """

    kernel: str | Path = "knownzero"
    qemu: str | Path | None = None  # None: the patched one; "stock": the distribution's; or a path
    memory: str = "2G"
    cpus: int = 1
    devices: list[str] = field(default_factory=list)
    append: str = ""
    # Of a system that runs the command by itself: see tests/guest/debian.py
    initrd: Path | None = None
    add: list[tuple[Path, str]] = field(default_factory=list)
    accel: str = "auto"
    timeout: float = 300.0
    command: list[str] = field(default_factory=lambda: ["true"])
    extra_qemu: list[str] = field(default_factory=list)
    allow_warnings: bool = False
    arch: str = "x86_64"
    daemon_profile: str = "dev"  # of cargo: dev or release
    daemon_program: Path | None = None  # instead of a build
    # More options of the daemon's memory backend, as hugetlb=on,hugetlbsize=2M; or huge: a tmpfs
    # with huge pages.
    shared_memory: str = ""
    mte: bool = False  # memory tags, on arm64 only
    pool: bool = True  # with --accel pvm, memory is in huge pages of the host's pool
    label: str = ""  # the name of this guest in reports

    def daemon_options(self) -> list[str] | None:
        """The options of the device ``daemon``; None without such a device."""
        wanted = [
            device.split(",")[1:] for device in self.devices if device.split(",")[0] == DAEMON
        ]
        if len(wanted) > 1:
            what = f"Bad --device: {len(wanted)} times {DAEMON}"
            raise UsageError(what, "a guest has one balloon at most", "give it once")
        if not wanted:
            return None
        # User-Mode Linux wants to be called by sockets.
        own = ["--user-mode-linux"] if self.arch == "um" else []
        return own + [f"--{option}" for option in wanted[0]]

    def qemu_devices(self) -> list[str]:
        return [device for device in self.devices if device.split(",")[0] != DAEMON]

    def check(self) -> None:
        """Raise UsageError for a guest that cannot be.

        Options that only QEMU knows are left to QEMU.
        """
        self.daemon_options()
        if self.accel not in ACCELS and (self.arch, self.accel) != ("um", "um"):
            why, fix = "no accelerator has this name", f"use {', '.join(ACCELS)}"
            raise UsageError(f"Bad --accel: {self.accel}", why, fix)
        if self.accel in ("kvm", "pvm") and self.arch in ("i386", "arm64"):
            what, why = f"Bad --accel: {self.accel}", f"the kernel is for {self.arch}"
            raise UsageError(what, why, "use --accel auto or tcg")
        if self.accel == "pvm" and self.cpus != 1:
            why = "linux/measure/pvm.patch supports one CPU"
            raise UsageError(f"Bad --cpus: {self.cpus}", why, "use one, or --accel auto")
        if self.accel == "pvm" and self.kernel == "stock":
            why = "only kernels with linux/measure/pvm.patch run natively under kvm_pvm"
            raise UsageError("Bad --kernel: stock", why, "use base, knownzero, off, debug or floor")
        if self.arch not in arches.GUESTS:
            why, fix = "it is unsupported", f"use {', '.join(arches.GUESTS)}"
            raise UsageError(f"Bad --arch: {self.arch}", why, fix)
        if self.mte and self.arch != "arm64":
            raise UsageError("Bad --mte", f"{self.arch} has no memory tags", "add --arch arm64")
        if self.kernel == "stock" and self.arch in ("um", "arm64"):
            raise UsageError("Bad --kernel: stock", "it is for x86_64", "leave out --arch")
        form = MEMORY_UM if self.arch == "um" else MEMORY
        if not form.fullmatch(self.memory):
            raise UsageError(
                f"Bad --memory: '{self.memory}'", "it is not a size", "write it as 2G or 2048M"
            )
        if self.arch == "um":
            self._check_um()

    def _check_um(self) -> None:
        no_qemu = "it has no QEMU"
        for option, given, why in (
            ("--device", self.qemu_devices(), no_qemu),
            ("--qemu", self.qemu, no_qemu),
            ("--qemu-arg", self.extra_qemu, no_qemu),
            ("--accel", self.accel not in ("auto", "um"), "it runs on the machine's own CPU"),
            ("--cpus", self.cpus != 1, "it has one CPU"),
        ):
            if given:
                fix = f"leave it out, or choose another --arch; its one device is --device {DAEMON}"
                raise UsageError(f"Bad {option}", f"the guest is User-Mode Linux: {why}", fix)
