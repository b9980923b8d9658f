# SPDX-License-Identifier: GPL-2.0
"""Compile a part of a kernel."""

from __future__ import annotations

from pathlib import Path

from lab.build import linux
from lab.build.images import tree_of
from lab.core import lock, paths, progress
from lab.machine import fetch, tools


def build_part(variant: str, arch: str, targets: list[str], config: str = "") -> Path:
    """Compile folders or files of a kernel (``mm/``, …) without linking it.

    Returns the object folder.
    """
    tools.need("linux")
    tools.need_compiler(arch)
    source, recipe = fetch.obtain("linux"), linux._recipe(variant, arch, config)
    files = linux._checked_fragments(variant, arch, config)
    with lock.locked(f"build-linux-{recipe.name}"), tree_of("linux", variant, source) as tree:
        obj, log = recipe.object_dir(source), paths.log_file(f"linux-{recipe.name}-part")
        with progress.step(
            f"compiling {' '.join(targets)} of linux {source.version} {recipe.name}", log
        ):
            linux.make_linux(tree, obj, files, arch, variant, log, targets)
    return obj
