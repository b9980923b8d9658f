# SPDX-License-Identifier: GPL-2.0
"""The files beside a run's figures.

Logs of each guest, its kernel and QEMU, and the machine.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.boot.guest import Guest
from lab.build.images import metadata
from lab.build.qemu import QEMU_OPTIONS
from lab.core import paths

GUESTS, QEMU, HOST = "guests", "qemu.json", "host.json"
# Facts about the machine that may change a figure; missing files are skipped. Of the last two, some
# lines.
THP = "/sys/kernel/mm/transparent_hugepage"
FILES = (
    *("/proc/version", "/proc/cmdline", "/proc/loadavg", f"{THP}/enabled", f"{THP}/defrag"),
    "/sys/kernel/mm/ksm/run",
    "/sys/devices/system/clocksource/clocksource0/current_clocksource",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    *("/proc/meminfo", "/proc/cpuinfo"),
)
LINES = re.compile(
    r"(?m)^(MemTotal|MemAvailable|SwapTotal|SwapFree|model name|microcode|cpu MHz|cache "
    r"size)\s*:\s*(.*)$"
)


def machine() -> dict[str, str]:
    found = {"architecture": platform.machine(), "cpus": str(os.cpu_count() or 0)}
    for name in FILES:
        with contextlib.suppress(OSError):
            text = Path(name).read_text(encoding="utf-8", errors="replace").strip()
            if name in FILES[-2:]:
                found = dict(LINES.findall(text)) | found
            else:
                found[name] = text
    return found


def _write(file: Path, about: dict[str, Any]) -> None:
    file.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


@dataclass
class Evidence:
    """Files of the guests that have ended, in a temporary folder until they are published."""

    root: Path
    before: dict[str, str] = field(default_factory=machine)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: Counter[str] = field(default_factory=Counter)

    def take(self, guest: Guest) -> None:
        """Keep the logs of a guest, its kernel's configuration, and its QEMU."""
        with self._lock:
            label = guest.spec.label or (guest.kernel.parent.name if guest.kernel else "guest")
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)
            self._count[name] += 1
            number = f"-{self._count[name]}" if self._count[name] > 1 else ""
            place = self.root / GUESTS / (name + number)
            place.mkdir(parents=True)
            for file in guest.folder.iterdir():
                if stat.S_ISREG(file.lstat().st_mode) and file.stat().st_size:
                    shutil.copyfile(file, place / file.name)
            if guest.kernel:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(guest.kernel.parent / ".config", place / "config")
                _write(place / "kernel.json", metadata(guest.kernel))
            if guest.qemu:
                built = metadata(guest.qemu)
                about = {"path": guest.qemu.name, "options": list(QEMU_OPTIONS) if built else []}
                _write(self.root / QEMU, about | built)

    def publish(self, folder: Path) -> None:
        """Move everything into the folder of the run, instead of the files of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        _write(self.root / HOST, {"before": self.before, "after": machine()})
        for name in (GUESTS, QEMU, HOST):
            target = folder / name
            if target.is_dir():
                shutil.rmtree(target)
            target.unlink(missing_ok=True)
            if (self.root / name).exists():
                shutil.move(self.root / name, target)


@contextlib.contextmanager
def collecting() -> Iterator[Evidence]:
    """A place for the evidence of the guests that ``take`` gets."""
    with tempfile.TemporaryDirectory(prefix=".evidence-", dir=paths.out()) as name:
        yield Evidence(Path(name))
