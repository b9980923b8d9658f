# SPDX-License-Identifier: GPL-2.0
"""What `kz doctor` says of a QEMU: the feature bits that its balloon can offer.

The qtests have when it offers them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot import doctor
from lab.machine import stock

pytestmark = pytest.mark.slow


def test_ours_offers_all_bits(qemu: Path) -> None:
    assert doctor.offers(qemu) == {6: True, 7: True, 16: True}


def test_the_distributions_offers_none() -> None:
    assert doctor.offers(stock.qemu()) == {6: False, 7: False, 16: False}
