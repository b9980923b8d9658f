# SPDX-License-Identifier: GPL-2.0
"""What `kz doctor` says of a QEMU: the feature bits that its balloon offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.boot import doctor
from lab.core.errors import LabError
from lab.machine import stock

pytestmark = pytest.mark.slow


def test_ours_offers_bit_6_and_bit_7_when_asked(qemu: Path) -> None:
    bits = doctor.offered_bits(qemu)
    assert doctor.REPORTED in bits and doctor.INFLATE not in bits
    assert set(doctor.offered_bits(qemu, ",device-init-on-inflate=on")) == {*bits, doctor.INFLATE}
    assert max(bits) < doctor.TRANSPORT


@pytest.mark.parametrize("name", ["x-device-init-reported", "device-init-on-inflate"])
def test_the_distributions_offers_neither(name: str) -> None:
    with pytest.raises(LabError, match="does not answer") as caught:
        doctor.offered_bits(stock.qemu(), f",{name}=on")
    assert f"{name}' not found" in caught.value.why
