# SPDX-License-Identifier: GPL-2.0
"""With every option off the patched kernel compiles, links, and is without our names."""

from __future__ import annotations

import re
import subprocess

import pytest

from lab.core import paths
from tests.kernel.objects import build_part

PLACES = "mm|drivers/virtio|kernel/power|fs/hugetlbfs"
OURS = re.compile(r"pgzeroed|page_zeroed|prezero|refpage|page_content_fill")


CHANGED = re.compile(rf"^--- (\S+)\n\+\+\+ b/((?:{PLACES})/\S+)\.c$", re.MULTILINE)
LEFT_OUT = {"mm/hmm", "mm/memory-failure"}  # whose options this kernel has not


@pytest.mark.slow
def test_feature_off() -> None:
    """The files that the series changes. User-Mode Linux compiles all (image "off"); both ways.

    Kz series check --each.
    """
    patches = sorted((paths.REPO / "linux" / "parts").glob("*/*.patch"))
    files = [found for file in patches for found in CHANGED.findall(file.read_text())]
    added = {name for before, name in files if before == "/dev/null"}
    objects = sorted(
        {f"{name}.o" for _, name in files} - {f"{name}.o" for name in added | LEFT_OUT}
    )
    obj = build_part("off", "x86_64", objects)
    # Also names that are used and not defined: the kernel would not link.
    done = subprocess.run(["nm", *objects], cwd=obj, capture_output=True, text=True, check=True)
    assert "post_alloc_hook" in done.stdout
    assert not [line for line in done.stdout.splitlines() if OURS.search(line)]
