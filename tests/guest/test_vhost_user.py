# SPDX-License-Identifier: GPL-2.0
"""The balloon as a process of its own, with QEMU's front end and with User-Mode Linux."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.boot.guest import BootResult, Guest, running
from lab.boot.spec import BootSpec
from lab.build import daemon
from lab.core.errors import LabError
from lab.core.run import output as run_output
from tests import devices, hugepages
from tests.devices import logs, statistics, wait_for
from tests.guest.guests import (
    CHECK,
    CHECKED,
    DELAY,
    DIRTY,
    HUGE_PAGES,
    REPORT,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

MIB = 1 << 20
HUGE = hugepages.HUGE
DEVICE = "daemon,stats-interval=0"
# Nothing is reported but by a flush.
LATE = f"echo 3600000 > {DELAY}"


def memory(guest: Guest) -> int:
    """Bytes of guest memory that the host has pages for."""
    found = {}
    for entry in Path(f"/proc/{guest.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            name = os.readlink(entry)
            # QEMU's memfd or file; User-Mode Linux has a file without a name in /dev/shm or
            # $TMPDIR.
            files = r"/(vm_file[^/]*|qemu_back_mem[^/]*|#\d+) \(deleted\)$"
            if "memfd:memory-backend" in name or re.search(files, name):
                about = entry.stat()
                found[about.st_ino] = about.st_blocks * 512
    assert len(found) == 1, found
    return next(iter(found.values()))


@contextlib.contextmanager
def guest_with(
    script: str,
    *,
    kernel: str = "",
    size: str = "768M",
    arch: str = "x86_64",
    device: str = DEVICE,
    **more: Any,
) -> Iterator[Guest]:
    """A guest that runs a script; each ``pause`` in it prints a line and waits to be sent one.

    Its kernel is CHECKED unless another is named; as User-Mode Linux, debug.
    """
    if not kernel and arch == "x86_64":
        more["append"] = CHECK
    spec = BootSpec(
        kernel=kernel or ("debug" if arch == "um" else CHECKED),
        arch=arch,
        devices=[device],
        memory=size,
        timeout=240,
        command=["sh", "-ec", "pause() { echo $1; read answer; }; " + script],
        **more,
    )
    with running(spec) as guest:
        yield guest


def until(guest: Guest, word: str) -> None:
    """Read the guest's lines up to one."""
    for line in guest.lines:
        if line == word:
            return
    raise AssertionError(f"the guest never said {word} (console: {guest.console})")


def reported_and_used_again(device: daemon.Daemon, guest: Guest) -> BootResult:
    """Let the guest free its memory, report it, and take 128 MiB of it.

    The device has proven all of that zero. Earlier reports do not count: while QEMU logs writes,
    the device proves nothing. The guest does not report memory again that it has reported before.
    """
    before = device.status()
    guest.send("")
    until(guest, "reported")
    status = device.status()
    assert status["working"] is True
    reported, proven = (status[name] - before[name] for name in ("reported", "proven_zero"))
    assert proven == reported
    expect_at_least(reported, 128 * MIB)
    assert status["malformed"] == status["refused"] == 0
    guest.send("")
    result = guest.wait()
    fine(result)
    expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.99 * (128 << 8))
    return result


def device_of(guest: Guest) -> daemon.Daemon:
    assert guest.daemon is not None
    return guest.daemon


def test_reported_memory_comes_back_and_is_not_zeroed_again() -> None:
    result = run(
        f"{DIRTY}; {REPORT}; alloc_once --size 128 --pages thp --verify --mode touch_all; "
        "grep pgzeroed_ /proc/vmstat",
        devices=[DEVICE],
    )
    fine(result)
    expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.99 * (128 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def gets_it_back(guest: Guest, *, at_least: int, slack: int) -> None:
    """A guest that pauses when empty, filled and reported.

    The host has its memory again (bytes).
    """
    device = device_of(guest)
    until(guest, "empty")
    before = memory(guest)
    guest.send("")
    until(guest, "filled")
    expect_at_least(memory(guest), before + at_least)
    guest.send("")
    until(guest, "reported")
    # What is still used has been used before.
    expect_at_most(memory(guest), before + slack)
    status = device.status()
    assert status["working"] is True
    assert status["problems"] == []
    assert {"must-tell-host", "device-init-reported"} <= set(status["features"])
    assert "page-poison" not in status["features"]  # no page is poisoned here
    assert status["proven_zero"] == status["reported"] == status["discarded"] > at_least
    assert status["malformed"] == status["refused"] == 0
    guest.send("")


def test_the_host_gets_the_memory() -> None:
    script = (
        f"{LATE}; {REPORT}; pause empty; fillfree --share 70 >/dev/null; pause filled; {REPORT}; "
        "pause reported"
    )
    with guest_with(script) as guest:
        gets_it_back(guest, at_least=400 * MIB, slack=60 * MIB)
        fine(guest.wait())


def test_inflate_and_deflate() -> None:
    script = f"{LATE}; fillfree --share 70 >/dev/null; pause filled; pause inflated; pause deflated"
    with guest_with(script) as guest:
        device = device_of(guest)
        until(guest, "filled")
        filled = memory(guest)
        device.ask(command="target", bytes=512 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 512 * MIB)
        expect_at_most(memory(guest), filled - 400 * MIB)
        assert 0 < statistics(device)["free_memory"] < 500 * MIB
        guest.send("")
        until(guest, "inflated")
        device.ask(command="target", bytes=0)
        status = wait_for(device, "deflate", lambda status: status["actual"] == 0)
        assert status["inflated"] == 512 * MIB
        assert status["malformed"] == 0
        guest.send("")
        until(guest, "deflated")
        guest.send("")
        fine(guest.wait())


def test_flush_from_the_host() -> None:
    """What a host can do with a guest that reports nothing by itself."""
    with guest_with(
        f"{LATE}; fillfree --share 70 >/dev/null; pause filled; alloc_once --size 128 --verify"
    ) as guest:
        device = device_of(guest)
        until(guest, "filled")
        filled = memory(guest)
        binary = daemon.build()
        text = run_output(
            [binary, "flush", "--control", device.control, "--leave", "128M"],
            "flush fails",
            "read its log",
        )
        assert "went back to the host" in text
        expect_at_most(memory(guest), filled - 300 * MIB)
        assert device.status()["actual"] == 0
        guest.send("")
        fine(guest.wait())


@pytest.mark.parametrize(
    ("arch", "kernel"),
    [
        pytest.param("x86_64", "stock", id="stock"),
        # Kernels that nobody else needs by day.
        pytest.param("x86_64", "base", id="base", marks=pytest.mark.nightly),
        pytest.param("um", "base", id="base, um", marks=pytest.mark.nightly),
    ],
)
def test_a_kernel_that_does_not_know_the_bit(arch: str, kernel: str) -> None:
    """It reports, gets memory back as zeros all the same, and is promised nothing."""
    script = (
        f"[ ! -e {DELAY} ] || echo 100 > {DELAY}; fillfree --share 70 >/dev/null; pause filled; "
        "alloc_once --size 128 --pages nothp --verify"
    )
    with guest_with(script, arch=arch, kernel=kernel, size="512M") as guest:
        until(guest, "filled")
        device = device_of(guest)
        wait_for(device, "reports", lambda status: status["discarded"] > 150 * MIB)
        status = device.status()
        assert status["proven_zero"] == 0
        assert "device-init-reported" not in status["features"]
        assert any("zeroes reported memory again" in problem for problem in status["problems"])
        # It can be inflated like any other.
        device.ask(command="target", bytes=64 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 64 * MIB)
        device.ask(command="target", bytes=0)
        status = wait_for(device, "deflate", lambda status: status["actual"] == 0)
        assert status["inflated"] >= 64 * MIB
        assert status["proven_zero"] == status["malformed"] == 0
        guest.send("")
        fine(guest.wait())


def test_more_than_4_gib() -> None:
    """Of such a guest a part is above a hole in its addresses, in the same file."""
    script = (
        f"{LATE}; fillfree --share 75 >/dev/null; pause filled; {REPORT}; pause reported; "
        "alloc_once --size 3072 --pages thp --verify --mode touch_all; grep pgzeroed_ /proc/vmstat"
    )
    with guest_with(script, kernel="knownzero", size="5G") as guest:
        device = device_of(guest)
        until(guest, "filled")
        filled = memory(guest)
        guest.send("")
        until(guest, "reported")
        status = device.status()
        # More than is below the hole: some of it is above 4 GiB.
        low, high = sorted(status["regions"], key=lambda region: region["address"])
        assert high["address"] == 4 << 30
        assert (
            status["proven_zero"]
            == status["reported"]
            == status["discarded"]
            > low["bytes"] + (1 << 30)
        )
        expect_at_most(memory(guest), filled - (3 << 30))
        assert status["malformed"] == status["refused"] == 0
        guest.send("")
        result = guest.wait()
        fine(result)
        expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.95 * (3072 << 8))
        assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.parametrize(
    ("vouched", "share"),
    [(True, True), (False, True), (True, False)],
    ids=["vouched for", "not vouched for", "private"],
)
def test_memory_that_is_plugged_in(vouched: bool, share: bool) -> None:
    """Plugged memory is another file. The daemon discards it only if an option states that it is
    shared.

    One that is not shared is none of the daemon's business, whatever it was told.

    """
    script = (
        f"{LATE}; {HUGE_PAGES}; echo online > /sys/devices/system/memory/auto_online_blocks; "
        "total() { awk '/^MemTotal/ { print $2 }' /proc/meminfo; }; before=$(total); pause ready; "
        "until [ $(total) -gt $((before + 200000)) ]; do sleep 0.1; done; "
        f"fillfree --share 80 >/dev/null; pause filled; {REPORT}; pause reported; "
        "alloc_once --size 512 --verify --mode touch_all; grep pgzeroed_ /proc/vmstat"
    )
    device = DEVICE + (",memory-is-shared" if vouched else "")
    with guest_with(
        script, size="512M", device=device, extra_qemu=["-m", "slots=2,maxmem=2G"]
    ) as guest:
        until(guest, "ready")
        guest.qmp(
            "object-add",
            **{"qom-type": "memory-backend-memfd", "id": "plug", "size": 256 * MIB, "share": share},
        )
        guest.qmp("device_add", driver="pc-dimm", id="dimm", memdev="plug")
        guest.send("")
        until(guest, "filled")
        guest.send("")
        until(guest, "reported")
        status = device_of(guest).status()
        assert status["malformed"] == status["refused"] == 0
        regions = sorted(region["bytes"] for region in status["regions"])
        if share:
            assert regions[-2:] == [256 * MIB, 512 * MIB]
        unproven = status["reported"] - status["proven_zero"]
        # Nothing is claimed of what was kept, and all else was free and is back.
        assert status["discarded"] == status["proven_zero"]
        expect_at_least(status["proven_zero"], 100 * MIB)
        if not share:
            assert 256 * MIB not in regions
            # The device counts only memory that it has.
            assert unproven == 0
            expect_at_least(status["skipped"]["outside_memory"], 100 * MIB)
        elif vouched:
            assert unproven == 0
        else:
            # On a busy machine memory is reported before it is filled, too, and counted twice.
            assert status["skipped"]["not_known_shared"] == unproven
            expect_at_least(unproven, 100 * MIB)
            promises = {region["bytes"]: region["promise"] for region in status["regions"]}
            assert promises[512 * MIB] == "zero (tmpfs)"
            assert promises[256 * MIB] == "not claimed to be zero (not_known_shared)"
        guest.send("")
        result = guest.wait()
        fine(result)
        assert counters(result)["pgzeroed_bad"] == 0


def test_a_guest_that_is_reset() -> None:
    """What the last driver had in its balloon is forgotten, and the next one is told the same
    target.
    """
    script = (
        f"{LATE}; pause up; {DIRTY}; {REPORT}; pause reported; alloc_once --size 128 --pages thp "
        "--verify --mode touch_all; grep pgzeroed_ /proc/vmstat"
    )
    with guest_with(script, extra_qemu=["-action", "reboot=reset"]) as guest:
        device = device_of(guest)
        until(guest, "up")
        device.ask(command="target", bytes=128 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 128 * MIB)
        first = device.status()["inflated"]
        guest.qmp("system_reset")
        until(guest, "up")
        status = wait_for(device, "inflate again", lambda status: status["actual"] == 128 * MIB)
        assert status["inflated"] >= first + 128 * MIB
        device.ask(command="target", bytes=0)
        wait_for(device, "deflate", lambda status: status["actual"] == 0)
        assert counters(reported_and_used_again(device, guest))["pgzeroed_bad"] == 0


def test_a_driver_that_is_bound_again() -> None:
    again = (
        "cd /sys/bus/virtio/drivers/virtio_balloon; d=$(ls -d virtio*); echo $d > unbind; echo $d "
        "> bind; cd /"
    )
    script = (
        f"{LATE}; {again}; {again}; {DIRTY}; {REPORT}; pause reported; alloc_once --size 128 "
        "--pages thp --verify"
    )
    with guest_with(script) as guest:
        until(guest, "reported")
        status = device_of(guest).status()
        expect_at_least(status["proven_zero"], 300 * MIB)
        assert status["refused"] == 0
        guest.send("")
        result = guest.wait()
        fine(result)
        expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.99 * (128 << 8))


@pytest.mark.parametrize("vouched", [True, False])
def test_a_daemon_that_is_killed_and_comes_back(vouched: bool) -> None:
    """Meanwhile the guest waits, QEMU lives and says so.

    Afterwards everything goes on where it was.

    Requests in the queue when the new daemon starts do not show that the guest writes to the file.
    The daemon discards their memory only if an option states that memory is shared.
    """
    device_options = DEVICE + (",memory-is-shared" if vouched else "")
    script = (
        f"{LATE}; {DIRTY}; pause filled; ({REPORT}; echo done > /tmp/reported) & pause waiting; "
        "wait; cat /tmp/reported; pause reported; alloc_once --size 128 --pages thp --verify"
    )
    with guest_with(script, device=device_options) as guest:
        device = device_of(guest)
        until(guest, "filled")
        device.kill()
        guest.send("")
        until(guest, "waiting")
        log = guest.folder / "vmm.log"
        logs(log, "the backend is disconnected")
        assert guest.qmp("query-status")["running"] is True
        device.restart()
        guest.send("")
        until(guest, "reported")
        assert "a new backend is connected" in log.read_text()
        status = wait_for(device, "reports", lambda status: status["reported"] > 300 * MIB)
        assert status["refused"] == 0
        unproven = status["reported"] - status["proven_zero"]
        if vouched:
            assert unproven == 0
        else:
            # One request: at most 32 blocks of 4 MiB.
            assert 0 < unproven <= 128 * MIB
            assert status["skipped"]["not_known_shared"] == unproven
        guest.send("")
        result = guest.wait()
        fine(result)
        if vouched:
            expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.99 * (128 << 8))


def test_a_daemon_that_comes_back_with_less() -> None:
    """QEMU does not take one that would leave the guest's reports unanswered, and says why."""
    script = f"{LATE}; {DIRTY}; pause filled; ({REPORT}) & pause waiting; wait; pause reported"
    with guest_with(script) as guest:
        device = device_of(guest)
        until(guest, "filled")
        device.kill()
        guest.send("")
        until(guest, "waiting")
        device.restart("--free-page-reporting", "off")
        logs(guest.folder / "vmm.log", "lacks features of the first one")
        device.kill()
        device.restart()
        guest.send("")
        until(guest, "reported")
        expect_at_least(device.status()["proven_zero"], 300 * MIB)
        guest.send("")
        fine(guest.wait())


def test_a_daemon_that_is_killed_while_the_balloon_is_full() -> None:
    with guest_with(f"{LATE}; pause ready; pause inflated") as guest:
        device = device_of(guest)
        until(guest, "ready")
        device.ask(command="target", bytes=256 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 256 * MIB)
        device.kill()
        device.restart()
        # The new one knows what the driver has; without a target of its own it gives it back.
        wait_for(device, "deflate", lambda status: status["working"] and status["actual"] == 0)
        guest.send("")
        until(guest, "inflated")
        guest.send("")
        fine(guest.wait())


def test_what_an_operator_has_set_survives_the_daemon(tmp_path: Path) -> None:
    """D3: target and discard are in the state file.

    The interval of statistics is an option of each daemon.
    """
    device_options = f"daemon,stats-interval=1,state={tmp_path}/state"
    with guest_with(
        f"{LATE}; {DIRTY}; pause ready; {REPORT}; pause reported", device=device_options
    ) as guest:
        device = device_of(guest)
        until(guest, "ready")
        device.ask(command="discard", enabled=False)
        device.ask(command="target", bytes=64 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 64 * MIB)
        device.kill()
        device.restart()
        running = {"queue": "reporting", "state": "running"}
        status = wait_for(device, "connect", lambda status: running in status["queues"])
        assert (status["target"], status["actual"]) == (64 * MIB, 64 * MIB)
        guest.send("")
        until(guest, "reported")
        status = device.status()
        assert status["discarded"] == status["proven_zero"] == 0
        assert status["skipped"]["inhibited"] == status["reported"] + status["inflated"]
        expect_at_least(status["reported"] + status["inflated"], 300 * MIB)
        # The new daemon has asked for these by itself, every second.
        assert statistics(device)["total_memory"] > 0
        guest.send("")
        fine(guest.wait())


def test_how_fast_the_guest_writes_is_measured() -> None:
    """QEMU logs what is written meanwhile. A daemon cannot, and is not asked to.

    Neither one nor its successor.
    """
    # The first report leaves no earlier pass that would begin while QEMU logs writes.
    script = (
        f"{LATE}; {REPORT}; {DIRTY}; pause filled; {REPORT}; pause reported; alloc_once --size 128 "
        "--pages thp --verify"
    )

    def measured() -> None:
        deadline = time.monotonic() + 60
        while (told := guest.qmp("query-dirty-rate"))["status"] != "measured":
            assert time.monotonic() < deadline, told
            time.sleep(0.1)
        assert told["mode"] == "dirty-bitmap"

    with guest_with(script) as guest:
        device = device_of(guest)
        log = guest.folder / "vmm.log"
        until(guest, "filled")
        guest.qmp("calc-dirty-rate", **{"calc-time": 1, "mode": "dirty-bitmap"})
        measured()
        assert "the backend is disconnected" not in log.read_text()
        guest.qmp("calc-dirty-rate", **{"calc-time": 5, "mode": "dirty-bitmap"})
        device.kill()
        device.restart()
        reporting = {"queue": "reporting", "state": "running"}
        wait_for(device, "a front end", lambda status: reporting in status["queues"])
        measured()
        assert log.read_text().count("the backend is disconnected") == 1
        reported_and_used_again(device, guest)


def test_memory_that_is_not_shared_is_refused() -> None:
    with devices.running() as device, pytest.raises(LabError) as refused:
        extra = [
            "-chardev",
            f"socket,id=c,path={device.socket}",
            "-device",
            "vhost-user-balloon-pci,chardev=c",
        ]
        run("true", devices=[], extra_qemu=extra)
    assert "is not a shared file" in str(refused.value)


class Backend(threading.Thread):
    """A backend that says just enough, and says at once that its configuration has changed."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.pushed = threading.Event()

    def run(self) -> None:
        connection, _ = self.listener.accept()
        answers = {1: 1 << 30 | 1 << 32 | 1 << 5, 15: 1 << 0 | 1 << 5 | 1 << 9, 17: 5}
        while True:
            head, descriptors, _, _ = socket.recv_fds(connection, 12, 8)
            if len(head) < 12:
                return
            request, _, size = struct.unpack("=III", head)
            body = connection.recv(size, socket.MSG_WAITALL) if size else b""
            if request in answers:
                connection.sendall(struct.pack("=IIIQ", request, 5, 8, answers[request]))
            elif request == 24:
                connection.sendall(struct.pack("=III", request, 5, len(body)) + body)
            elif request == 21:
                with socket.socket(fileno=descriptors[0]) as channel:
                    for _ in range(20):
                        channel.sendall(struct.pack("=III", 2, 1, 0))
                    channel.detach()
                self.pushed.set()


def test_a_backend_that_pushes_before_the_guest_has_started(tmp_path: Path) -> None:
    backend = Backend(tmp_path / "front")
    backend.start()
    extra = [
        "-S",
        *(
            "-object",
            "memory-backend-memfd,id=m,size=256M,share=on",
            "-machine",
            "memory-backend=m",
        ),
        *("-chardev", f"socket,id=c,path={tmp_path / 'front'}"),
        *("-device", "vhost-user-balloon-pci,chardev=c"),
    ]
    spec = BootSpec(kernel="knownzero", memory="256M", extra_qemu=extra, allow_warnings=True)
    with running(spec) as guest:
        assert backend.pushed.wait(30)
        for _ in range(3):
            assert guest.qmp("query-status")["status"] == "prelaunch"
        assert guest.process.poll() is None


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Enough huge pages of the host for a guest of 512 MB."""
    wanted = 512 * MIB // HUGE
    with hugepages.reserved(wanted) as found:
        if found < wanted:
            pytest.skip(
                f"{found} huge pages of this machine are free or can be reserved, not {wanted}"
            )
        yield


def test_memory_of_huge_pages(huge_pages: None) -> None:
    """Whole huge pages go back to the host's pool, and are claimed; parts of one never."""
    script = (
        f"{HUGE_PAGES}; {LATE}; fillfree --share 70 >/dev/null; pause filled; {REPORT}; pause "
        "reported; alloc_once --size 128 --pages thp --verify --mode touch_all; fillfree --share "
        "70 >/dev/null; pause again; pause inflated; pause deflated; alloc_once --size 256 "
        "--verify; grep pgzeroed_ /proc/vmstat"
    )
    backing = "hugetlb=on,hugetlbsize=2M"
    device_init = f"{DEVICE},device-init-on-inflate=on"
    with guest_with(script, size="512M", device=device_init, shared_memory=backing) as guest:
        device = device_of(guest)
        until(guest, "filled")
        filled, free = memory(guest), hugepages.free()
        expect_at_least(filled, 300 * MIB)
        guest.send("")
        until(guest, "reported")
        status = device.status()
        regions = {(region["backing"], region["host_page"]) for region in status["regions"]}
        assert regions == {("hugetlbfs", HUGE)}
        assert status["proven_zero"] == status["reported"] == status["discarded"]
        expect_at_least(status["discarded"], 200 * MIB)
        assert filled - memory(guest) == (hugepages.free() - free) * HUGE
        expect_at_least((hugepages.free() - free) * HUGE, 200 * MIB)
        assert status["malformed"] == status["refused"] == 0
        guest.send("")
        until(guest, "again")
        filled, before = memory(guest), device.status()
        device.ask(command="target", bytes=256 * MIB)
        wait_for(device, "inflate", lambda status: status["actual"] == 256 * MIB)
        back, after = filled - memory(guest), device.status()
        assert back % HUGE == 0
        assert back > 0
        # More than the target if compaction moves pages of the balloon. The interrupt that
        # announces the target also begins a pass of page reporting.
        inflated, reported = (after[name] - before[name] for name in ("inflated", "reported"))
        print(f"{back} bytes went back: {inflated} were inflated, {reported} reported")
        assert back <= inflated + reported
        guest.send("")
        until(guest, "inflated")
        device.ask(command="target", bytes=0)
        wait_for(device, "deflate", lambda status: status["actual"] == 0)
        guest.send("")
        until(guest, "deflated")
        guest.send("")
        result = guest.wait()
        fine(result)
        expect_at_least(objects(result)[0]["vmstat"]["pgzeroed_skip"], 0.9 * (128 << 8))
        assert counters(result)["pgzeroed_bad"] == 0


def test_user_mode_linux() -> None:
    script = (
        f"{LATE}; {REPORT}; pause empty; fillfree --share 60 >/dev/null; pause filled; {REPORT}; "
        "pause reported; alloc_once --size 128 --pages nothp --verify; grep pgzeroed_ "
        "/proc/vmstat"
    )
    with guest_with(script, arch="um", size="512M") as guest:
        gets_it_back(guest, at_least=200 * MIB, slack=30 * MIB)
        result = guest.wait()
        fine(result)
        expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.85 * (128 << 8))
        assert counters(result)["pgzeroed_bad"] == 0


def test_user_mode_linux_inflates_and_deflates() -> None:
    script = (
        f"{LATE}; fillfree --share 60 >/dev/null; pause filled; pause inflated; pause deflated; "
        "alloc_once --size 320 --pages nothp --verify; grep pgzeroed_ /proc/vmstat"
    )
    # Nothing is known to be zero but by the balloon.
    device_init = f"{DEVICE},device-init-on-inflate=on,device-init-reported=off"
    with guest_with(script, arch="um", size="512M", device=device_init) as guest:
        device = device_of(guest)
        until(guest, "filled")
        filled = memory(guest)
        device.ask(command="target", bytes=384 * MIB)
        status = wait_for(device, "inflate", lambda status: status["actual"] == 384 * MIB)
        assert "device-init-on-inflate" in status["features"]
        assert status["proven_zero"] == status["inflated"] >= 384 * MIB
        expect_at_most(memory(guest), filled - 200 * MIB)
        guest.send("")
        until(guest, "inflated")
        device.ask(command="target", bytes=0)
        wait_for(device, "deflate", lambda status: status["actual"] == 0)
        guest.send("")
        until(guest, "deflated")
        guest.send("")
        result = guest.wait()
        fine(result)
        # What was in the balloon is not zeroed again, and was zero; the rest of free memory may
        # come first.
        expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 200 << 8)
        assert counters(result)["pgzeroed_bad"] == 0


def survived(result: BootResult) -> None:
    """The transport of 7.3.4 warns when it reads the end of its peer's pipe.

    Nothing else may be wrong.
    """
    allowed = ("arch/um/drivers/virtio_uml.c", "kernel tainted: warning")
    wrong = [line for line in result.violations if not any(word in line for word in allowed)]
    assert not wrong, wrong[:8]
    assert result.exit_code == 0, text(result)


def test_user_mode_linux_loses_its_daemon() -> None:
    """It cannot be taken up again there.

    The guest lives on without a balloon, and whoever flushes is told.
    """
    script = (
        f"{LATE}; {DIRTY}; pause filled; "
        'until [ -z "$(ls /sys/bus/virtio/devices)" ]; do sleep 0.1; done; '
        "flush 0; alloc_once --size 128 --pages nothp --verify --mode touch_all"
    )
    with guest_with(script, arch="um", size="512M", allow_warnings=True) as guest:
        until(guest, "filled")
        device_of(guest).kill()
        guest.send("")
        result = guest.wait()
        survived(result)
        flushed, used = objects(result)
        assert flushed["error"] == "ENODEV"
        assert used["bytes"] == 128 * MIB


def test_user_mode_linux_loses_its_daemon_in_the_middle_of_a_report() -> None:
    """Whoever reports waits for ever then. The rest of the guest does not, and it can be ended."""
    script = (
        "free() { awk '/^MemFree/ { print $2 }' /proc/meminfo; }; "
        f"{LATE}; {DIRTY}; pause filled; before=$(free); ({REPORT}) & "
        # Blocks that are being reported are not free.
        "until [ $(free) -lt $((before - 16384)) ]; do sleep 0.1; done; "
        'pause waiting; sleep 1; echo "$(jobs)"; '
        "alloc_once --size 128 --pages nothp --verify --mode touch_all"
    )
    with guest_with(script, arch="um", size="512M", allow_warnings=True) as guest:
        device = device_of(guest)
        until(guest, "filled")
        os.kill(device.process.pid, signal.SIGSTOP)
        guest.send("")
        until(guest, "waiting")
        device.kill()
        guest.send("")
        result = guest.wait()
        survived(result)
        assert "Running" in result.stdout
        assert objects(result)[0]["bytes"] == 128 * MIB
