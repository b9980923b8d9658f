# SPDX-License-Identifier: GPL-2.0
"""The programs that run inside guests: every guest/*.c and tools/*/*.c as a static binary."""

import functools
import hashlib
from pathlib import Path

from lab.build.images import compiler
from lab.core import lock, paths, run
from lab.core.errors import LabError, UsageError
from lab.machine import arches, debs, tools

FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-static", "-pthread")
# Programs for the memory, or the instructions, of x86_64.
X86_64_ONLY = ("native_costs", "refpage_fuzz", "tsc_khz")


def build_programs(arch: str = "x86_64") -> dict[str, Path]:
    """Compile every guest/*.c and tools/*/*.c: static binaries by name. Cached by content."""
    if arch not in arches.GUESTS:
        raise UsageError(
            f"Bad --arch: {arch}", "it has no guest programs", f"use {', '.join(arches.GUESTS)}"
        )
    tools.need_compiler(arch)
    prefix = arches.ARCHES[arch].prefix
    sources = [*(paths.REPO / "guest").glob("*.c"), *(paths.REPO / "tools").glob("*/*.c")]
    return {
        source.stem: build_program(source, prefix)
        for source in sorted(sources)
        if not prefix or source.stem not in X86_64_ONLY
    }


def build_program(source: Path, prefix: str = "") -> Path:
    """Compile a static program. Cached by content; LabError when it does not compile."""
    digest = hashlib.sha256((compiler(prefix) + " ".join(FLAGS)).encode())
    for file in (*sorted((paths.REPO / "guest").glob("*.h")), source):
        digest.update(file.name.encode() + file.read_bytes())
    target = paths.sub("guest") / f"{source.stem}-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    with lock.new_file(target) as work:
        argv: run.Argv = [f"{prefix}gcc" if prefix else "cc", *FLAGS, "-o", work, source]
        log = paths.log_file(f"guest-{source.stem}")
        what = f"{source.parent.name}/{source.name} does not compile"
        run.logged(argv, log, what, "correct the error above")
        work.chmod(0o755)
    return target


@functools.cache
def busybox(arch: str = "") -> Path:
    """Debian's static busybox; ``arch``: for another architecture, by Debian's name of it."""
    folder = debs.unpacked("busybox-static", arch)
    for place in ("bin", "usr/bin"):
        if (file := folder / place / "busybox").is_file():
            return file
    what = "Debian's busybox-static has no busybox"
    raise LabError(what, f"unpacked in {folder}", "remove that folder")
