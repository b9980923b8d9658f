# SPDX-License-Identifier: GPL-2.0
"""The files beside a run's figures: logs of each guest, and the configuration of its kernel."""

import contextlib
import re
import shutil
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lab.boot.guest import Guest
from lab.core import paths

GUESTS = "guests"


@dataclass
class Evidence:
    """Files of the guests that have ended, in a temporary folder until they are published."""

    root: Path
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _count: Counter[str] = field(default_factory=Counter)

    def take(self, guest: Guest) -> None:
        """Keep the logs of a guest and its kernel's configuration."""
        with self._lock:
            label = guest.spec.label or (guest.kernel.parent.name if guest.kernel else "guest")
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", label)
            self._count[name] += 1
            number = f"-{self._count[name]}" if self._count[name] > 1 else ""
            place = self.root / (name + number)
            place.mkdir(parents=True)
            for file in guest.folder.iterdir():
                if stat.S_ISREG(file.lstat().st_mode) and file.stat().st_size:
                    shutil.copyfile(file, place / file.name)
            if guest.kernel:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(guest.kernel.parent / ".config", place / "config")

    def publish(self, folder: Path) -> None:
        """Move everything into the folder of the run, instead of the files of an earlier run."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / GUESTS, ignore_errors=True)
        if self.root.is_dir():
            shutil.move(self.root, folder / GUESTS)


@contextlib.contextmanager
def collecting() -> Iterator[Evidence]:
    """A place for the evidence of the guests that ``take`` gets."""
    with tempfile.TemporaryDirectory(prefix=".evidence-", dir=paths.out()) as name:
        yield Evidence(Path(name) / GUESTS)
