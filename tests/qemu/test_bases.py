# SPDX-License-Identifier: GPL-2.0
"""The series on the other source of qemu/base.toml.

It applies with full context, builds, and passes its qtests.
"""

from __future__ import annotations

import pytest

from lab.machine import fetch
from lab.patches import apply, parts
from lab.testing import suite as testing
from tests.qemu.test_qtests import judge, results
from tests.sets import sets

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("newer_qemu")
@pytest.mark.parametrize("chosen", sets(parts.get("qemu")), ids="+".join)
def test_parts_apply(chosen: tuple[str, ...]) -> None:
    pristine = fetch.pristine(fetch.obtain("qemu"))
    made = apply.result(parts.get("qemu", chosen), pristine)
    if "reporting" in chosen:
        machine, _ = made["hw/core/machine.c"] or (b"", 0)
        entries = machine.split(b"GlobalProperty hw_compat_")
        assert [one[:4] for one in entries if b"x-device-init-reported" in one] == [b"10_1"]


@pytest.mark.nightly
@pytest.mark.usefixtures("newer_qemu")
@pytest.mark.parametrize("name", testing.QTESTS)
def test_qtests(name: str) -> None:
    judge(*results(name, "qtest-10.2"))
