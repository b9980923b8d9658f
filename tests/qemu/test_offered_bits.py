# SPDX-License-Identifier: GPL-2.0
"""What `kz doctor` says of a QEMU: the feature bits that its balloon offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot import doctor
from lab.machine import stock
from lab.core.errors import LabError

pytestmark = pytest.mark.slow


def test_ours_offers_bit_6_and_bit_7_when_asked(qemu: Path) -> None:
    bits = doctor.offered_bits(qemu)
    assert doctor.REPORTED in bits and doctor.INFLATE not in bits
    assert set(doctor.offered_bits(qemu, ",device-init-on-inflate=on")) == {*bits, doctor.INFLATE}
    assert max(bits) < doctor.TRANSPORT


def test_the_distributions_offers_neither() -> None:
    assert not {doctor.REPORTED, doctor.INFLATE} & set(doctor.offered_bits(stock.qemu()))
    with pytest.raises(LabError, match="does not answer") as caught:
        doctor.offered_bits(stock.qemu(), ",device-init-on-inflate=on")
    assert "device-init-on-inflate" in caught.value.why
