# SPDX-License-Identifier: GPL-2.0
"""A running guest moves between our QEMU and Debian's; with bit 6 Debian's refuses it."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from lab.bench.kzeropaged import zero_all
from lab.bench.session import LOOP, MIB, PAGE, Side
from lab.boot import resolve
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from lab.machine import fetch, stock
from tests.guest.guests import BALLOON, CHECK, CHECKED, DIRTY, REPORT, expect_at_least

pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.nightly]

USED = 64  # MB
FEATURES = "cat /sys/bus/virtio/drivers/virtio_balloon/virtio*/features"
FILE = "/tmp/file"
# Only a flush reports.
APPEND = f"{CHECK} page_reporting.page_reporting_delay_ms=3600000"
# A program that allocates, checks and frees memory while the guest moves.
BUSY = "(while alloc_once --size 16 --verify >/dev/null; do :; done; touch /tmp/bad) & busy=$!"
IDLE = "sleep 600 & busy=$!"
MACHINE = "pc-q35-10.0"
OFF_THERE = ",x-device-init-reported=off,x-report-now=off"


def debians() -> Path:
    """Debian's QEMU of the same version.

    11.1 does not load the virtio-serial device of Debian's own 10.0.
    """
    return stock.qemu(suite=fetch.base("qemu").suite)


def guest_on(qemu: Path, machine: str, device: str, *more: str) -> BootSpec:
    extra = ["-machine", machine, "-action", "reboot=reset", *more]
    return BootSpec(
        CHECKED,
        qemu,
        memory="768M",
        devices=[device],
        append=APPEND,
        accel="tcg",
        timeout=600,
        command=["sh", "-c", LOOP],
        extra_qemu=extra,
    )


def arriving(qemu: Path, machine: str, device: str) -> contextlib.closing[Guest]:
    """A guest that waits for another one's state."""
    spec = guest_on(qemu, machine, device, "-incoming", "defer")
    return contextlib.closing(Guest(spec, resolve.images(spec)))


def move(source: Guest, target: Guest, place: Path) -> str:
    """Migrate live; the state of the migration at its end."""
    for guest in (source, target):
        capability = {"capability": "return-path", "state": True}
        guest.qmp("migrate-set-capabilities", capabilities=[capability])
    source.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 40, "downtime-limit": 5000})
    target.qmp("migrate-incoming", uri=f"unix:{place}")
    source.qmp("migrate", uri=f"unix:{place}")
    deadline = time.monotonic() + 120
    while (state := str(source.qmp("query-migrate")["status"])) not in ("completed", "failed"):
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def bits(side: Side) -> set[int]:
    """Those of bits 5, 6, 7 and 16 that the balloon's driver uses."""
    shown = side.sh(FEATURES)[-1]
    return {bit for bit in (5, 6, 7, 16) if shown[bit] == "1"}


def skipped(side: Side, size: int = USED) -> int:
    """Bytes that the guest did not zero when it used memory, which it found zero."""
    answer = side.json(
        "alloc_once", "--size", str(size), "--pages", "thp", "--verify", "--mode", "touch_all"
    )
    assert side.vmstat()["pgzeroed_bad"] == 0
    return int(answer["vmstat"]["pgzeroed_skip"]) * PAGE


@pytest.mark.parametrize(
    ("machine", "device", "bits_there", "bits_later"),
    [
        pytest.param(MACHINE, f"{BALLOON}{OFF_THERE}", {5}, {5, 6, 16}, id="bits off"),
        pytest.param("pc-q35-9.2", BALLOON, {5}, {5}, id="older machine"),
        pytest.param(MACHINE, "virtio-balloon-pci", set(), set(), id="kzeropaged"),
    ],
)
def test_to_debians_qemu_and_back(
    machine: str,
    device: str,
    bits_there: set[int],
    bits_later: set[int],
    qemu: Path,
    tmp_path: Path,
) -> None:
    """Without bits 6 and 16 a guest moves there, with what kzeropaged has zeroed, and back.

    Its next start offers the bits.
    """
    same = device.partition(",x-")[0]
    with (
        running(guest_on(qemu, machine, device)) as first,
        arriving(debians(), machine, same) as second,
        arriving(qemu, machine, same) as third,
    ):
        side = Side("first", first)
        side.sh(f"dd if=/dev/urandom of={FILE} bs=1M count=32 2>/dev/null")
        zero_all(side)
        content = side.sh(f"sha256sum {FILE}")
        assert bits(side) == bits_there
        for number, (source, target) in enumerate(((first, second), (second, third))):
            # It would use what kzeropaged has zeroed.
            side.sh(BUSY if bits_there else IDLE)
            assert move(source, target, tmp_path / str(number)) == "completed"
            side = Side(f"moved {number}", target)
            side.sh("kill $busy; test ! -e /tmp/bad")
            assert bits(side) == bits_there
            assert side.sh(f"sha256sum {FILE}") == content
            # kzeropaged leaves memory alone that was reported. It zeroes again what the first use
            # made dirty, but no more than that.
            size = USED * (1 + 2 * number)
            found = skipped(side, size)
            if not bits_there:
                expect_at_least(found, 0.6 * size * MIB)
        assert third.ending().fault() is None
        third.qmp("system_reset")
        assert bits(side) == bits_later


@pytest.mark.parametrize(
    ("without", "used", "why"),
    [
        (",x-report-now=off", {5, 6}, r"Features 0x\w+ unsupported\. Allowed features: 0x\w+"),
        # The state of bit 16 is loaded before the features are compared.
        ("", {5, 6, 16}, "Failed to load virtio-balloon:virtio"),
    ],
    ids=["bit 6", "bits 6 and 16"],
)
def test_debians_qemu_refuses_the_bits(
    qemu: Path, tmp_path: Path, without: str, used: set[int], why: str
) -> None:
    """The error names the balloon, or the features, and the guest goes on at the source."""
    with (
        running(guest_on(qemu, MACHINE, f"{BALLOON}{without}")) as source,
        arriving(debians(), MACHINE, BALLOON) as target,
    ):
        side = Side("source", source)
        side.sh(BUSY)
        assert bits(side) == used
        assert move(source, target, tmp_path / "there") == "failed"
        assert target.process.wait(20) == 1
        error = (target.folder / "vmm.log").read_text(errors="replace")
        assert re.search(why, error), error
        assert source.qmp("query-status")["running"] is True
        side.sh(f"kill $busy; test ! -e /tmp/bad; {DIRTY}; {REPORT}")
        expect_at_least(skipped(side), 0.9 * USED * MIB)
