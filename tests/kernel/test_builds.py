# SPDX-License-Identifier: GPL-2.0
"""With every option off the patched kernel compiles and is without our names."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.kernel.objects import build_part

# What the series changes. Both ways, after every patch: kz series check --each.
PLACES = ["mm/", "drivers/virtio/", "kernel/power/", "fs/hugetlbfs/"]
OURS = re.compile(r"pgzeroed|page_zeroed|prezero|refpage|page_content_fill")


@pytest.mark.slow
def test_feature_off() -> None:
    obj = build_part("off", "x86_64", PLACES)
    archives = [obj / place / "built-in.a" for place in PLACES]
    done = subprocess.run(
        ["nm", "--defined-only", *archives], cwd=obj, capture_output=True, text=True, check=True
    )
    assert "post_alloc_hook" in done.stdout
    assert not OURS.findall(done.stdout)
