# SPDX-License-Identifier: GPL-2.0
"""The release build against front ends, guests and control clients that want to do harm.

Whatever they send or withhold: another connection is served within a second, the daemon grows no
further than docs/explanation/trust.md says, no byte outside of the guest's regions changes, and the
next front end is served.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests import hugepages
from tests.guest.guests import OutOfLuck
from tests.hostile.conftest import Start
from tests.hostile.peer import (
    ALL,
    ANSWER,
    DEFLATE,
    ENTRIES,
    EXTENDED,
    INFLATE,
    LIST,
    MIB,
    PAGE,
    PATIENCE,
    PLAY,
    PROMISE,
    RAM,
    REPORTING,
    STATS,
    USER,
    Device,
    FrontEnd,
    eventually,
    limited_memory,
    longs,
    memfd,
    repeated,
    words,
)

pytestmark = [pytest.mark.slow]
FREE_MEMORY, TOTAL_MEMORY = 4, 5  # VIRTIO_BALLOON_S_MEMFREE and _MEMTOT


# D1: messages and replies


MESSAGE = words(2, 1, 8) + longs(EXTENDED)


def test_d1_a_message_that_stops_at_each_byte(start: Start) -> None:
    devices = [start() for _ in range(1, len(MESSAGE))]
    peers = [FrontEnd(device) for device in devices]
    for sent, (device, peer) in enumerate(zip(devices, peers, strict=True), 1):
        peer.raw(MESSAGE[:sent])
        device.status()
    for device, peer in zip(devices, peers, strict=True):
        assert peer.hung_up(2 * PROMISE), device.log()
        peer.close()
        device.serves()


def test_d1_a_byte_now_and_then_is_not_enough(device: Device) -> None:
    with FrontEnd(device) as peer:
        began = device.clock()
        with pytest.raises(ConnectionError):
            for byte in MESSAGE:
                peer.raw(bytes([byte]))
                device.status()
                time.sleep(0.15)
        assert device.clock() - began < 2.5 * PROMISE
        assert "and not the rest within a second" in device.log()


@pytest.mark.parametrize("step", [3, 7])
def test_d1_a_message_in_pieces_is_one_message(device: Device, step: int) -> None:
    with FrontEnd(device) as peer:
        for _ in range(2):
            for at in range(0, len(MESSAGE), step):
                peer.raw(MESSAGE[at : at + step])
                time.sleep(0.001)
            # The time of one message does not count for the next one.
            time.sleep(1.1 * PROMISE)
        peer.start()
        peer.works()


def test_d1_unread_replies(device: Device) -> None:
    with FrontEnd(device) as peer:
        peer.socket.setblocking(False)
        with pytest.raises((BlockingIOError, ConnectionError)):
            while True:
                peer.raw(words(1, 1, 0) * 100)
        device.status()
        # It is left, so that the other end of the socket is closed.
        assert eventually(lambda: "unread" in device.log())


def test_no_acknowledgement_unless_it_was_negotiated(device: Device) -> None:
    with FrontEnd(device) as peer:
        peer.send("SET_PROTOCOL_FEATURES", longs(1))
        peer.send("SET_OWNER", flags=1 | 8)
        # The next reply is the answer to the question.
        assert peer.get("GET_FEATURES") != bytes(8)


@pytest.mark.parametrize("held", [1, 8, 31])
def test_descriptors_of_half_a_message(device: Device, held: int) -> None:
    before = len(os.listdir(f"/proc/{device.process.pid}/fd"))
    for _ in range(3):
        with FrontEnd(device) as peer:
            peer.raw(MESSAGE[:5], [peer.fd] * held)
            peer.raw(MESSAGE[5:6], [peer.fd])
            device.status()
    assert eventually(lambda: len(os.listdir(f"/proc/{device.process.pid}/fd")) <= before)


@pytest.mark.parametrize(("pieces", "each"), [(10, 30), (1, 40)])
def test_more_descriptors_than_a_message_can_have(device: Device, pieces: int, each: int) -> None:
    with FrontEnd(device) as peer:
        for byte in MESSAGE[:pieces]:
            with contextlib.suppress(ConnectionError):
                peer.raw(bytes([byte]), [peer.fd] * each)
        assert peer.hung_up(PROMISE / 2), "it waits for the rest"


@pytest.mark.parametrize(
    "data",
    [
        words(0, 1, 0),
        words(200, 1, 0),
        words(1, 2, 0),
        words(1, 5, 0),
        words(2, 1, 0xFFFF_FFFF),
        words(2, 1, 4) + bytes(4),
        words(5, 1, 9) + bytes(9),
        words(9, 1, 8) + bytes(8),
        words(11, 1, 8) + words(77, 0),
        words(24, 1, 12) + words(0, 4085, 0),
        b"\xff" * 12,
    ],
    ids=lambda data: data[:12].hex(),
)
def test_messages_that_are_none(device: Device, data: bytes) -> None:
    with FrontEnd(device) as peer:
        peer.raw(data)
        assert peer.hung_up(PROMISE)
    assert eventually(lambda: "does not keep to the protocol" in device.log())


def test_the_front_end_goes_at_each_step(device: Device) -> None:
    steps: list[Callable[[FrontEnd], object]] = [
        lambda peer: peer.send("SET_OWNER"),
        lambda peer: peer.negotiate(),
        lambda peer: peer.table((0, RAM, USER, 0)),
        lambda peer: peer.address(0),
        lambda peer: peer.start_ring(0),
        lambda peer: peer.start_ring(3),
        lambda peer: peer.put(3, (0, RAM, True)),
        lambda peer: peer.kick(3),
        lambda peer: peer.raw(MESSAGE[:15]),
    ]
    for count in range(len(steps) + 1):
        with FrontEnd(device) as peer:
            for step in steps[:count]:
                step(peer)
        device.status()
    device.serves()


def test_the_next_front_end_waits_for_the_end_of_the_last(device: Device) -> None:
    with FrontEnd(device) as first:
        first.start()
        device.process.send_signal(signal.SIGSTOP)
        for _ in range(8):
            first.send("SET_OWNER")
    with FrontEnd(device) as second:
        device.process.send_signal(signal.SIGCONT)
        second.start()
        second.works()


@contextlib.contextmanager
def refilled(vm: FrontEnd) -> Iterator[None]:
    """A guest that keeps its ring full of lists that are as much work as can be."""
    list_at = 32 * MIB
    vm.memory[list_at : list_at + 0x4000] = words(
        *((PLAY >> 12) + n * 2 % 0x1800 for n in range(4096))
    )
    at = vm.bases[INFLATE]
    for slot in range(128):
        vm.descriptor(INFLATE, slot, list_at, 0x4000)
        vm.memory[at + 0x1004 + slot * 2 : at + 0x1006 + slot * 2] = struct.pack("<H", slot)
    stop = threading.Event()

    def guest() -> None:
        while not stop.wait(0.001):
            index = vm.used_index(INFLATE) + 128 & 0xFFFF
            vm.memory[at + 0x1002 : at + 0x1004] = struct.pack("<H", index)
            vm.kick(INFLATE)

    thread = threading.Thread(target=guest)
    thread.start()
    try:
        assert eventually(lambda: vm.used_index(INFLATE) > 1)
        yield
    finally:
        stop.set()
        thread.join()


def test_messages_of_a_front_end_that_has_hung_up_delay_nobody(device: Device) -> None:
    """As many as the socket holds; the daemon works on a ring between one and the next."""
    with FrontEnd(device) as first:
        first.start()
        with refilled(first):
            first.socket.setblocking(False)
            first.raw(words(3, 1, 0) * 20_000)  # SET_OWNER
            first.socket.close()
            began = device.clock()
            with FrontEnd(device) as second:
                second.start()
                second.works()
                assert device.clock() - began < PROMISE, device.log()


def test_d6_a_second_front_end_is_refused_at_once(
    start: Start, binary: Path, tmp_path: Path
) -> None:
    path = tmp_path / "front"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        one = Device.__new__(Device)
        one.binary, one.folder, one.options = binary, tmp_path, ()
        one.front, one.control = path, tmp_path / "control"
        # As a service manager passes it.
        fd = listener.fileno()
        one.start(f"--fd={fd}", front=False, pass_fds=[fd])
        try:
            with FrontEnd(one) as first:
                first.start()
                with FrontEnd(one) as second:
                    assert second.hung_up(PROMISE)
                first.works()
            one.serves()
        finally:
            one.process.kill()
            one.process.wait()


# D2: who is charged for guest memory


def holes(vm: FrontEnd) -> int:
    """What the guest's memory is without what rings and lists take."""
    vm.memory[LIST : LIST + 2 * PAGE] = bytes(2 * PAGE)
    return vm.blocks()


def test_d2_lists_in_holes_stay_holes(vm: FrontEnd) -> None:
    before = holes(vm)
    for at in range(PLAY, RAM - 2 * MIB, 0x4000):
        for ring in (INFLATE, DEFLATE):
            vm.put(ring, (at, 0x4000, False))
        vm.put(STATS, (at, 0x4000, False))
        for ring in (INFLATE, DEFLATE, STATS):
            vm.kick(ring)
        for ring in (INFLATE, DEFLATE):
            vm.used(ring)
    assert vm.blocks() <= before + 64 * PAGE


def test_d2_indirect_tables_in_holes_stay_holes(vm: FrontEnd) -> None:
    before = holes(vm)
    for at in range(PLAY, PLAY + 16 * MIB, PAGE):
        vm.descriptor(REPORTING, 0, at, PAGE, 4)
        vm.offer(REPORTING, 0)
        vm.kick(REPORTING)
        assert vm.used(REPORTING) == 0
    assert vm.blocks() <= before + 64 * PAGE


@pytest.fixture(params=[0, 65534], ids=["owner", "stranger"])
def owned(request: pytest.FixtureRequest, start: Start) -> Iterator[FrontEnd]:
    """A driver in memory that only its owner may write.

    The daemon is the owner's, or another user's.
    """
    if os.geteuid():
        pytest.skip("only root can start a daemon of another user")
    device = start(user=request.param)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(RAM)
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
        with FrontEnd(device, memory=file.fileno()) as vm:
            vm.start()
            yield vm
    device.serves()


def test_d2_answers_in_holes_have_a_bound(owned: FrontEnd) -> None:
    before = holes(owned)
    owned.memory[LIST : LIST + 4] = words(PLAY >> 12)
    places = range(2 * PLAY, 2 * PLAY + 24 * MIB, PAGE)
    lengths = {owned.ask(INFLATE, (LIST, 4, False), (at, 1, True)) for at in places}
    assert lengths == {0, 1}
    assert owned.blocks() <= before + 17 * MIB


def rings_in(vm: FrontEnd, places: Iterable[int], between: Callable[[], object] = int) -> int:
    """In how many of these places a ring is accepted, for a guest that resets its device over and
    over.
    """
    accepted = 0
    for base in places:
        vm.stop_ring(DEFLATE)
        between()
        accepted += vm.address(DEFLATE, base)
        assert vm.accepted("SET_VRING_KICK", longs(DEFLATE), [vm.kicks[DEFLATE]])
        vm.kick(DEFLATE)
    vm.device.status()
    return accepted


def test_d2_rings_in_holes_have_a_bound(owned: FrontEnd) -> None:
    before = holes(owned)
    places = range(PLAY, PLAY + 24 * MIB, 0x3000)
    assert rings_in(owned, places) < len(places), "there is an end to it"
    assert owned.blocks() <= before + 17 * MIB


def test_d2_rings_in_holes_between_tables_have_a_bound(vm: FrontEnd) -> None:
    """A table without a region forgets nothing, and a region of huge pages allows no more small
    ones.
    """
    before = holes(vm)
    own = (0, RAM, USER, 0)

    def tables() -> None:
        assert vm.table()
        assert vm.table(own)

    places = range(PLAY, PLAY + 24 * MIB, 0x3000)
    assert rings_in(vm, places, tables) < len(places)
    assert vm.blocks() <= before + 17 * MIB
    # The kernel has files of huge pages even while its pool is empty.
    huge = memfd(2 * MIB, os.MFD_HUGETLB)
    assert vm.table(own, (1 << 32, 2 * MIB, USER + (1 << 32), 0), fds=[vm.fd, huge])
    os.close(huge)
    assert rings_in(vm, places) < len(places)
    assert vm.blocks() <= before + 17 * MIB
    assert vm.table(own)
    for ring in range(4):
        vm.start_ring(ring)


def usage(group: Path) -> int:
    """The memory that the kernel charges to a cgroup."""
    v2 = group / "memory.current"
    return int((v2 if v2.exists() else group / "memory.usage_in_bytes").read_text())


def fill_with_rings(vm: FrontEnd, files: list[int], size: int) -> int:
    """Share these files, beside the guest's own, and try a ring at each place of each; how many are
    accepted.
    """
    start = 1 << 32
    at = range(start, start + len(files) * size, size)
    own = (0, RAM, USER, 0)
    regions = [(guest, size, USER + guest, 0) for guest in at]
    assert vm.table(own, *regions, fds=[vm.fd, *files])
    places = range(start, start + len(files) * size - 0x3000, 0x4000)
    return sum(vm.address(DEFLATE, place) for place in places)


def test_v5_tables_that_come_and_go_share_one_bound(device: Device) -> None:
    """16 tables with 15 new files each: what is charged does not grow with the files.

    The front end keeps them, so that they count; once it has closed them, others may take their
    place.
    """
    size = MIB
    with limited_memory(256 * MIB) as group, FrontEnd(device) as vm:
        if group is not None:
            (group / "cgroup.procs").write_text(str(device.process.pid))
        try:
            vm.start()
            before = usage(group) if group is not None else 0
            files: list[int] = []
            accepted = []
            for _ in range(16):
                new = [memfd(size) for _ in range(15)]
                files += new
                accepted.append(fill_with_rings(vm, new, size))
            assert accepted[0] > 0 and accepted[-1] == 0, accepted
            charged = sum(os.fstat(fd).st_blocks * 512 for fd in files)
            assert charged <= 17 * MIB, charged
            if group is not None:
                assert usage(group) - before <= 24 * MIB
            assert vm.table((0, RAM, USER, 0))
            for fd in files:
                os.close(fd)

            def again() -> bool:
                new = [memfd(size)]
                found = fill_with_rings(vm, new, size)
                os.close(new[0])
                return found == size // 0x4000

            assert eventually(again), "files that are gone still count"
        finally:
            if group is not None:
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(str(device.process.pid))


def test_v5_a_file_that_is_open_counts_after_its_last_name(vm: FrontEnd) -> None:
    """The front end has each file open by its first name.

    The kernel reports the deletion when the file loses its second name.
    """
    size, files = MIB, []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for _ in range(4):
            names = [(Path(folder, f"{n}"), Path(folder, f"{n}.link")) for n in range(15)]
            new = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC) for name, _ in names]
            files += new
            for fd, (name, link) in zip(new, names, strict=True):
                os.ftruncate(fd, size)
                link.hardlink_to(name)
            fill_with_rings(vm, new, size)
            for name, link in names:
                name.unlink()
                link.unlink()
    charged = sum(os.fstat(fd).st_blocks * 512 for fd in files)
    # Of a ring without a chain, two of three pages.
    assert 10 * MIB <= charged <= 17 * MIB, charged
    for fd in files:
        os.close(fd)


def test_v5_a_file_with_the_numbers_of_a_deleted_one(vm: FrontEnd, tmp_path: Path) -> None:
    """A filesystem gets the device of one that was unmounted, and a file the number of another."""
    libc, size = ctypes.CDLL(None, use_errno=True), 24 * MIB

    def in_a_new_filesystem() -> int:
        """A file that is all that keeps its filesystem."""
        if libc.mount(b"none", bytes(tmp_path), b"tmpfs", 0, None):
            pytest.skip("only root can mount a file system")
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        libc.umount2(bytes(tmp_path), 2)
        os.ftruncate(fd, size)
        return fd

    files = [in_a_new_filesystem()]
    deleted = os.fstat(files[0])
    assert fill_with_rings(vm, files, size) > 0
    assert vm.table((0, RAM, USER, 0))
    os.close(files.pop())

    def same() -> bool:
        """The daemon closes its descriptor of the file in another thread."""
        fd = in_a_new_filesystem()
        if os.path.samestat(os.fstat(fd), deleted):
            files.append(fd)
        else:
            os.close(fd)
        return bool(files)

    if not eventually(same):
        raise OutOfLuck("another filesystem took the device")
    files.append(memfd(size))
    for fd in files:
        fill_with_rings(vm, [fd], size)
    charged = sum(os.fstat(fd).st_blocks * 512 for fd in files)
    assert charged <= 17 * MIB, charged
    for fd in files:
        os.close(fd)


@pytest.mark.parametrize("tables", [False, True], ids=["once", "again"])
def test_d2_rings_in_huge_pages_have_a_bound(device: Device, tables: bool) -> None:
    """A page that the guest has costs nothing; of those that nobody has, the daemon takes 64."""
    huge, there, count = 2 * MIB, 100, 180
    with hugepages.reserved(count) as free:
        if free < count:
            pytest.skip(f"{free} huge pages are free, not {count}")
        memory = memfd(count * huge, os.MFD_HUGETLB)
        with FrontEnd(device, count * huge, memory) as vm:
            os.close(memory)
            for at in range(0, there * huge, huge):
                vm.memory[at + huge - 1] = 1
            vm.start()
            between = (lambda: vm.table((0, vm.size, USER, 0))) if tables else int
            assert rings_in(vm, range(huge, there * huge, huge), between) == there - 1
            before = vm.blocks()
            assert rings_in(vm, range(there * huge, count * huge, huge), between) == 64
            assert rings_in(vm, range((there - 5) * huge, (there + 5) * huge, huge), between) == 10
            assert vm.blocks() == before + 64 * huge


def test_d2_a_touched_hole_takes_no_huge_page(vm: FrontEnd) -> None:
    """Linux gives a file without a name huge pages by hugepages-*/shmem_enabled.

    A test cannot place the daemon's mapping so that a huge page fits.
    """
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    assert all("nh" in flags.split() for flags in flags_of_guest_memory(vm))


def test_d2_refused_addresses_touch_no_holes(vm: FrontEnd) -> None:
    """A ring of which only one address is invalid is not used at the others."""
    before = holes(vm)
    for at in range(USER + PLAY, USER + RAM - 2 * MIB, PAGE):
        assert not vm.accepted("SET_VRING_ADDR", words(DEFLATE, 0) + longs(at, at + 1, at, 0))
        vm.kick(DEFLATE)
    assert vm.blocks() <= before + 64 * PAGE
    assert "stopped" in [queue["state"] for queue in vm.device.status()["queues"]]


def test_d2_in_a_cgroup_of_64_mib(device: Device) -> None:
    """The daemon is not charged for the guest's memory: 512 MiB of lists in holes."""
    size = 512 * MIB
    with limited_memory(64 * MIB) as group, FrontEnd(device, size) as vm:
        if group is None:
            pytest.skip("no cgroup can be made here")
        (group / "cgroup.procs").write_text(str(device.process.pid))
        try:
            vm.start()
            for at in range(PLAY, size - 2 * MIB, 0x4000):
                vm.put(INFLATE, (at, 0x4000, False))
                if at % 0x10_0000 == 0:
                    vm.kick(INFLATE)
                    vm.used(INFLATE)
                    vm.seen[INFLATE] = vm.next[INFLATE]
                    assert eventually(lambda: vm.used_index(INFLATE) == vm.next[INFLATE])
            vm.works()
        finally:
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(str(device.process.pid))


# D3: commands of an operator


def test_d3_discard_off_survives_a_reconnect(device: Device) -> None:
    with FrontEnd(device) as vm:
        vm.start()
        device.ask(command="discard", enabled=False)
        device.ask(command="target", bytes=8 * MIB)
    with FrontEnd(device) as vm:
        vm.start()
        vm.fill(PLAY, MIB)
        assert vm.ask(REPORTING, (PLAY, MIB, True)) == 0
        assert vm.holds(PLAY, MIB) == 0x5A
        assert device.ask(command="target")["target"] == 8 * MIB
    device.ask(command="discard", enabled=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_d3_discard_off_survives_a_restart(start: Start, tmp_path: Path, number: int) -> None:
    device = start("--state", str(tmp_path / "state"), "--target", "1M")
    assert device.ask(command="target")["target"] == MIB
    device.ask(command="target", bytes=8 * MIB)
    device.ask(command="discard", enabled=False)
    assert device.end(number) in (0, -signal.SIGKILL)
    device.start()
    assert device.ask(command="target")["target"] == 8 * MIB
    with FrontEnd(device) as vm:
        vm.start()
        vm.fill(PLAY, MIB)
        assert vm.ask(REPORTING, (PLAY, MIB, True)) == 0
        assert vm.holds(PLAY, MIB) == 0x5A


def full_disk(folder: Path, libc: ctypes.CDLL) -> None:
    """A file system with room for one more page, and then none."""
    folder.mkdir()
    if libc.mount(b"none", bytes(folder), b"tmpfs", 0, b"size=8k"):
        pytest.skip("only root can mount a small file system")


def test_a_command_on_a_full_disk_is_saved_or_in_doubt(start: Start, tmp_path: Path) -> None:
    """A new file takes its block at once; where it cannot, discarding starts suspended."""
    libc, disk = ctypes.CDLL(None, use_errno=True), tmp_path / "disk"
    full_disk(disk, libc)
    try:
        device = start("--state", str(disk / "state"))
        (disk / "fill").write_bytes(b"x" * PAGE)
        assert discarding(device)
        assert device.ask(command="discard", enabled=False)["ok"]
        assert device.end() == 0
        device.start()
        assert not discarding(device)
        assert device.end() == 0
        (disk / "state").unlink()
        (disk / "more").write_bytes(b"x" * PAGE)
        device.start()
        assert not discarding(device), "no command can be saved"
        assert not device.ask(command="discard", enabled=True)["ok"]
        assert device.end() == 0
        # After a restart nobody knows what was commanded.
        (disk / "more").unlink()
        device.start()
        assert not discarding(device)
        assert device.ask(command="discard", enabled=True)["ok"]
        assert device.end() == 0
        device.start()
        assert discarding(device)
    finally:
        libc.umount2(bytes(disk), 2)


@pytest.mark.parametrize("before", ["no file", "on"])
def test_a_limit_of_file_sizes_leaves_no_command_in_doubt(
    start: Start, tmp_path: Path, before: str
) -> None:
    """The kernel sends SIGXFSZ; the daemon goes on, and the next one discards nothing."""
    state = tmp_path / "state"
    if before != "no file":
        state.write_text(json.dumps({"target": 0, "discard": True}))
    device = start("--state", str(state))
    resource.prlimit(device.process.pid, resource.RLIMIT_FSIZE, (0, 0))
    answer = device.ask(command="discard", enabled=False)
    assert not answer["ok"] and str(state) in answer["error"]
    assert not discarding(device), "it applies now"
    assert device.end() == 0
    device.start()
    assert not discarding(device)
    assert device.ask(command="target", bytes=MIB)["ok"]
    assert device.end() == 0
    device.start()
    assert not discarding(device), "another command was saved"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_state_file_that_is_no_file(binary: Path, tmp_path: Path, kind: str) -> None:
    state, other = tmp_path / "state", tmp_path / "other"
    os.mkfifo(state) if kind == "pipe" else state.symlink_to(other)
    argv: list[str | Path] = [binary, "--socket-path", tmp_path / "front", "--state", state]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=10, check=False)
    assert done.returncode == 1 and str(state) in done.stderr
    assert not other.exists()


STATE = b'{"target": 1, "discard": true}'


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"target": -1}', "-1"),
        (b"x", "x"),
        (b'{"target": 1}', "discard"),
        (b"\0", "\\x00"),
        (b"\xff", "\\xff"),
        (STATE + b" " * 128, "158 bytes"),
        (STATE + b" " * 8192 + b"x", "8223 bytes"),
        (b" " * 8192, "8192 bytes"),
    ],
    ids=["negative", "text", "half", "nul", "no text", "padded", "a tail", "blank"],
)
def test_d3_a_state_file_of_another_program(
    binary: Path, tmp_path: Path, content: bytes, named: str
) -> None:
    state = tmp_path / "state"
    state.write_bytes(content)
    done = subprocess.run(
        [binary, "--socket-path", tmp_path / "front", "--state", state],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert str(state) in done.stderr and "remove it" in done.stderr
    assert named in done.stderr, done.stderr
    assert state.read_bytes() == content


@pytest.mark.parametrize("command", ["none", "on", "off", "target"])
@pytest.mark.parametrize("before", ["no file", "on", "off"])
@pytest.mark.parametrize("option", ["on", "off"])
def test_v3_discard_off_is_never_overridden(
    start: Start, tmp_path: Path, option: str, before: str, command: str
) -> None:
    """By a state file; a command counts until the end, and in the file without the option.

    The file keeps what was commanded, and no option.
    """
    state = tmp_path / "state"
    if before != "no file":
        state.write_text(json.dumps({"target": MIB, "discard": before == "on"}))
    device = start("--state", str(state), "--discard", option)
    discards = option == "on" and before != "off"
    assert discarding(device) is discards
    kept = before != "off"
    if command == "target":
        device.ask(command="target", bytes=2 * MIB)
    elif command != "none":
        device.ask(command="discard", enabled=command == "on")
        discards = kept = command == "on"
    assert discarding(device) is discards
    for again in (option, "on"):
        assert device.end() == 0
        device.options = ("--state", str(state), "--discard", again, "--target", "3M")
        device.start()
        assert discarding(device) is (again == "on" and kept)
        target = 2 * MIB if command == "target" else 3 * MIB if before == "no file" else MIB
        assert device.ask(command="target")["target"] == target


def discarding(device: Device) -> bool:
    """Whether a report is discarded; False: the memory is as it was."""
    with FrontEnd(device) as vm:
        vm.start()
        vm.fill(PLAY, MIB)
        length = vm.ask(REPORTING, (PLAY, MIB, True))
        assert (length, vm.holds(PLAY, MIB)) in ((0, 0x5A), (MIB, 0))
        return length == MIB


# D4: descriptors


@pytest.mark.parametrize(
    "name", ["SET_MEM_TABLE", "SET_VRING_KICK", "SET_BACKEND_REQ_FD", "GET_FEATURES"]
)
def test_d4_a_file_of_a_server_that_is_silent(device: Device, silent: int, name: str) -> None:
    bodies = {
        "SET_MEM_TABLE": words(1, 0) + longs(0, RAM, USER, 0),
        "SET_VRING_KICK": longs(0),
        "SET_BACKEND_REQ_FD": b"",
        "GET_FEATURES": b"",
    }
    with FrontEnd(device) as peer:
        peer.negotiate()
        peer.send(name, bodies[name], [silent], 9)
        device.status()
        assert peer.hung_up(PROMISE)
    device.serves()


def test_d4_half_a_message_with_such_a_file(device: Device, silent: int) -> None:
    with FrontEnd(device) as peer:
        peer.raw(MESSAGE[:3], [silent])
        device.status()
    device.serves()


def test_d4_such_files_take_a_bounded_number_of_descriptors(device: Device, silent: int) -> None:
    for _ in range(40):
        with FrontEnd(device) as peer:
            with contextlib.suppress(OSError):
                peer.raw(MESSAGE, [silent] * 32)
            assert peer.hung_up(PROMISE)
    device.status()
    # Those that wait to be closed, and a connection each.
    assert len(os.listdir(f"/proc/{device.process.pid}/fd")) < 600


def test_a_tcp_connection_that_lingers(device: Device) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, FrontEnd(device) as peer:
        peer.negotiate()
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1000))
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(bytes(1 << 16))
        peer.send("SET_VRING_KICK", longs(0), [one.fileno()])
        # The last one who closes it waits.
        fd = one.detach()
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()
        time.sleep(0.05)
        device.status()
        other.close()


def block(event: int) -> None:
    """The front end shares the description: it fills it, and takes its O_NONBLOCK away."""
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)
    os.eventfd_write(event, 2**64 - 2)
    os.set_blocking(event, True)


@pytest.mark.parametrize("count", [1, 4])
def test_events_that_block_end_the_connection(start: Start, count: int) -> None:
    """Each of them could make the daemon wait: calls and errors of all rings at once."""
    device = start()
    slowest = 0.0
    with FrontEnd(device) as vm:
        vm.start()
        errors = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(count)]
        for ring, error in enumerate(errors):
            assert vm.accepted("SET_VRING_ERR", longs(ring), [error])
            vm.put(ring, (PLAY, 4, ring == REPORTING))
            # The next entry is none: after the call, an error.
            at = vm.bases[ring] + 0x1002
            vm.memory[at : at + 2] = struct.pack("<H", 2)
            vm.descriptor(ring, 1, 0, 0, 1, 60_000)
        for event in (*vm.calls[:count], *errors):
            block(event)
        for ring in range(count):
            vm.kick(ring)
        began = time.monotonic()
        while time.monotonic() - began < 2 * PROMISE:
            asked = device.clock()
            device.status()
            slowest = max(slowest, device.clock() - asked)
        assert slowest < PROMISE / 2, f"{slowest:.2f} s"
        assert vm.hung_up(PROMISE)
        for error in errors:
            os.close(error)
    assert "an event that it sent blocks" in device.log()
    device.serves()


def test_kicks_that_are_none(vm: FrontEnd) -> None:
    for name in ("SET_VRING_KICK", "SET_VRING_CALL", "SET_VRING_ERR"):
        for fd in (vm.fd, vm.socket.fileno()):
            assert not vm.accepted(name, longs(0), [fd])
        assert not vm.accepted(name, longs(0), [])
        assert not vm.accepted(name, longs(0), [vm.kicks[0]] * 2)
        assert not vm.accepted(name, longs(9), [vm.kicks[0]])
    assert vm.accepted("SET_VRING_KICK", longs(1 | 0x100))
    vm.works()


@pytest.mark.parametrize("name", ["SET_VRING_KICK", "SET_VRING_CALL", "SET_BACKEND_REQ_FD"])
def test_its_own_socket_as_an_event_harms_only_its_connection(device: Device, name: str) -> None:
    accepted = False
    with FrontEnd(device) as vm:
        vm.start()
        body = b"" if name == "SET_BACKEND_REQ_FD" else longs(0)
        with contextlib.suppress(OSError):
            accepted = vm.accepted(name, body, [vm.socket.fileno()])
    assert not accepted

    def next_one() -> bool:
        """The connection lasts until another thread has closed the copy of its socket."""
        with FrontEnd(device) as vm, contextlib.suppress(OSError):
            vm.start()
            vm.works()
            return True
        return False

    assert eventually(next_one)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/version"])
def test_a_descriptor_of_an_unknown_kind_ends_its_connection(device: Device, path: str) -> None:
    with FrontEnd(device) as peer, open(path) as file:
        peer.send("SET_VRING_KICK", longs(0), [file.fileno()])
        assert peer.hung_up(PROMISE)
        mode = f"0o{os.fstat(file.fileno()).st_mode:o}"
    assert eventually(lambda: mode in device.log())


def test_kicks_at_a_mhz(vm: FrontEnd) -> None:
    def guest() -> None:
        for ring in range(4):
            vm.kick(ring)

    with repeated(guest, 2):
        for _ in range(20):
            vm.device.status()
            vm.get("GET_FEATURES")
    vm.works()


def flags_of_guest_memory(vm: FrontEnd) -> list[str]:
    """Flags of each mapping of it in the daemon."""
    maps = Path(f"/proc/{vm.device.process.pid}/smaps").read_text()
    guest: list[str] = re.findall(r"memfd:guest.*\n(?:\w+:.*\n)*?VmFlags: (.*)", maps)
    assert guest
    return guest


def test_d7_no_guest_memory_in_a_core_dump(vm: FrontEnd) -> None:
    assert all("dd" in flags.split() for flags in flags_of_guest_memory(vm))


# D5: sockets


def test_d5_a_successors_socket_is_left(start: Start) -> None:
    one = start()
    with FrontEnd(one):
        for name in (one.front, one.control, one.folder / "metrics"):
            name.unlink()
        old = one.process
        one.start()
        old.send_signal(signal.SIGTERM)
        assert old.wait(PATIENCE) == 0
    one.serves()


def test_a_socket_in_use_is_left(start: Start, binary: Path) -> None:
    one = start()
    with FrontEnd(one) as vm:
        vm.start()
        done = subprocess.run(
            [binary, "--socket-path", one.front], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert f"cannot listen on {one.front}" in done.stderr and "another process" in done.stderr
        vm.works()
    one.serves()


# D8, D9: memory


def test_d8_a_file_that_the_guest_sees_twice(vm: FrontEnd) -> None:
    alias = 1 << 32
    assert vm.table((0, RAM, USER, 0), (alias, RAM, USER + alias, 0))
    for ring in range(4):
        vm.start_ring(ring)
    vm.fill(PLAY, MIB)
    ring = vm.bases[REPORTING]
    assert vm.ask(REPORTING, (alias + ring, 0x3000, True)) == 0
    assert vm.ask(REPORTING, (alias + PLAY, MIB, True), (PLAY, MIB, True)) == 0
    assert vm.pages(INFLATE, [(alias + ring) >> 12], 1) == 1
    assert vm.memory[ANSWER] == 0
    assert vm.holds(PLAY, MIB) == 0x5A
    assert vm.device.status()["skipped"]["aliased"] == 0x3000 + 2 * MIB + PAGE
    # Without it there is memory to be given back again.
    assert vm.accepted("REM_MEM_REG", longs(0, alias, RAM, USER + alias, 0), [])
    vm.works()


@pytest.mark.parametrize("overlap", [PAGE, RAM // 2])
def test_d8_two_regions_that_share_a_part(vm: FrontEnd, overlap: int) -> None:
    half = RAM // 2
    assert vm.table((0, half, USER, 0), (half, half, USER + half, half - overlap))
    for ring in range(4):
        vm.start_ring(ring)
    vm.fill(PLAY, MIB)
    assert vm.ask(REPORTING, (PLAY, MIB, True)) == 0
    assert vm.holds(PLAY, MIB) == 0x5A
    assert vm.table((0, RAM, USER, 0))
    for ring in range(4):
        vm.start_ring(ring)


def test_d9_a_pool_of_huge_pages_that_is_too_small(device: Device) -> None:
    # No other test changes the pool meanwhile.
    with hugepages.reserved(0) as free, FrontEnd(device) as peer:
        size = 2 * hugepages.HUGE
        try:
            huge = memfd(size, os.MFD_HUGETLB)
            rest = memfd(free * hugepages.HUGE, os.MFD_HUGETLB)
        except OSError as error:
            pytest.skip(f"no huge pages here: {error}")
        if free:
            os.posix_fallocate(rest, 0, free * hugepages.HUGE)
        peer.negotiate()
        assert peer.table((0, size, USER, 0), fds=[huge])
        peer.send(
            "SET_VRING_ADDR", words(0, 0) + longs(USER, USER + 0x2000, USER + 0x1000, 0), flags=9
        )
        assert peer.hung_up(PROMISE)
    os.close(huge)
    os.close(rest)
    assert eventually(lambda: "pool of huge pages" in device.log())
    assert "truncated" not in device.log()


def test_mappings_of_parts_of_huge_pages_do_not_pile_up(device: Device) -> None:
    """munmap(2) refuses a part of a huge page, so the mapping would stay for ever."""
    try:
        huge = memfd(4 * MIB, os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no huge pages here: {error}")
    with FrontEnd(device) as peer:
        peer.negotiate()
        for length in (PAGE, 2 * MIB, 3 * MIB) * 10:
            assert peer.table((0, length, USER, 0), fds=[huge]) is (length == 2 * MIB)
        assert Path(f"/proc/{device.process.pid}/maps").read_text().count("memfd:guest") <= 1
    os.close(huge)


@pytest.mark.parametrize("when", ["request", "kick"])
def test_guest_memory_that_is_truncated(device: Device, when: str) -> None:
    with FrontEnd(device) as peer:
        peer.start()
        peer.put(REPORTING, (PLAY, MIB, True))
        os.ftruncate(peer.fd, 0)
        if when == "kick":
            peer.kick(REPORTING)
        else:
            # The device may still start the rings, find the memory gone and hang up before this.
            with contextlib.suppress(BrokenPipeError):
                peer.send(
                    "SET_VRING_ADDR", words(0, 0) + longs(USER, USER + 0x2000, USER + 0x1000, 0)
                )
        assert peer.hung_up(PROMISE)
    assert eventually(lambda: "truncated by the front end" in device.log())


@pytest.mark.parametrize(
    "region",
    [
        (0, RAM + 1, USER, 0),
        (0, RAM, USER, PAGE),
        (0, PAGE, USER, 1),
        (1, PAGE, USER, 0),
        (0, 0, USER, 0),
        (2**64 - PAGE, 2 * PAGE, USER, 0),
        (0, PAGE, 2**64 - 1, 0),
        (0, PAGE, USER, 2**63),
        (0, 1 << 62, USER, 0),
    ],
)
def test_memory_that_is_none(vm: FrontEnd, region: tuple[int, int, int, int]) -> None:
    assert not vm.table(region)
    # The memory of the old table is not the guest's any more: it is left alone.
    assert vm.device.status()["regions"] == []
    vm.fill(PLAY, MIB)
    vm.put(REPORTING, (PLAY, MIB, True))
    vm.kick(REPORTING)
    vm.device.status()
    assert vm.holds(PLAY, MIB) == 0x5A


def test_an_address_of_the_front_end_that_wraps_is_named(vm: FrontEnd) -> None:
    assert not vm.table((0, PAGE, 2**64 - PAGE, 0))
    assert "at 0xfffffffffffff000 of the front end" in vm.device.log()
    assert "overlaps" not in vm.device.log()


def test_tables_that_overlap(vm: FrontEnd) -> None:
    half = RAM // 2
    for second in ((half - 1, half, USER + RAM, 0), (0, PAGE, USER + RAM, 0), (RAM, RAM, USER, 0)):
        assert not vm.table((0, half, USER, 0), second)
    assert not vm.table((0, RAM, USER, 0), fds=[vm.fd, vm.fd])
    assert not vm.table(
        *[(n * PAGE, PAGE, USER + n * PAGE, n * PAGE) for n in range(33)], fds=[vm.fd] * 32
    )
    assert vm.table((0, RAM, USER, 0))
    assert not vm.accepted("ADD_MEM_REG", longs(0, half, MIB, USER + half, 0), [vm.fd])
    assert not vm.accepted("REM_MEM_REG", longs(0, half, MIB, USER + half, 0), [])
    for ring in range(4):
        vm.start_ring(ring)


def test_memory_goes_while_rings_are_in_it(vm: FrontEnd) -> None:
    assert vm.accepted("REM_MEM_REG", longs(0, 0, RAM, USER, 0), [])
    for ring in range(4):
        vm.put(ring, (PLAY, PAGE, True))
        vm.kick(ring)
    assert eventually(lambda: vm.device.status()["queues"][3]["state"] == "broken")
    assert vm.table((0, RAM, USER, 0))
    for ring in range(4):
        vm.start_ring(ring)
    vm.works()


def test_nothing_outside_of_the_regions_changes(vm: FrontEnd) -> None:
    """A region in the middle of a file."""
    third = RAM // 4
    vm.fill(0, RAM)
    for at in vm.bases:
        vm.memory[at + third : at + third + 0x3000] = bytes(0x3000)
    guest = PLAY * 4
    assert vm.table((guest, third, USER, third))
    vm.bases = [base + third for base in vm.bases]
    for ring in range(4):
        vm.start_ring(ring, USER - third)
    for start, length in (
        (guest - PAGE, 2 * PAGE),
        (0, 2**32 - PAGE),
        (guest + third - PAGE, 2 * PAGE),
    ):
        vm.ask(REPORTING, (start, length, True))
    vm.memory[third + LIST : third + LIST + 4000] = words(
        *range((guest >> 12) - 500, (guest >> 12) + 500)
    )
    vm.ask(INFLATE, (guest + LIST, 4000, False))
    assert vm.holds(0, third) == 0x5A
    assert vm.holds(2 * third, RAM - 2 * third) == 0x5A
    # Of the list, the part that is in the region.
    assert vm.holds(third, PAGE) == 0


def test_v9_a_file_without_a_name_that_may_be_private_is_left(device: Device) -> None:
    """Other guests may have mapped it privately.

    The guest was seen to write to the first file only.
    """
    other = memfd(RAM)
    os.pwrite(other, b"\x5a" * MIB, PLAY)
    second = 1 << 32
    with FrontEnd(device) as vm:
        vm.negotiate()
        assert vm.table((0, RAM, USER, 0), (second, RAM, USER + second, 0), fds=[vm.fd, other])
        for ring in range(4):
            vm.start_ring(ring)
        vm.works()
        assert vm.ask(REPORTING, (second + PLAY, MIB, True)) == 0
        vm.pages(INFLATE, [(second + PLAY) >> 12], 1)
        assert os.pread(other, MIB, PLAY) == b"\x5a" * MIB
        assert "mapped privately" in str(device.status()["problems"])
    os.close(other)


# D10: control clients


def test_d10_idle_clients_do_not_block_others(device: Device) -> None:
    idle = [device.connect() for _ in range(64)]
    assert device.status()["ok"] is True
    for each in idle:
        each.close()


def test_control_clients_that_are_none(device: Device) -> None:
    grown = device.about("RssAnon")
    deaf, endless, half = device.connect(), device.connect(), device.connect()
    deaf.setblocking(False)
    with contextlib.suppress(BlockingIOError, ConnectionError):
        while True:
            deaf.send(b'{"command":"status"}\n' * 100)
    with contextlib.suppress(ConnectionError):
        for _ in range(100):
            endless.sendall(b"x" * 1000)
    with contextlib.suppress(ConnectionError):  # it is hung up, with an answer or without
        while endless.recv(4096):
            pass
    half.sendall(b'{"command":')
    for request in (
        b"\xff\xfe\n",
        b"[]\n",
        b'{"command":"quit"}\n',
        b'{"command":"target","bytes":-1}\n',
    ):
        with device.connect() as other:
            other.sendall(request)
            assert json.loads(other.recv(4096))["ok"] is False
    with device.connect() as several:
        several.sendall(b'{"command":"status"}\n' * 50)
        with several.makefile("rb") as answers:
            assert all(json.loads(answers.readline())["ok"] for _ in range(50))
    assert device.about("RssAnon") < grown + 2048
    for each in (deaf, endless, half):
        each.close()


def test_many_requests_at_once_delay_nobody(device: Device) -> None:
    """Answers that take long, since the guest's memory has many regions, to clients that read."""
    count, status = 250, b'{"command":"status"}\n'
    other = memfd(count * PAGE)

    def read(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while client.recv(1 << 20):
                pass

    with FrontEnd(device) as vm:
        vm.start()
        for n in range(count):
            place = longs(0, RAM + n * PAGE, PAGE, USER + RAM + n * PAGE, n * PAGE)
            assert vm.accepted("ADD_MEM_REG", place, [other])
        clients = [device.connect() for _ in range(14)]
        threads = [threading.Thread(target=read, args=(client,)) for client in clients]
        for thread, client in zip(threads, clients, strict=True):
            thread.start()
            client.sendall(status * (8000 // len(status)))
        for _ in range(10):
            began = device.clock()
            device.status()
            assert device.clock() - began < PROMISE / 4
        for thread, client in zip(threads, clients, strict=True):
            client.shutdown(socket.SHUT_RDWR)
            thread.join()
            client.close()
    os.close(other)


def test_a_client_that_sends_no_more_gets_all_answers(start: Start) -> None:
    """As socat and nc -N do: they close the direction of sending after the last request."""
    device = start("--stats-interval", "0")
    with FrontEnd(device) as vm, device.connect() as client, client.makefile("rb") as answers:
        vm.start()
        vm.put(STATS, (PLAY, 10, False))
        vm.kick(STATS)
        client.sendall(b'{"command":"stats"}\n{"command":"target"}\n{"comm')
        client.shutdown(socket.SHUT_WR)
        assert vm.used(STATS) == 0
        assert device.sleeps()
        vm.put(STATS, (PLAY, 10, False))
        vm.kick(STATS)
        lines = [json.loads(line) for line in answers.read().splitlines()]
        assert [line["ok"] for line in lines] == [True, True]
        assert "stats" in lines[0] and lines[1]["target"] == 0


@pytest.mark.parametrize("which", ["control", "metrics"])
def test_clients_that_send_no_more_and_ask_nothing_are_closed(device: Device, which: str) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n", b'{"command"'):
        if which == "metrics" or b"\n" not in data:
            with device.connect(device.folder / which) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(1) == b""


def test_a_scraper_that_never_reads(device: Device) -> None:
    path = device.folder / "metrics"
    slow = [device.connect(path) for _ in range(40)]
    for each in slow:
        with contextlib.suppress(ConnectionError):
            each.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    with device.connect(path) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert scraper.recv(20).startswith(b"HTTP/1.0 200")
    device.serves()
    for each in slow:
        each.close()


# D11, D12: the balloon


def test_d11_what_was_kept_goes_when_discarding_goes_on(vm: FrontEnd) -> None:
    device = vm.device
    device.ask(command="discard", enabled=False)
    vm.fill(PLAY, 4 * MIB)
    first = PLAY >> 12
    for at in range(first, first + 1024, 256):
        vm.pages(INFLATE, range(at, at + 256))
    vm.pages(DEFLATE, range(first, first + 256))
    assert vm.holds(PLAY, 4 * MIB) == 0x5A
    before = device.status()["discarded"]
    device.ask(command="discard", enabled=True)
    assert eventually(lambda: device.status()["discarded"] == before + 3 * MIB)
    assert vm.holds(PLAY, MIB) == 0x5A, "the guest has it again"
    assert vm.holds(PLAY + MIB, 3 * MIB) == 0
    device.ask(command="discard", enabled=False)
    device.ask(command="discard", enabled=True)
    device.status()
    assert device.status()["discarded"] == before + 3 * MIB, "once"


@pytest.mark.parametrize("name", ["ADD_MEM_REG", "REM_MEM_REG"])
def test_d11_a_refused_change_of_memory_forgets_nothing(vm: FrontEnd, name: str) -> None:
    device = vm.device
    device.ask(command="discard", enabled=False)
    vm.fill(PLAY, MIB)
    vm.pages(INFLATE, range(PLAY >> 12, (PLAY + MIB) >> 12))
    # It overlaps the memory of the guest, and is no region that was added.
    region = struct.pack("=5Q", 0, RAM - MIB, 2 * MIB, USER + RAM - MIB, 0)
    assert not vm.accepted(name, region, [vm.fd] if name == "ADD_MEM_REG" else [])
    before = device.status()["discarded"]
    device.ask(command="discard", enabled=True)
    assert eventually(lambda: device.status()["discarded"] == before + MIB)
    assert vm.holds(PLAY, MIB) == 0


@pytest.mark.parametrize("options", [(), ("--discard-unit", "2M"), ("--discard", "off")])
def test_d12_16_gib_in_the_balloon(start: Start, options: Sequence[str]) -> None:
    size = 16 << 30
    device = start(*options)
    with FrontEnd(device, size) as vm:
        vm.start()
        before = device.about("RssAnon")
        # As far from each other as can be: each host page is touched by the first list.
        frames = [at + n * 512 for at in range(512) for n in range(size >> 21)]
        for at in range(0, len(frames), 4096 * 16):
            for n in range(16):
                part = frames[at + n * 4096 : at + (n + 1) * 4096]
                vm.memory[PLAY + n * 0x4000 : PLAY + (n + 1) * 0x4000] = words(*part)
                vm.put(INFLATE, (PLAY + n * 0x4000, 0x4000, False))
            vm.kick(INFLATE)
            last = vm.next[INFLATE]
            assert eventually(lambda last=last: vm.used_index(INFLATE) == last)
            vm.seen[INFLATE] = last
        # As docs/explanation/trust.md says, in KiB.
        grown = device.about("RssAnon") - before
        assert grown < 2 * (size // 16 // MIB) * 640 // 1024 + 1024, f"{grown} KiB"
        print(f"{grown} KiB for 16 GiB, options {options}")


@pytest.mark.parametrize("options", [("--discard", "off"), ("--discard-unit", "2M")])
def test_16_tib_that_a_front_end_only_names(start: Start, options: Sequence[str]) -> None:
    """A page of each 16 MiB comes into the balloon; none of that memory exists."""
    size, device = 16 << 40, start(*options)
    fd = memfd(size)
    with FrontEnd(device) as vm:
        vm.start()
        assert vm.table((0, RAM, USER, 0), (RAM, size - RAM, 2 * USER, 0), fds=[vm.fd, fd])
        before = device.about("VmRSS")
        for first in range(4, size >> 24, 4096):
            pages = range(first, min(first + 4096, size >> 24))
            vm.memory[PLAY : PLAY + 4 * len(pages)] = words(*(page << 12 for page in pages))
            vm.ask(INFLATE, (PLAY, 4 * len(pages), False))
        # As docs/explanation/trust.md says, in KiB.
        assert device.about("VmRSS") - before < 2 * (1 << 20) * 80 // 1024 + 8192
        assert vm.blocks() < RAM
    began = device.clock()
    device.status()
    assert device.clock() - began < PROMISE
    assert eventually(lambda: device.about("VmRSS") - before < 8192), (
        "it returns with the front end"
    )
    os.close(fd)


def test_frames_without_memory_cost_none(start: Start) -> None:
    """Lists of page frames outside of guest memory cost the daemon no memory."""
    device = start("--discard", "off")
    with FrontEnd(device) as vm:
        vm.start()
        before = device.about("RssAnon")
        for first in range(0, 64 * 4096, 4096):
            vm.pages(INFLATE, [0x10_0000 + (first + n) * 4096 for n in range(4096)])
        assert device.about("RssAnon") - before < 4096


def test_what_is_no_memory_does_not_count(vm: FrontEnd) -> None:
    before = vm.device.status()
    assert vm.ask(REPORTING, (2 * RAM, PAGE, True)) == 0
    vm.pages(INFLATE, [2 * RAM >> 12, PLAY >> 12])
    after = vm.device.status()
    assert after["reported"] == before["reported"]
    assert after["inflated"] == before["inflated"] + PAGE


# D13 and time


@pytest.mark.parametrize("which", ["control", "front", "metrics"])
def test_d13_no_descriptor_left(start: Start, which: str) -> None:
    device = start()
    descriptors = Path(f"/proc/{device.process.pid}/fd")
    time.sleep(0.2)  # the connection of start() has gone
    left = len(os.listdir(descriptors))
    usual = resource.prlimit(device.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(device.process.pid, resource.RLIMIT_NOFILE, (left, usual[1]))
    crowd = [device.connect(device.folder / which) for _ in range(10)]
    time.sleep(0.2)
    assert device.sleeps()
    for each in crowd:
        each.close()
    resource.prlimit(device.process.pid, resource.RLIMIT_NOFILE, usual)
    assert eventually(device.answers)


@contextlib.contextmanager
def long_report(device: Device) -> Iterator[FrontEnd]:
    """A guest of 3 GiB that has just reported all but its first 16 MiB."""
    with FrontEnd(device, 3 << 30) as vm:
        vm.start()
        os.posix_fallocate(vm.fd, 0, vm.size)
        vm.put(REPORTING, (16 * MIB, vm.size - 16 * MIB, True))
        vm.kick(REPORTING)
        yield vm


def test_a_chain_of_many_gib_is_done_in_steps(device: Device) -> None:
    """One system call for all of it would stop the others for as long as it takes."""
    with long_report(device) as vm:
        slowest, began = 0.0, time.monotonic()
        while vm.used_index(REPORTING) == 0:
            asked = device.clock()
            device.status()
            slowest = max(slowest, device.clock() - asked)
            assert time.monotonic() - began < 120
        assert vm.used(REPORTING) == vm.size - 16 * MIB
        assert vm.blocks() < 32 * MIB
        calls = re.search(r"discard_seconds_count (\d+)", device.metrics())
        assert calls and int(calls[1]) >= vm.size // (32 * MIB) - 1
        assert slowest < PROMISE / 2


def test_a_chain_of_4_tib(vm: FrontEnd) -> None:
    vm.put(REPORTING, *[(0, 2**32 - PAGE, True)] * 100)
    vm.kick(REPORTING)
    vm.device.status()
    assert vm.used(REPORTING) == 0
    vm.works()


def test_a_report_that_is_interrupted_is_done_again(device: Device) -> None:
    """The ring stops in the middle of it; what was not returned counts as not taken."""
    with long_report(device) as vm:
        assert eventually(lambda: vm.blocks() < vm.size)
        index = vm.stop_ring(REPORTING)
        assert index == vm.used_index(REPORTING)
        if index:
            raise OutOfLuck("the report ended before its ring was stopped")
        assert vm.accepted("SET_VRING_BASE", struct.pack("=II", REPORTING, index))
        assert vm.accepted("SET_VRING_KICK", struct.pack("=Q", REPORTING), [vm.kicks[REPORTING]])
        vm.kick(REPORTING)
        assert vm.used(REPORTING) == vm.size - 16 * MIB
        assert vm.blocks() < 32 * MIB


def test_a_report_over_which_a_ring_moves_is_no_claim(device: Device) -> None:
    """A page that was discarded, and is a part of a ring before the answer is written."""
    with long_report(device) as vm:
        assert eventually(lambda: vm.blocks() < vm.size - 64 * MIB)
        vm.bases[DEFLATE] = 32 * MIB
        vm.start_ring(DEFLATE)
        if vm.used_index(REPORTING):
            raise OutOfLuck("the report ended before the ring was moved")
        assert vm.used(REPORTING) == 0


@pytest.mark.parametrize("request_", ["SET_MEM_TABLE", "REM_MEM_REG"])
def test_a_report_of_memory_that_is_replaced_ends(start: Start, request_: str) -> None:
    """Another file at the reported addresses keeps its data: the guest reported nothing of it."""
    device, at, part = start("--memory-is-shared"), 4 << 30, (4 << 30) - MIB
    size = part * (ENTRIES - 1)
    old, new = memfd(size), memfd(size)
    os.pwrite(old, b"\x5a" * MIB, 0)
    for file in (old, new):
        os.pwrite(file, b"\x5a" * 16 * MIB, size - 16 * MIB)
    own, other = (0, RAM, USER, 0), (at, size, 2 * USER, 0)
    with FrontEnd(device) as vm:
        vm.start()
        assert vm.table(own, other, fds=[vm.fd, old])
        vm.put(REPORTING, *[(at + n * part, part, True) for n in range(ENTRIES - 1)])
        vm.kick(REPORTING)
        assert eventually(lambda: os.fstat(old).st_blocks * 512 < 17 * MIB)
        if request_ == "SET_MEM_TABLE":
            assert vm.table(own, other, fds=[vm.fd, new])
        else:
            assert vm.accepted("REM_MEM_REG", longs(0, *other), [])
            assert vm.accepted("ADD_MEM_REG", longs(0, *other), [new])
        length = vm.used(REPORTING)
        if "request_ended" not in device.status()["skipped"]:
            raise OutOfLuck("the report ended before its memory was replaced")
        assert length == 0
        assert os.fstat(new).st_blocks * 512 == 16 * MIB
    os.close(old)
    os.close(new)


@pytest.mark.parametrize("after", [64 * MIB, 512 * MIB, 1 << 30], ids=["64M", "512M", "1G"])
@pytest.mark.parametrize("writer", ["inflate answer", "inflate ring", "deflate ring"])
def test_v4_a_report_into_which_the_device_writes_is_no_claim(
    device: Device, writer: str, after: int
) -> None:
    """Memory that one turn of the report discards, and the device writes before the last turn.

    A ring moves there and away again.
    """
    place, ring = 32 * MIB, DEFLATE if writer == "deflate ring" else INFLATE
    with long_report(device) as vm:
        assert eventually(lambda: vm.blocks() < vm.size - after)
        if writer == "inflate answer":
            vm.memory[LIST : LIST + 4] = words(PLAY >> 12)
            assert vm.ask(INFLATE, (LIST, 4, False), (place, 1, True)) == 1
        else:
            home, vm.bases[ring] = vm.bases[ring], place
            vm.start_ring(ring)
            vm.pages(ring, [PLAY >> 12])
            vm.stop_ring(ring)
            vm.bases[ring] = home
            vm.start_ring(ring)
        if vm.used_index(REPORTING):
            raise OutOfLuck("the report ended before the device wrote into it")
        assert vm.used(REPORTING) == 0
        assert vm.holds(place, 0x3000) != 0, "the device has written"


def test_a_guest_that_refills_its_ring(vm: FrontEnd) -> None:
    with refilled(vm):
        for _ in range(10):
            began = vm.device.clock()
            vm.get("GET_FEATURES")
            vm.device.status()
            assert vm.device.clock() - began < PROMISE
        before = vm.used_index(INFLATE)
        assert eventually(lambda: vm.used_index(INFLATE) != before)
        vm.stop_ring(INFLATE)


# the log


def test_connections_do_not_fill_the_log(device: Device) -> None:
    began = time.monotonic()
    for _ in range(2000):
        device.connect(device.front).close()
    device.serves()
    # Some at once, and one a second.
    assert device.log().count("\n") < 50 + time.monotonic() - began


# subcommands


@contextlib.contextmanager
def flushing(vm: FrontEnd) -> Iterator[subprocess.Popen[str]]:
    """A flush of a guest that answers with its statistics, and never inflates."""
    device = vm.device
    argv: list[str | Path] = [device.binary, "flush", "--control", device.control]
    before = device.ask(command="target")["target"]
    vm.memory[PLAY : PLAY + 10] = struct.pack("<HQ", FREE_MEMORY, 96 * MIB)
    vm.put(STATS, (PLAY, 10, False))
    vm.kick(STATS)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as flush:
        try:
            assert vm.used(STATS) == 0
            vm.put(STATS, (PLAY, 10, False))
            vm.kick(STATS)
            assert eventually(lambda: device.ask(command="target")["target"] > before)
            yield flush
        finally:
            flush.kill()


@pytest.fixture
def flushed(start: Start, tmp_path: Path) -> Iterator[FrontEnd]:
    """A guest whose target of 4 MiB is in a state file."""
    state = tmp_path / "state"
    state.write_text(json.dumps({"target": 4 * MIB, "discard": True}))
    with FrontEnd(start("--stats-interval", "0", "--state", str(state))) as vm:
        vm.start()
        yield vm


def saved(vm: FrontEnd) -> int:
    """The target in the state file, after another command was saved."""
    assert vm.device.ask(command="discard", enabled=True)["ok"]
    target: int = json.loads(Path(vm.device.options[-1]).read_text())["target"]
    return target


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_flush_that_is_interrupted_returns_the_memory(flushed: FrontEnd, number: int) -> None:
    with flushing(flushed) as flush:
        assert saved(flushed) == 4 * MIB
        flush.send_signal(number)
        assert flush.wait(PATIENCE) == -number
    assert flushed.device.ask(command="target")["target"] == saved(flushed) == 4 * MIB


def test_the_target_of_a_flush_ends_with_the_daemon(flushed: FrontEnd) -> None:
    device = flushed.device
    with flushing(flushed):
        assert device.ask(command="discard", enabled=True)["ok"]
        device.end(signal.SIGKILL)
    device.start()
    assert device.ask(command="target")["target"] == 4 * MIB


def test_a_flush_is_the_only_one(flushed: FrontEnd) -> None:
    device = flushed.device
    with flushing(flushed) as flush:
        wanted = device.ask(command="target")["target"]
        for request in ({"bytes": 8 * MIB}, {}):
            answer = device.ask(command="flush", **request)
            assert not answer["ok"] and "another client's flush runs" in answer["error"]
        assert device.ask(command="target")["target"] == wanted
        flush.kill()
        assert flush.wait(PATIENCE) == -signal.SIGKILL
    assert device.ask(command="target")["target"] == saved(flushed) == 4 * MIB
    # Each of these requests has a connection of its own.
    assert device.ask(command="flush", bytes=8 * MIB)["target"] == 8 * MIB
    assert device.ask(command="target")["target"] == 4 * MIB


def test_a_new_target_ends_a_flush(flushed: FrontEnd) -> None:
    device = flushed.device
    with flushing(flushed) as flush:
        assert device.ask(command="target", bytes=2 * MIB)["target"] == 2 * MIB
        _, error = flush.communicate(timeout=PATIENCE)
        assert flush.returncode == 1 and f"became {2 * MIB} bytes" in error, error
    assert device.ask(command="target")["target"] == saved(flushed) == 2 * MIB


def balloon(vm: FrontEnd, pages: int) -> None:
    """What a driver writes into its configuration space: the size of its balloon."""
    assert vm.accepted("SET_CONFIG", words(4, 4, 0) + words(pages))


@pytest.mark.parametrize("page", [4, 16, 64])
def test_b1_a_target_that_is_no_whole_page_of_the_guest(device: Device, page: int) -> None:
    """The driver rounds up to its own pages, and is done then."""
    target = 20_484 << 10
    argv: list[str | Path] = [
        device.binary,
        "target",
        str(target),
        "--wait",
        "60",
        "--control",
        device.control,
    ]
    with FrontEnd(device) as vm:
        vm.start()
        with subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as waits:
            assert eventually(lambda: device.ask(command="target")["target"] == target)
            balloon(vm, target // PAGE - 16)
            time.sleep(0.3)
            assert waits.poll() is None, "not yet"
            balloon(vm, -(-target // (page << 10)) * (page << 10) // PAGE)
            assert waits.wait(PATIENCE) == 0, waits.communicate()
    device.ask(command="target", bytes=0)


def test_b2_a_flush_counts_memory_once(start: Start) -> None:
    """What the guest inflates, and reports after it has deflated, was taken from the host once."""
    device = start("--stats-interval", "0")
    argv: list[str | Path] = [
        device.binary,
        "flush",
        "--json",
        "--leave",
        "0",
        "--control",
        device.control,
    ]
    with FrontEnd(device) as vm:
        vm.start()
        first, size = PLAY >> 12, 16 * MIB
        vm.fill(PLAY, size)
        tell = (PLAY - PAGE, 10, False)
        vm.memory[PLAY - PAGE : PLAY - PAGE + 10] = struct.pack("<HQ", FREE_MEMORY, size)
        vm.put(STATS, tell)
        vm.kick(STATS)
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as flush:
            assert vm.used(STATS) == 0
            vm.put(STATS, tell)
            vm.kick(STATS)
            assert eventually(lambda: device.ask(command="target")["target"] == size)
            for _ in range(2):
                for at in range(first, first + size // PAGE, 256):
                    vm.pages(INFLATE, range(at, at + 256))
            balloon(vm, size // PAGE)
            assert eventually(lambda: device.ask(command="target")["target"] == 0)
            assert vm.ask(REPORTING, (PLAY, size, True)) == size
            balloon(vm, 0)
            output, _ = flush.communicate(timeout=PATIENCE)
        assert flush.returncode == 0
        assert size - MIB <= json.loads(output)["discarded"] <= size


# chains


@pytest.mark.parametrize(
    "links",
    [[(0, 0)], [(0, 1), (1, 0)], [(0, 127), (127, 5), (5, 0)], [(0, 60_000)]],
    ids=["itself", "two", "three", "nowhere"],
)
@pytest.mark.parametrize("ring", [INFLATE, DEFLATE, REPORTING])
def test_chains_that_loop(vm: FrontEnd, links: list[tuple[int, int]], ring: int) -> None:
    vm.fill(PLAY, MIB)
    for slot, following in links:
        vm.descriptor(ring, slot, PLAY, PAGE, 1 | (2 if ring == REPORTING else 0), following)
    vm.offer(ring, 0)
    vm.kick(ring)
    assert vm.used(ring) == 0
    assert vm.holds(PLAY, MIB) == 0x5A


def test_indirect_tables_that_loop(vm: FrontEnd) -> None:
    vm.fill(2 * PLAY, MIB)
    vm.memory[PLAY : PLAY + 32] = struct.pack("<QIHHQIHH", PLAY, 32, 5, 1, 2 * PLAY, PAGE, 3, 0)
    for flags in (4, 5, 6, 7):
        vm.descriptor(REPORTING, 0, PLAY, 32, flags, 0)
        vm.offer(REPORTING, 0)
        vm.kick(REPORTING)
        assert vm.used(REPORTING) == 0
    assert vm.holds(2 * PLAY, MIB) == 0x5A


@pytest.mark.parametrize(
    ("address", "length"),
    [
        (2**64 - 1, 2**32 - 1),
        (2**64 - PAGE, PAGE),
        (0, 2**32 - 1),
        (RAM - PAGE, 2**32 - PAGE),
        (1 << 63, 1 << 31),
        (PLAY, 0),
    ],
)
def test_addresses_and_lengths_that_overflow(vm: FrontEnd, address: int, length: int) -> None:
    for writable in (True, False):
        for ring in (INFLATE, DEFLATE, REPORTING):
            if address or ring != REPORTING:
                assert vm.ask(ring, (address, length, writable)) == 0
        vm.put(STATS, (address, length, writable))
        vm.kick(STATS)
    assert vm.ask(INFLATE, (LIST, 2**32 - 1, False), (LIST, 2**32 - 1, False)) == 0


def test_an_available_index_from_nowhere(vm: FrontEnd) -> None:
    at = vm.bases[INFLATE] + 0x1002
    vm.memory[at : at + 2] = struct.pack("<H", 40_000)
    for _ in range(2000):
        vm.kick(INFLATE)
    assert eventually(lambda: vm.device.status()["queues"][0]["state"] == "broken")
    assert vm.device.status()["malformed"] == 1
    vm.works()
    vm.stop_ring(INFLATE)
    vm.start_ring(INFLATE)
    assert vm.pages(INFLATE, [PLAY >> 12], 1) == 1
    assert len(vm.device.log()) < 10_000


def test_rings_are_not_punched(vm: FrontEnd) -> None:
    for base in vm.bases[:4]:
        for at in range(base, base + 0x3000, PAGE):
            assert vm.ask(REPORTING, (at, PAGE, True)) == 0
            assert vm.pages(INFLATE, [at >> 12], 1) == 1
            assert vm.memory[ANSWER] == 0
    vm.fill(PLAY, MIB)
    assert vm.ask(REPORTING, (0, RAM, True)) == 0


def test_rings_that_move(vm: FrontEnd) -> None:
    """Over pages that were just called zero, and back, while they are used."""
    for n in range(50):
        base = PLAY + n * 0x4000
        vm.fill(base, 0x4000)
        assert vm.ask(REPORTING, (base, 0x4000, True)) == 0x4000
        old, vm.bases[REPORTING] = vm.bases[REPORTING], base
        vm.start_ring(REPORTING)
        assert vm.ask(REPORTING, (base, 0x4000, True)) == 0
        vm.bases[REPORTING] = old
        vm.start_ring(REPORTING)


def test_rings_that_are_none(vm: FrontEnd) -> None:
    assert vm.stop_ring(INFLATE) == 0
    for ring, size in ((0, 0), (0, 3), (0, 2048), (0, 65_536), (0, -1), (5, 128), (-1, 128)):
        assert not vm.accepted("SET_VRING_NUM", words(ring, size)), (ring, size)
    for ring, base in ((0, 65_536), (9, 0)):
        assert not vm.accepted("SET_VRING_BASE", words(ring, base))
    for ring, value in ((7, 1), (0, 2)):
        assert not vm.accepted("SET_VRING_ENABLE", words(ring, value))
    for places in (
        (0, 0, 0),
        (USER + RAM, USER, USER),
        (USER, USER + RAM, USER),
        (2**64 - 16, USER, USER),
    ):
        assert not vm.accepted("SET_VRING_ADDR", words(0, 0) + longs(*places, 0)), places
    assert vm.accepted(
        "SET_VRING_ADDR", words(0, 0) + longs(USER + RAM - 16, USER + LIST, USER + RAM - 64, 0)
    )
    vm.kick(INFLATE)
    vm.works()


def test_lists_of_any_length(vm: FrontEnd) -> None:
    vm.memory[32 * MIB : 36 * MIB] = words(PLAY >> 12) * MIB
    vm.fill(PLAY, PAGE)
    for length in (4 * MIB, 0x4004, 1, 2, 3, 5, 1023):
        assert vm.ask(INFLATE, (32 * MIB, length, False)) == 0
        assert vm.holds(PLAY, PAGE) == 0x5A, length
    vm.put(INFLATE, (32 * MIB, 2, False), (32 * MIB + 2, 2, False))
    vm.kick(INFLATE)
    vm.used(INFLATE)
    assert vm.holds(PLAY, PAGE) == 0


def test_parts_in_the_wrong_order(vm: FrontEnd) -> None:
    vm.memory[LIST : LIST + 4] = words(PLAY >> 12)
    vm.memory[ANSWER] = 0xFF
    vm.fill(PLAY, PAGE)
    assert vm.ask(INFLATE, (ANSWER, 1, True), (LIST, 4, False)) == 0
    assert vm.memory[ANSWER] == 0xFF
    assert vm.holds(PLAY, PAGE) == 0x5A
    assert vm.ask(INFLATE, (LIST, 4, False), (4 * RAM, 8, True)) == 0


def test_statistics_without_end(vm: FrontEnd) -> None:
    vm.put(STATS, (2 * RAM, 5, False), (PLAY, 32 * MIB, False))
    vm.kick(STATS)
    assert vm.used(STATS) == 0
    for _ in range(200):
        vm.put(STATS, (PLAY, 32 * MIB, False))
        vm.kick(STATS)
        vm.device.status()
    assert vm.device.status()["ok"]


def test_statistics_are_asked_for_when_they_are_due(start: Start) -> None:
    with FrontEnd(start("--stats-interval", "3600")) as vm:
        vm.start()
        assert vm.ask(STATS, (PLAY, 10, False)) == 0, "at once, for the first time"
        vm.put(STATS, (PLAY, 10, False))
        vm.kick(STATS)
        vm.works()
        assert vm.used_index(STATS) == vm.seen[STATS]


def test_statistics_are_the_answer_to_the_question(start: Start) -> None:
    # The client alone asks; by default, the daemon asks as well.
    device = start("--stats-interval", "0")

    def told(vm: FrontEnd, number: int) -> None:
        vm.memory[PLAY : PLAY + 10] = struct.pack("<HQ", TOTAL_MEMORY, number)
        vm.put(STATS, (PLAY, 10, False))
        vm.kick(STATS)

    with FrontEnd(device) as vm, device.connect() as client, client.makefile("rb") as answers:
        vm.start()
        told(vm, 1)
        client.settimeout(10)
        for number in (2, 3):
            client.sendall(b'{"command":"stats"}\n')
            assert vm.used(STATS) == 0
            told(vm, number)
            assert json.loads(answers.readline())["stats"] == {"total_memory": number}
        asked, began = time.monotonic(), device.clock()
        client.sendall(b'{"command":"stats"}\n')
        assert json.loads(answers.readline())["ok"] is False
        assert time.monotonic() - asked > 4.5
        assert device.clock() - began < 7


@pytest.mark.parametrize("extended", [True, False])
def test_a_ring_is_enabled_by_its_start_without_extensions(vm: FrontEnd, extended: bool) -> None:
    """With the protocol's extensions, a request of its own enables it."""
    ring, before = longs(REPORTING), vm.used_index(REPORTING)
    assert vm.accepted("SET_VRING_ENABLE", words(REPORTING, 0))
    assert vm.accepted("SET_FEATURES", longs(ALL | EXTENDED if extended else ALL | 1 << 32))
    assert vm.accepted("SET_VRING_KICK", ring, [vm.kicks[REPORTING]])
    vm.put(REPORTING, (PLAY, MIB, True))
    vm.kick(REPORTING)
    if extended:
        vm.device.status()
        time.sleep(0.1)
        assert vm.used_index(REPORTING) == before
        assert vm.accepted("SET_VRING_ENABLE", words(REPORTING, 1))
    assert vm.used(REPORTING) == MIB


def test_features_that_were_not_offered(vm: FrontEnd) -> None:
    for bits in (1 << 3, 1 << 8, 1 << 28, 1 << 29, 1 << 34, 2**64 - 1):
        assert not vm.accepted("SET_FEATURES", longs(bits))
    vm.works()


def test_configuration_out_of_bounds(vm: FrontEnd) -> None:
    # As much as a message may have.
    assert len(vm.get("GET_CONFIG", words(0, 4084, 0))) == 4096
    assert not vm.accepted("SET_CONFIG", words(0, 4084, 0) + bytes(4084))
    for offset, data in ((4090, bytes(4)), (22, bytes(4)), (4, bytes(3)), (2**32 - 4, bytes(8))):
        assert not vm.accepted("SET_CONFIG", words(offset, len(data), 0) + data)
    assert not vm.accepted("SET_CONFIG", words(0, 2**32 - 1, 0) + bytes(4))
    assert vm.get("GET_CONFIG", words(12, 200, 0) + bytes(200))[16:] == bytes(196)
    assert vm.get("GET_CONFIG", words(2**32 - 1, 16, 0) + bytes(16))[12:] == bytes(16)


def test_channels_that_are_none(vm: FrontEnd) -> None:
    reader, writer = os.pipe()
    one, two = socket.socketpair()
    datagrams = socket.socketpair(type=socket.SOCK_DGRAM)
    for fds in ([], [reader], [one.fileno(), two.fileno()], [datagrams[0].fileno()], [vm.fd]):
        assert not vm.accepted("SET_BACKEND_REQ_FD", b"", fds)
    assert vm.accepted("SET_BACKEND_REQ_FD", b"", [one.fileno()])
    one.setblocking(True)
    # Nobody reads it: it fills up, and nothing waits for it.
    for n in range(400):
        vm.device.ask(command="target", bytes=n % 9 * PAGE)
    for each in (one, two, *datagrams):
        each.close()
    vm.device.ask(command="target", bytes=PAGE)
    os.close(reader)
    os.close(writer)
    vm.works()


def test_rings_full_of_noise(vm: FrontEnd) -> None:
    chance = random.Random(1)
    for _ in range(150):
        for ring in range(4):
            base = vm.bases[ring]
            table = b"".join(
                struct.pack(
                    "<QIHH",
                    chance.randrange(RAM * 2),
                    chance.randrange(0x20_0000),
                    chance.randrange(8),
                    chance.randrange(130),
                )
                for _ in range(128)
            )
            heads = struct.pack("<128H", *(chance.randrange(130) for _ in range(128)))
            vm.memory[base : base + len(table)] = table
            vm.memory[base + 0x1004 : base + 0x1004 + 256] = heads
            index = vm.used_index(ring) + chance.randrange(129) & 0xFFFF
            vm.memory[base + 0x1002 : base + 0x1004] = struct.pack("<H", index)
            vm.kick(ring)
        if "broken" in str(vm.device.status()["queues"]):
            for ring in range(4):
                vm.stop_ring(ring)
                vm.start_ring(ring)
    for ring in range(4):
        vm.stop_ring(ring)
        vm.start_ring(ring)
    vm.works()


# the end


@pytest.mark.parametrize(
    "state", ["idle", "half a message", "started", "busy", "unread", "memory lost"]
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_each_state(start: Start, state: str, number: int) -> None:
    device = start()
    with FrontEnd(device) as peer:
        if state == "half a message":
            peer.raw(MESSAGE[:9])
        elif state == "unread":
            peer.socket.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    peer.raw(words(1, 1, 0) * 100)
        elif state != "idle":
            peer.start()
        if state == "busy":
            peer.put(REPORTING, *[(0, 2**32 - PAGE, True)] * 100)
            peer.kick(REPORTING)
        if state == "memory lost":
            os.ftruncate(peer.fd, 0)
            peer.kick(REPORTING)
        assert device.end(number) == 0


def test_features_of_the_default(start: Start) -> None:
    """Nothing above was turned on for the tests alone: bit 7 is all that they add."""
    device = start()
    with FrontEnd(device) as peer:
        assert peer.get("GET_FEATURES") == longs(ALL | 1 << 16 | EXTENDED)
    assert "seccomp, " in device.status()["sandbox"]
