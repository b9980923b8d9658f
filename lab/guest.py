# SPDX-License-Identifier: GPL-2.0
"""The programs that run inside guests: every guest/*.c as a static binary."""

from __future__ import annotations

import functools
import hashlib
import shutil
from pathlib import Path

from lab import build, debs, fetch, lock, paths, run
from lab.errors import LabError

FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-static", "-pthread")
# Programs that enter the kernel by themselves: a call of libc does not even link.
FREESTANDING = ("refpage_fuzz",)
FREESTANDING_FLAGS = (
    "-std=gnu11",
    "-O2",
    "-g0",
    "-Wall",
    "-Wextra",
    "-static",
    "-nostdlib",
    "-ffreestanding",
    # Their own memset() must not become a call of memset(), nor anything a call of libc.
    "-fno-tree-loop-distribute-patterns",
    "-fno-stack-protector",
    # Nothing relocates them before they start.
    "-fno-pie",
    "-no-pie",
)
# As the kernel builds them: its harness compares integers of any sign.
SELFTEST_FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-static", "-pthread")


def _headers() -> str:
    digest = hashlib.sha256()
    for header in sorted((paths.REPO / "guest").glob("*.h")):
        digest.update(header.name.encode() + header.read_bytes())
    return digest.hexdigest()


def build_programs(arch: str = "x86_64") -> dict[str, Path]:
    """Compile every guest/*.c; the result maps a program's name to its static binary.

    User-Mode Linux runs the same binaries as x86_64. Cached by content.
    """
    if arch not in build.ARCHES:
        raise LabError(
            f"no guest programs for {arch}",
            "the lab knows: " + ", ".join(build.ARCHES),
            "choose one of them",
            2,
        )
    common = _headers() + build.compiler()
    return {source.stem: _program(source, common) for source in sorted((paths.REPO / "guest").glob("*.c"))}


def flags_of(name: str) -> tuple[str, ...]:
    """What a guest program is compiled with."""
    return FREESTANDING_FLAGS if name in FREESTANDING else FLAGS


def _program(source: Path, common: str) -> Path:
    text = source.read_bytes()
    flags = flags_of(source.stem)
    key = hashlib.sha256((common + " ".join(flags)).encode() + text).hexdigest()[:16]
    target = paths.sub("guest") / f"{source.stem}-{key}"
    if target.is_file():
        return target
    with lock.new_file(target) as work:
        run.logged(
            ["cc", *flags, "-o", work, source],
            paths.log_file(f"guest-{source.stem}"),
            f"guest/{source.name} does not compile",
            "mend the error above",
        )
        work.chmod(0o755)
    return target


def build_selftest(name: str) -> Path:
    """Compile a test that the series adds to the kernel's tools/testing/selftests/mm, as a static binary.

    Its harness is the one of the kernel's source. Cached by content; LabError when there is no such test.
    """
    source = paths.REPO / "linux" / "new" / "tools" / "testing" / "selftests" / "mm" / f"{name}.c"
    if not source.is_file():
        raise LabError(f"no selftest {name}", f"there is no {source}", "name a file of the series")
    folder = fetch.pristine(fetch.obtain("linux")) / "tools" / "testing" / "selftests"
    harness = folder / "kselftest_harness.h"
    digest = hashlib.sha256((build.compiler() + " ".join(SELFTEST_FLAGS)).encode())
    digest.update(harness.read_bytes() + source.read_bytes())
    target = paths.sub("guest") / f"selftest-{name}-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    with lock.new_file(target) as work:
        run.logged(
            ["cc", *SELFTEST_FLAGS, "-I", folder, "-o", work, source],
            paths.log_file(f"selftest-{name}"),
            f"the selftest {name} does not compile",
            "mend the error above",
        )
        work.chmod(0o755)
    return target


def is_static(path: Path) -> bool:
    """Whether an ELF file needs no loader: none of its program headers is PT_INTERP."""
    data = path.read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return False
    offset = int.from_bytes(data[32:40], "little")
    size = int.from_bytes(data[54:56], "little")
    count = int.from_bytes(data[56:58], "little")
    return all(int.from_bytes(data[offset + i * size :][:4], "little") != 3 for i in range(count))


@functools.cache
def busybox() -> Path:
    """A static busybox: the machine's, or the one of Debian's busybox-static, unpacked."""
    found = shutil.which("busybox")
    if found and is_static(Path(found)):
        return Path(found)
    folder = debs.unpacked("busybox-static")
    for place in ("bin/busybox", "usr/bin/busybox"):
        if (folder / place).is_file():
            return folder / place
    raise LabError(
        "Debian's busybox-static has no busybox", f"unpacked in {folder}", "install busybox-static with apt"
    )
