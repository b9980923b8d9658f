# SPDX-License-Identifier: GPL-2.0
"""Beside unpatched partners: nothing breaks, and nothing is skipped wrongly."""

from __future__ import annotations

import pytest

from lab.bench import session
from lab.boot import resolve
from lab.boot.argv import GENERIC, HUGE, WITH_HUGE
from lab.core.errors import LabError
from lab.core.run import ask
from tests.devices import statistics, wait_for
from tests.guest.guests import (
    BALLOON,
    BOTH_AT_NIGHT,
    BOTH_DEVICES,
    DELAY,
    DIRTY,
    KERNEL,
    REPORT,
    VHOST_USER,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    lying_daemon,
    objects,
    run,
    text,
)
from tests.guest.test_vhost_user import LATE, MIB, device_of, guest_with, memory, until

pytestmark = pytest.mark.boots

JOB = (
    "alloc_once --size 128 --pages thp --verify --mode touch_all; alloc_once --size 64 --pages "
    "nothp --verify"
)
VERIFIED = [128 << 20, 64 << 20]  # bytes that JOB has read back as zeros


# A device that offers neither bit, and whose used lengths claim that all of it is zero.
CLAIMS_ALL = f"{VHOST_USER},device-init-reported=off,device-init-on-inflate=off,lie=full-length"


@pytest.mark.parametrize("kernel", ["knownzero", pytest.param("debug", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("device", [BALLOON, CLAIMS_ALL], ids=["QEMU's own", "claims all"])
def test_our_kernel_on_the_distributions_qemu(
    kernel: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bit, a used length has no meaning: QEMU's own balloon always returns 0."""
    lying_daemon(monkeypatch)
    script = f"{DIRTY}; {REPORT}; {JOB}; grep pgzeroed_ /proc/vmstat"
    result = run(script, kernel=kernel, qemu="stock", devices=[device])
    fine(result)
    found = counters(result)
    assert found["pgzeroed_set_reported"] == 0
    assert found["pgzeroed_skip"] == 0
    assert found["pgzeroed_bad"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize("device", BOTH_DEVICES)
def test_the_base_kernel_on_our_qemu(device: str) -> None:
    """It does not know the bit.

    It has no counter of known-zero pages, and its memory is zero all the same.
    """
    result = run(f"echo 100 > {DELAY}; {DIRTY}; sleep 2; {JOB}", kernel="base", devices=[device])
    fine(result)
    told = objects(result)
    assert [one["bytes"] for one in told] == VERIFIED
    assert [one["vmstat"]["pgzeroed_bad"] for one in told] == [None, None]


@pytest.mark.parametrize("device", BOTH_AT_NIGHT)
def test_the_distributions_kernel_on_our_qemu(device: str) -> None:
    result = run(
        "uname -r; fillfree --share 60; fillfree --share 60; " + JOB,
        kernel="stock",
        devices=[device],
    )
    fine(result)
    assert [one["bytes"] for one in objects(result)[2:]] == VERIFIED, text(result)


def test_the_daemon_on_stock_qemu() -> None:
    """Reports, the balloon and its answers, statistics, a reset of the guest, a driver that is
    bound again.
    """
    again = (
        "cd /sys/bus/virtio/drivers/virtio_balloon; d=$(ls -d virtio*); echo $d > unbind; echo $d "
        "> bind; cd /"
    )
    script = (
        f"{LATE}; pause up; {again}; {DIRTY}; pause filled; {REPORT}; pause reported; alloc_once "
        "--size 256 --pages thp --verify --mode touch_all; fillfree --share 70 >/dev/null; pause "
        "full; pause deflated; alloc_once --size 256 --pages nothp --verify; grep pgzeroed_ "
        "/proc/vmstat"
    )
    with guest_with(
        script,
        qemu="stock",
        device="daemon,stats-interval=0,device-init-on-inflate=on",
        shared_memory=HUGE if ask([*WITH_HUGE, "true"]).returncode == 0 else "",
        extra_qemu=["-action", "reboot=reset"],
    ) as guest:
        device = device_of(guest)
        until(guest, "up")
        device.ask(command="target", bytes=64 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 64 * MIB)
        guest.qmp("system_reset")
        until(guest, "up")
        wait_for(device, "inflate after the reset", lambda status: status["actual"] == 64 * MIB)
        with pytest.raises(LabError, match="non-migratable device"):
            guest.qmp("migrate", uri="file:/dev/null")
        device.ask(command="target", bytes=0)
        wait_for(device, "deflate", lambda status: status["actual"] == 0)
        guest.send("")
        until(guest, "filled")
        filled, resident = memory(guest), session.resident(guest.pid)
        guest.send("")
        until(guest, "reported")
        expect_at_most(memory(guest), filled - 400 * MIB)
        expect_at_most(session.resident(guest.pid), resident - 400 * MIB)
        status = device.status()
        expect_at_least(status["proven_zero"] - 64 * MIB * 2, 400 * MIB)
        assert status["malformed"] == status["refused"] == 0
        guest.send("")
        until(guest, "full")
        device.ask(command="target", bytes=512 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 512 * MIB)
        assert 0 < statistics(device)["free_memory"] < 500 * MIB
        device.ask(command="target", bytes=0)
        wait_for(device, "deflate", lambda status: status["actual"] == 0)
        guest.send("")
        until(guest, "deflated")
        guest.send("")
        result = guest.wait()
        fine(result)
        reported, deflated = objects(result)
        for job, pages in ((reported, 256 << 8), (deflated, 256 << 8)):
            expect_at_least(job["vmstat"]["pgzeroed_skip"], 0.97 * pages)
        assert counters(result)["pgzeroed_bad"] == 0


def test_the_daemon_on_stock_qemu_keeps_the_poison_of_free_pages() -> None:
    """The guest checks the poison of each page that it allocates.

    A discarded page would be zeros.
    """
    script = f"{LATE}; {DIRTY}; {REPORT}; {JOB}; pause done; grep pgzeroed_ /proc/vmstat"
    with guest_with(script, qemu="stock", kernel=str(KERNEL), append="page_poison=1") as guest:
        until(guest, "done")
        status = device_of(guest).status()
        assert (status["discarded"], status["proven_zero"]) == (0, 0)
        assert "page-poison" in status["features"]
        assert status["skipped"]["poison"] == status["reported"]
        expect_at_least(status["reported"], 400 * MIB)
        guest.send("")
        result = guest.wait()
    fine(result)
    assert counters(result)["pgzeroed_skip"] == 0


def test_stock_qemu_goes_on_without_its_daemon() -> None:
    """It does not connect again.

    What is reported stays unanswered, and the rest of the guest works. QEMU aborts if the driver
    reads the configuration.
    """
    script = (
        f"{LATE}; {DIRTY}; pause filled; ({REPORT}) & alloc_once --size 64 --verify; "
        'echo "$(jobs)"; pause alive; kill %1'
    )
    with guest_with(script, qemu="stock") as guest:
        device = device_of(guest)
        until(guest, "filled")
        device.kill()
        device.restart()
        guest.send("")
        until(guest, "alive")
        assert guest.qmp("query-status")["running"] is True
        assert device.status()["regions"] == []
        guest.send("")
        assert "Running" in guest.wait().stdout


def test_stock_qemu_does_not_start_with_reconnect_ms() -> None:
    """Its device uses the connection before there is one."""
    options = (
        "-nodefaults -display none -S -chardev socket,id=c,path=/nowhere/socket,reconnect-ms=100"
    )
    done = ask([resolve.qemu("stock"), *options.split(), "-device", f"{GENERIC},chardev=c"])
    assert done.returncode == 1
    assert "Failed to set msg fds" in done.stderr
