# SPDX-License-Identifier: GPL-2.0
"""The programs that run inside guests: every guest/*.c and tools/*/*.c as a static binary."""

from __future__ import annotations

import functools
import hashlib
import tempfile
from pathlib import Path

from lab.build import linux as build
from lab.build.images import compiler
from lab.core import lock, paths, run
from lab.core.errors import LabError, UsageError
from lab.machine import debs, fetch, tools
from lab.series import apply
from lab.series import parts as parts_of

# Architectures of guest programs, with Debian's name where it differs from the machine's.
BINARIES = {"x86_64": "", "um": "", "i386": "i386", "arm64": "arm64"}
FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-static", "-pthread")
# Programs whose model of memory is that of x86_64.
X86_64_ONLY = ("refpage_fuzz",)
# As the kernel builds them: its harness compares integers of any sign.
SELFTEST_FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-static", "-pthread")


def _headers() -> str:
    digest = hashlib.sha256()
    for header in sorted((paths.REPO / "guest").glob("*.h")):
        digest.update(header.name.encode() + header.read_bytes())
    return digest.hexdigest()


def build_programs(arch: str = "x86_64") -> dict[str, Path]:
    """Compile every guest/*.c and tools/*/*.c; the result maps a program's name to its static binary.

    User-Mode Linux runs the same binaries as x86_64. Cached by content.
    """
    if arch not in BINARIES:
        raise UsageError(f"Bad --arch: {arch}", "it has no guest programs", f"use {', '.join(BINARIES)}")
    tools.need_compiler(arch)
    prefix = build.MACHINES[arch].prefix
    sources = [*(paths.REPO / "guest").glob("*.c"), *(paths.REPO / "tools").glob("*/*.c")]
    return {
        source.stem: _program(source, prefix)
        for source in sorted(sources)
        if not prefix or source.stem not in X86_64_ONLY
    }


def build_host_program(source: Path) -> Path:
    """Compile a program that runs beside guests, not in them. Cached by content; LabError when it does not compile."""
    return _program(source)


def _program(source: Path, prefix: str = "") -> Path:
    text = source.read_bytes()
    common = _headers() + compiler(prefix)
    key = hashlib.sha256((common + " ".join(FLAGS)).encode() + text).hexdigest()[:16]
    target = paths.sub("guest") / f"{source.stem}-{key}"
    if target.is_file():
        return target
    with lock.new_file(target) as work:
        run.logged(
            [f"{prefix}gcc" if prefix else "cc", *FLAGS, "-o", work, source],
            paths.log_file(f"guest-{source.stem}"),
            f"{source.parent.name}/{source.name} does not compile",
            "correct the error above",
        )
        work.chmod(0o755)
    return target


# What a selftest of the kernel includes or is linked with, besides its own file.
SELFTEST_PARTS = {
    "uffd-stress": "uffd-common.c",
    "uffd-unit-tests": "uffd-common.c",
    "uffd-wp-mremap": "uffd-common.c",
}
# Static libraries of Debian's, by the header that asks for them.
SELFTEST_LIBRARIES = {
    "<numa.h>": ("libnuma-dev", "numa"),
    "<sys/capability.h>": ("libcap-dev", "cap"),
}


def build_selftest(name: str, arch: str = "x86_64") -> Path:
    """Compile a test of the kernel's tools/testing/selftests/mm, as a static binary.

    It is the series' own, or one that the kernel comes with, unchanged. ``arch``: what it is to run on,
    see BINARIES; libraries of other architectures are not looked for. Cached by content; LabError when
    there is no such test, or it does not compile.
    """
    tools.need_compiler(arch)
    prefix = build.MACHINES[arch].prefix
    place = Path("tools", "testing", "selftests", "mm")
    kernel = fetch.pristine(fetch.obtain("linux"))
    harness = kernel / place.parent
    with apply.working_copy(parts_of.get("linux"), fetch.obtain("linux")) as tree:
        own = tree / place / f"{name}.c"
    sources = [own]
    headers = [harness / "kselftest_harness.h", harness / "kselftest.h"]
    arguments: list[str | Path] = ["-I", harness]
    libraries: list[str | Path] = []
    if not own.is_file() or (kernel / place / own.name).is_file():
        folder = kernel / place
        parts = ["vm_util.c", "hugepage_settings.c", *SELFTEST_PARTS.get(name, "").split()]
        sources = [folder / f"{name}.c", *(folder / part for part in parts)]
        if not sources[0].is_file():
            raise LabError(
                f"no selftest {name}",
                f"there is no {own}, nor {sources[0]}",
                "name a file of the series or of the kernel",
            )
        headers += sorted(folder.glob("*.h"))
        # Some make files that are named after their source, where they are run.
        arguments.append(f"-fmacro-prefix-map={folder}/=")
        arguments += ["-D_GNU_SOURCE=", "-U_FORTIFY_SOURCE", "-I", kernel]
        arguments += ["-isystem", kernel / "tools" / "include" / "uapi"]
        text = sources[0].read_text(encoding="utf-8")
        for header, (package, library) in SELFTEST_LIBRARIES.items():
            if f"#include {header}" in text:
                unpacked = debs.unpacked(package) / "usr"
                arguments += ["-isystem", unpacked / "include", "-L", unpacked / "lib" / debs.TRIPLET]
                libraries += [f"-l{library}"]
    digest = hashlib.sha256(
        (compiler(prefix) + " ".join(map(str, [*SELFTEST_FLAGS, *arguments, *libraries]))).encode()
    )
    for file in (*headers, *sources):
        digest.update(file.read_bytes())
    target = paths.sub("guest") / f"selftest-{name}-{digest.hexdigest()[:16]}"
    if target.is_file():
        return target
    with tempfile.TemporaryDirectory(prefix=".selftest-", dir=target.parent) as made:
        # The kernel's makefile puts the result of looking for liburing here; this build has none.
        (Path(made) / "local_config.h_gen").touch()
        with lock.new_file(target) as work:
            compiler_of = f"{prefix}gcc" if prefix else "cc"
            run.logged(
                [
                    compiler_of,
                    *SELFTEST_FLAGS,
                    "-I",
                    made,
                    *arguments,
                    "-o",
                    work,
                    *sources,
                    *libraries,
                    "-lm",
                ],
                paths.log_file(f"selftest-{name}"),
                f"the selftest {name} does not compile",
                "correct the error above",
            )
            work.chmod(0o755)
    return target


@functools.cache
def busybox(arch: str = "") -> Path:
    """Debian's static busybox; ``arch``: for another architecture, by Debian's name of it."""
    folder = debs.unpacked("busybox-static", arch)
    found = next(
        (file for place in ("bin", "usr/bin") if (file := folder / place / "busybox").is_file()), None
    )
    if found is None:
        raise LabError(
            "Debian's busybox-static has no busybox", f"unpacked in {folder}", "remove that folder"
        )
    return found
