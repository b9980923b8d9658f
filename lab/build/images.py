# SPDX-License-Identifier: GPL-2.0
"""Images in the cache, named by everything that goes into them, and the environment they are built in."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time
from pathlib import Path

from lab.core import paths, run
from lab.machine import tools

KEEP_IMAGES = 40
# Variables that would change what kbuild or make do.
STEERING = ("ARCH", "SUBARCH", "CROSS_COMPILE", "KBUILD_OUTPUT", "O", "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "KCFLAGS",
            "LOCALVERSION", "KCONFIG_CONFIG", "LLVM")  # fmt: skip


def jobs() -> int:
    """How many compilers may run at once: one per CPU this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


@functools.cache
def compiler(prefix: str = "") -> str:
    """The compiler and linker, as a line that changes when they do; ``prefix``: those of a cross compiler."""
    lines = []
    for tool in (f"{prefix}gcc" if prefix else "cc", f"{prefix}ld"):
        text = run.output(
            [tool, "--version"], "cannot compile", "run `kz doctor`: it names the packages to install"
        )
        lines.append(text.splitlines()[0])
    return "; ".join(lines)


def clean_environment() -> dict[str, str]:
    """The environment without the variables that steer kbuild and make."""
    return {name: value for name, value in os.environ.items() if name not in STEERING}


def cached_environment() -> dict[str, str]:
    """The same with compilers that remember, by ccache, what they compiled in whatever folder."""
    environment = clean_environment()
    environment["PATH"] = f"{tools.CCACHE}:{environment.get('PATH', os.defpath)}"
    return environment | {"CCACHE_DIR": str(paths.sub("ccache")), "CCACHE_MAXSIZE": "5G"}


def digest(parts: list[str]) -> str:
    """The name of an image by what goes into it."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def image_path(prefix: str, key: str, name: str) -> Path:
    """The place of a file of an image in the cache."""
    return paths.sub("images") / f"{prefix}-{key[:16]}" / name


def metadata(image: Path) -> dict[str, object]:
    """What is known of an image in the cache; empty for others."""
    for folder in image.parents[:4]:
        file = folder / "metadata.json"
        if file.is_file():
            data: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
            return data
    return {}


def prune_images(keep: int = KEEP_IMAGES) -> None:
    """Drop the images that were not used for longest, and what is left of old work."""
    folder = paths.sub("images")
    kept = sorted(
        (p for p in folder.iterdir() if not p.name.startswith(".")),
        key=lambda p: p.stat().st_mtime,
        reverse=True,
    )
    for old in kept[keep:]:
        if time.time() - old.stat().st_mtime > 86400:
            shutil.rmtree(old, ignore_errors=True)
    for part in folder.glob(".*.part"):
        if time.time() - part.stat().st_mtime > 86400:
            shutil.rmtree(part, ignore_errors=True)
    for log in paths.sub("logs").iterdir():
        if time.time() - log.stat().st_mtime > 14 * 86400:
            log.unlink(missing_ok=True)
