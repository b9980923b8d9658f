# SPDX-License-Identifier: GPL-2.0
"""The kernel's selftests, compiled as static binaries."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from lab.build.images import compiler
from lab.core import lock, paths, run
from lab.core.errors import LabError
from lab.machine import arches, debs, fetch, tools
from lab.patches import apply
from lab.patches import parts as parts_of

# As the kernel builds them: its harness compares integers of any sign.
SELFTEST_FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-static", "-pthread")

# More source files of a kernel selftest, by its name or its folder.
SELFTEST_PARTS = {
    "mm": "vm_util.c hugepage_settings.c",
    "cgroup": "lib/cgroup_util.c",
    "memfd": "common.c",
    "pkey_sighandler_tests": "pkey_util.c",
    "uffd-stress": "uffd-common.c",
    "uffd-unit-tests": "uffd-common.c",
    "uffd-wp-mremap": "uffd-common.c",
}
# Options of the compiler, as the makefiles have them: -O2 removes stores to memory that cgroup
# tests then free. memfd needs a header that is newer than Debian's.
SELFTEST_OPTIONS = {
    "cgroup": "-O0",
    "memfd": "-D_FILE_OFFSET_BITS=64 -include {kernel}/include/uapi/linux/memfd.h",
    "mm": "-isystem {kernel}/tools/include/uapi",
    "proc": "-isystem {kernel}/tools/include/uapi",
}
# Static libraries of Debian's, by the header that asks for them.
SELFTEST_LIBRARIES = {
    "<numa.h>": ("libnuma-dev", "numa"),
    "<sys/capability.h>": ("libcap-dev", "cap"),
}


def build(name: str, arch: str = "x86_64") -> Path:
    """Compile a test of the kernel's tools/testing/selftests (``cgroup/test_kmem``, or one of mm),
    as a static binary.

    It is the series' own, or one that the kernel comes with, unchanged. ``arch``: what it is to run
    on. Libraries of other architectures are not looked for. Cached by content;
    LabError when there is no such test, or it does not compile.
    """
    tools.need_compiler(arch)
    prefix = arches.ARCHES[arch].prefix
    path = Path("tools/testing/selftests", "" if "/" in name else "mm", f"{name}.c")
    place = path.parent
    kernel = fetch.pristine(fetch.obtain("linux"))
    harness = kernel / "tools/testing/selftests"
    with apply.working_copy(parts_of.get("linux"), fetch.obtain("linux")) as tree:
        own = tree / path
    sources = [own]
    headers = [harness / "kselftest_harness.h", harness / "kselftest.h"]
    arguments: list[str | Path] = ["-I", harness]
    libraries: list[str | Path] = []
    if not own.is_file() or (kernel / place / own.name).is_file():
        folder = kernel / place
        parts = [SELFTEST_PARTS.get(key, "") for key in (place.name, name)]
        sources = [kernel / path, *(folder / part for part in " ".join(parts).split())]
        if not sources[0].is_file():
            raise LabError(
                f"no selftest {name}",
                f"there is no {own}, nor {sources[0]}",
                "name a file of the series or of the kernel",
            )
        headers += sorted(folder.rglob("*.h"))
        # Some make files that are named after their source, where they are run.
        arguments.append(f"-fmacro-prefix-map={folder}/=")
        arguments += [
            "-D_GNU_SOURCE=",
            "-U_FORTIFY_SOURCE",
            "-I",
            kernel,
            "-I",
            folder / "lib" / "include",
        ]
        text = sources[0].read_text(encoding="utf-8")
        for header, (package, library) in SELFTEST_LIBRARIES.items():
            if f"#include {header}" in text:
                unpacked = debs.unpacked(package) / "usr"
                arguments += [
                    "-isystem",
                    unpacked / "include",
                    "-L",
                    unpacked / "lib" / debs.TRIPLET,
                ]
                libraries += [f"-l{library}"]
    for key in (place.name, name):
        arguments += SELFTEST_OPTIONS.get(key, "").format(kernel=kernel).split()
    digest = hashlib.sha256(
        (compiler(prefix) + " ".join(map(str, [*SELFTEST_FLAGS, *arguments, *libraries]))).encode()
    )
    for file in (*headers, *sources):
        digest.update(file.read_bytes())
    target = paths.sub("guest") / f"selftest-{path.stem}-{digest.hexdigest()[:16]}"
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
