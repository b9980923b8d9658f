# SPDX-License-Identifier: GPL-2.0
"""The programs that run inside guests: every guest/*.c and tools/*/*.c.

Static, each as a binary of its own, or all in one that an initial RAM file system has room for.
"""

import functools
import hashlib
import tempfile
from pathlib import Path

from lab.build.images import compiler
from lab.core import lock, paths, run
from lab.core.errors import LabError, UsageError
from lab.machine import arches, debs, tools

FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-static", "-pthread")
# Programs for the memory, or the instructions, of x86_64.
X86_64_ONLY = ("native_costs", "refpage_fuzz", "tsc_khz")


# The main() of a binary of all programs: it runs the one that it is called as.
TOGETHER = """\
#include <stdio.h>
#include <string.h>

{declarations}

static const struct {{ const char *name; int (*main)(); }} programs[] = {{
{rows}
}};

int main(int argc, char **argv)
{{
	const char *slash = strrchr(argv[0], '/');
	const char *name = slash ? slash + 1 : argv[0];

	for (size_t i = 0; i < sizeof(programs) / sizeof(programs[0]); i++)
		if (!strcmp(programs[i].name, name))
			return programs[i].main(argc, argv);
	fprintf(stderr, "no program is named %s\\n", name);
	return 127;
}}
"""


def _sources(arch: str) -> list[Path]:
    if arch not in arches.GUESTS:
        raise UsageError(
            f"Bad --arch: {arch}", "it has no guest programs", f"use {', '.join(arches.GUESTS)}"
        )
    tools.need_compiler(arch)
    sources = [*(paths.REPO / "guest").glob("*.c"), *(paths.REPO / "tools").glob("*/*.c")]
    others = X86_64_ONLY if arches.ARCHES[arch].prefix else ()
    return [source for source in sorted(sources) if source.stem not in others]


def _target(name: str, sources: list[Path], prefix: str, more: str = "") -> Path:
    """The place in the cache of what is compiled from these sources."""
    digest = hashlib.sha256((compiler(prefix) + " ".join(FLAGS) + more).encode())
    for file in (*sorted((paths.REPO / "guest").glob("*.h")), *sources):
        digest.update(file.name.encode() + file.read_bytes())
    return paths.sub("guest") / f"{name}-{digest.hexdigest()[:16]}"


def build_programs() -> dict[str, Path]:
    """Compile every program: static binaries by name. Cached by content."""
    return {source.stem: build_program(source) for source in _sources("x86_64")}


def build_program(source: Path) -> Path:
    """Compile a static program. Cached by content; LabError when it does not compile."""
    target = _target(source.stem, [source], "")
    if target.is_file():
        return target
    with lock.new_file(target) as work:
        argv: run.Argv = ["cc", *FLAGS, "-o", work, source]
        log = paths.log_file(f"guest-{source.stem}")
        what = f"{source.parent.name}/{source.name} does not compile"
        run.logged(argv, log, what, "correct the error above")
        work.chmod(0o755)
    return target


def build_together(arch: str = "x86_64") -> tuple[Path, list[str]]:
    """Compile one static binary of all programs, and their names. Cached by content.

    It takes 1 MB, where a binary for each takes 0.8 MB: they share the C library.
    """
    sources = _sources(arch)
    prefix = arches.ARCHES[arch].prefix
    names = [source.stem for source in sources]
    target = _target("together", sources, prefix, TOGETHER)
    if target.is_file():
        return target, names
    log, what = paths.log_file("guest-together"), "the programs of guests do not compile"
    cc, fix = f"{prefix}gcc" if prefix else "cc", "correct the error above"
    with lock.new_file(target) as work, tempfile.TemporaryDirectory(prefix="kz-guest-") as name:
        folder, objects = Path(name), []
        for source in sources:
            found, main = folder / f"{source.stem}.o", f"{source.stem}_main"
            compile_: run.Argv = [cc, *FLAGS, f"-Dmain={main}", "-c", "-o", found, source]
            run.logged(compile_, log, what, fix)
            # Other names of a program are its own.
            keep: run.Argv = [f"{prefix}objcopy", f"--keep-global-symbol={main}", found]
            run.logged(keep, log, what, fix)
            objects.append(found)
        text = TOGETHER.format(
            declarations="\n".join(f"int {name}_main();" for name in names),
            rows="\n".join(f'\t{{ "{name}", {name}_main }},' for name in names),
        )
        (folder / "together.c").write_text(text, encoding="utf-8")
        run.logged([cc, *FLAGS, "-o", work, folder / "together.c", *objects], log, what, fix)
        work.chmod(0o755)
    return target, names


@functools.cache
def busybox(arch: str = "") -> Path:
    """Debian's static busybox; ``arch``: for another architecture, by Debian's name of it."""
    folder = debs.unpacked("busybox-static", arch)
    for place in ("bin", "usr/bin"):
        if (file := folder / place / "busybox").is_file():
            return file
    what = "Debian's busybox-static has no busybox"
    raise LabError(what, f"unpacked in {folder}", "remove that folder")
