# SPDX-License-Identifier: GPL-2.0
"""With every option off the patched kernel builds and is without our names."""

from __future__ import annotations

import pytest

from lab import build


@pytest.mark.slow
def test_feature_off() -> None:
    image = build.build_linux("off", "um")
    names = (image.parent / "System.map").read_text()
    assert "pgzeroed" not in names
    assert "page_zeroed" not in names
