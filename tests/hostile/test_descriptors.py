# SPDX-License-Identifier: GPL-2.0
"""Descriptors of a peer, against the release build.

The daemon goes on when it receives, examines or closes one. Each attack on a close has an effect:
one thread of the daemon waits in the kernel until the test is over, and another thread serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hostile.conftest import Start
from tests.hostile.fuse import Server
from tests.hostile.peer import (
    ALL,
    EXTENDED,
    INFLATE,
    MIB,
    PAGE,
    PATIENCE,
    PLAY,
    PROMISE,
    REPORTING,
    USER,
    Device,
    FrontEnd,
    eventually,
    longs,
    memfd,
    words,
)

pytestmark = [pytest.mark.slow]
HEADER = words(1, 1, 0)  # GET_FEATURES
USERFAULTFD = {"x86_64": 323}.get(os.uname().machine, 282)
STATUS = b'{"command":"status"}\n'


def rights(*fds: int) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"={len(fds)}i", *fds))]


def threads(device: Device) -> dict[str, str]:
    """The states of the threads of each name."""
    found: dict[str, str] = {}
    for stat in Path(f"/proc/{device.process.pid}/task").glob("*/stat"):
        name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        found[name] = found.get(name, "") + rest.split()[0]
    return found


def some_thread_waits(device: Device) -> bool:
    return any("D" in state for name, state in threads(device).items() if name.startswith("close-"))


def still_serves(device: Device) -> None:
    """An operator and a VM get their answers while a thread hangs."""
    began = device.clock()
    device.status()
    assert device.clock() - began < PROMISE, device.log()
    device.metrics()
    device.serves()


# V1: descriptors in flight


def to_service(
    name: str, count: int, flags: int = 0
) -> Callable[[Device, list[int]], socket.socket]:
    def send(device: Device, fds: list[int]) -> socket.socket:
        peer = device.connect(device.folder / name)
        # An urgent byte by itself has the descriptors.
        peer.sendmsg([STATUS[:1] if flags else STATUS], rights(*fds[:count]), flags)
        return peer

    return send


def to_front_end(
    data: bytes, count: int, flags: int = 0
) -> Callable[[Device, list[int]], socket.socket]:
    def send(device: Device, fds: list[int]) -> socket.socket:
        peer = device.connect(device.front)
        peer.sendmsg([data], rights(*fds[:count]), flags)
        return peer

    return send


def in_a_dropped_connection(device: Device, fds: list[int]) -> socket.socket:
    """Unread when the daemon ends the connection."""
    peer = device.connect(device.front)
    peer.send(words(200, 1, 0))
    peer.sendmsg([HEADER], rights(*fds))
    return peer


def in_a_closed_connection(device: Device, fds: list[int]) -> socket.socket:
    peer = in_a_dropped_connection(device, fds)
    peer.close()
    return peer


def in_a_socket(name: str) -> Callable[[Device, list[int]], socket.socket]:
    """In flight to a socket that is a descriptor itself."""

    def send(device: Device, fds: list[int]) -> socket.socket:
        one, other = socket.socketpair()
        other.sendmsg([b"x" * 8], rights(*fds))
        body = b"" if name == "SET_BACKEND_REQ_FD" else longs(0)
        peer = device.connect(device.front)
        number = {"SET_BACKEND_REQ_FD": 21, "SET_VRING_KICK": 12, "SET_VRING_CALL": 13}[name]
        peer.sendmsg([words(number, 1, len(body)) + body], rights(one.fileno()))
        one.close()
        return other if name == "SET_BACKEND_REQ_FD" else peer

    return send


ATTACKS: dict[str, Callable[[Device, list[int]], socket.socket]] = {
    "control": to_service("control", 1),
    "control-37": to_service("control", 37),
    "control-urgent": to_service("control", 1, socket.MSG_OOB),
    "metrics": to_service("metrics", 1),
    "front-end": to_front_end(HEADER, 1),
    "front-end-37": to_front_end(HEADER, 37),
    "front-end-63": to_front_end(HEADER, 63),
    "front-end-urgent": to_front_end(HEADER[:1], 1, socket.MSG_OOB),
    "dropped": in_a_dropped_connection,
    "closed": in_a_closed_connection,
    "kick": in_a_socket("SET_VRING_KICK"),
    "call": in_a_socket("SET_VRING_CALL"),
}


def attack(
    device: Device, stalling: Server, send: Callable[[Device, list[int]], socket.socket]
) -> socket.socket:
    """Send while the daemon is stopped.

    These are the last descriptors of a file that cannot be closed.
    """
    fds = [stalling.open() for _ in range(63)]
    device.process.send_signal(signal.SIGSTOP)
    peer = send(device, fds)
    for fd in fds:
        os.close(fd)
    stalling.stall()
    device.process.send_signal(signal.SIGCONT)
    return peer


@pytest.mark.parametrize("name", ATTACKS)
def test_v1_descriptors_in_flight(device: Device, stalling: Server, name: str) -> None:
    peer = attack(device, stalling, ATTACKS[name])
    assert eventually(lambda: some_thread_waits(device)), threads(device)
    # Some are front ends that go on.
    peer.close()
    still_serves(device)
    still_serves(device)


@pytest.mark.parametrize("urgent", [0, socket.MSG_OOB])
def test_v1_a_second_front_end_that_is_refused(
    device: Device, stalling: Server, urgent: int
) -> None:
    with FrontEnd(device) as vm:
        vm.start()
        attack(device, stalling, to_front_end(HEADER[:1] if urgent else HEADER, 1, urgent))
        assert eventually(lambda: some_thread_waits(device)), threads(device)
        for _ in range(3):
            began = device.clock()
            device.status()
            vm.get("GET_FEATURES")
            vm.works()
            assert device.clock() - began < PROMISE
        # Others are refused at once, although none of them is closed.
        with FrontEnd(device) as other:
            assert other.hung_up(PROMISE)
        vm.works()


def test_v1_a_front_end_with_a_hung_thread_goes_on(device: Device, stalling: Server) -> None:
    """Its events and memory are closed by another thread: it can start over and over."""
    attack(device, stalling, to_service("control", 1))
    assert eventually(lambda: some_thread_waits(device)), threads(device)
    with FrontEnd(device) as vm:
        for _ in range(40):
            vm.start()
        vm.works()


def test_v1_a_thread_that_has_room_again_leaves_nothing_to_do(
    device: Device, stalling: Server
) -> None:
    attack(device, stalling, to_service("control", 1))
    assert eventually(lambda: some_thread_waits(device)), threads(device)
    event = os.eventfd(0)
    # As many as wait for the thread when no more are accepted, with the one that it closes.
    crowd = [to_service("control", 1)(device, [event]) for _ in range(63)]
    os.close(event)
    for peer in crowd:
        peer.settimeout(PATIENCE)
        with contextlib.suppress(ConnectionError):
            assert peer.recv(1) == b""
        peer.close()
    stalling.end()
    assert eventually(lambda: not some_thread_waits(device)), threads(device)
    assert device.sleeps()


def test_v1_hung_clients_have_a_bound(device: Device, stalling: Server) -> None:
    """The control socket stops accepting, and a VM is served."""
    attack(device, stalling, to_service("control", 1))
    assert eventually(lambda: some_thread_waits(device)), threads(device)
    event = os.eventfd(0)
    crowd = []
    for _ in range(200):
        peer = device.connect()
        with contextlib.suppress(OSError):
            peer.sendmsg([STATUS], rights(event))
        crowd.append(peer)
    os.close(event)
    with FrontEnd(device) as vm:
        vm.start()
        vm.works()
    assert len(os.listdir(f"/proc/{device.process.pid}/fd")) < 128
    for peer in crowd:
        peer.close()
    # The file is closed, and all others behind it.
    stalling.end()
    assert eventually(device.answers)


def test_v1_descriptors_never_reach_the_limit(start: Start) -> None:
    """A soft limit that is too low is raised, and a hard one is an error."""
    device = start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096)))
    assert resource.prlimit(device.process.pid, resource.RLIMIT_NOFILE)[0] == 2048
    argv: list[str | Path] = [device.binary, "--socket-path", device.folder / "another"]
    limit = resource.setrlimit
    done = subprocess.run(
        argv,
        preexec_fn=lambda: limit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot have 2048 descriptors at once: this process may have 256" in done.stderr


# V2: locks that a front end holds


@contextlib.contextmanager
def held(stalling: Server, kind: str) -> Iterator[int]:
    """A descriptor whose lock somebody holds."""
    if kind == "pipe":
        reader, writer = os.pipe()
        os.write(writer, b"x" * 8)
        with stalling.holding(lambda libc, page: libc.read(reader, ctypes.c_void_p(page), 8)):
            yield reader
    elif kind == "full pipe":
        reader, writer = os.pipe()
        with stalling.holding(lambda libc, page: libc.write(writer, ctypes.c_void_p(page), 8)):
            yield writer
    elif kind == "socket":
        one, other = socket.socketpair()
        other.send(b"x" * 8)
        with stalling.holding(lambda libc, page: libc.read(one.fileno(), ctypes.c_void_p(page), 8)):
            yield one.fileno()
    else:
        poll, event = select.epoll(), os.eventfd(1)
        poll.register(event, select.EPOLLIN)
        with stalling.holding(
            lambda libc, page: libc.epoll_wait(poll.fileno(), ctypes.c_void_p(page), 1, -1)
        ):
            yield poll.fileno()


@pytest.mark.parametrize("name", ["SET_VRING_KICK", "SET_VRING_CALL", "SET_VRING_ERR"])
@pytest.mark.parametrize("kind", ["pipe", "full pipe", "socket", "epoll"])
def test_v2_a_lock_that_the_front_end_holds(
    device: Device, stalling: Server, kind: str, name: str
) -> None:
    with FrontEnd(device) as vm, held(stalling, kind) as fd:
        vm.start()
        vm.send(name, longs(REPORTING), [fd], 9)
        time.sleep(0.05)
        # If it were accepted it would be used now.
        with contextlib.suppress(OSError, AssertionError):
            vm.kick(REPORTING)
            vm.put(REPORTING, (PLAY, MIB, True))
        still_answers(device)
    device.serves()


def still_answers(device: Device) -> None:
    for _ in range(3):
        began = device.clock()
        device.status()
        assert device.clock() - began < PROMISE, device.log()


def test_v2_a_channel_that_the_front_end_reads_itself(device: Device, stalling: Server) -> None:
    with FrontEnd(device) as vm, held(stalling, "socket") as fd:
        vm.start()
        assert vm.accepted("SET_BACKEND_REQ_FD", b"", [fd])
        for size in range(1, 4):
            device.ask(command="target", bytes=size * MIB)
            still_answers(device)
        vm.works()


def test_v2_calls_of_user_mode_linux(start: Start, stalling: Server) -> None:
    """A socket is called by a thread of its own, and only with the option."""
    device = start("--user-mode-linux")
    one, other = socket.socketpair()
    with FrontEnd(device) as vm:
        vm.start()
        assert not vm.accepted("SET_VRING_KICK", longs(REPORTING), [one.fileno()])
        assert vm.accepted("SET_VRING_KICK", longs(REPORTING), [vm.kicks[REPORTING]])
        assert vm.accepted("SET_VRING_CALL", longs(REPORTING), [one.fileno()])
        other.settimeout(PATIENCE)
        assert other.recv(64) == longs(1)
        vm.works()
        assert other.recv(64) == longs(1)
        # A socket that would wait for room loses a call, and gets the next one.
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                one.send(bytes(8))
        one.setblocking(True)
        vm.works()
        device.status()
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while other.recv(1 << 20):
                pass
        other.settimeout(PATIENCE)
        vm.works()
        assert other.recv(64) == longs(1)
        with held(stalling, "socket") as fd:
            assert vm.accepted("SET_VRING_CALL", longs(REPORTING), [fd])
            vm.works()
            still_answers(device)
            vm.works()
    device.serves()
    assert "calls" in threads(device)


KINDS: dict[str, Callable[[], int]] = {
    "pipe": lambda: os.pipe()[0],
    "socket": lambda: socket.socketpair()[0].detach(),
    "epoll": lambda: ctypes.CDLL(None).epoll_create1(0),
    "timerfd": lambda: ctypes.CDLL(None).timerfd_create(1, 0),
    "signalfd": lambda: ctypes.CDLL(None).signalfd(-1, ctypes.create_string_buffer(128), 0),
    "inotify": lambda: ctypes.CDLL(None).inotify_init(),
    "userfaultfd": lambda: ctypes.CDLL(None).syscall(USERFAULTFD, 1),
    "memfd": lambda: memfd(PLAY),
    "path": lambda: os.open("/tmp", os.O_PATH),
    "fuse": lambda: os.open("/dev/fuse", os.O_RDWR),
    "tcp": lambda: socket.socket(socket.AF_INET).detach(),
    "zero": lambda: os.open("/dev/zero", os.O_RDWR),
}


@pytest.mark.parametrize("name", ["SET_VRING_KICK", "SET_VRING_CALL"])
@pytest.mark.parametrize("kind", KINDS)
def test_v2_only_eventfds_are_events(device: Device, kind: str, name: str) -> None:
    fd = KINDS[kind]()
    assert fd >= 0
    with FrontEnd(device) as peer:
        peer.negotiate()
        peer.send(name, longs(0), [fd], 9)
        try:
            assert peer.reply() != bytes(8), "it is refused"
        except ConnectionError:
            assert eventually(lambda: "does not keep to the protocol" in device.log())
        still_answers(device)
    os.close(fd)


def guest_files(device: Device) -> int:
    """How many descriptors of guest memory the daemon has."""
    found = 0
    for link in Path(f"/proc/{device.process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(link).startswith("/memfd:guest")
    return found


@pytest.mark.parametrize("hostile", [1, 3])
def test_an_event_in_an_epoll_set_harms_only_its_connection(
    device: Device, stalling: Server, hostile: int
) -> None:
    """Closing it takes the mutex of the set, which a thread of the front end holds."""
    poll, events = select.epoll(), [os.eventfd(1) for _ in range(hostile)]
    for event in events:
        poll.register(event, select.EPOLLIN)
    with stalling.holding(
        lambda libc, page: libc.epoll_wait(poll.fileno(), ctypes.c_void_p(page), 1, -1)
    ):
        for event in events:
            with FrontEnd(device) as vm:
                vm.start()
                assert vm.accepted("SET_VRING_CALL", longs(REPORTING), [event])
                # The daemon has the last descriptor.
                os.close(event)
        assert eventually(lambda: some_thread_waits(device)), threads(device)
        for _ in range(12):
            with FrontEnd(device) as vm:
                vm.start()
                vm.fill(PLAY, 16 * MIB)
                vm.works()
            device.status()
        assert eventually(lambda: guest_files(device) == 0), "memory is not freed"
        assert len(os.listdir(f"/proc/{device.process.pid}/fd")) < 128


def test_memory_that_is_freed_holds_up_nobody(device: Device) -> None:
    """The daemon has the last descriptors of 2 GiB when the front end hangs up."""
    size, count = 16 * MIB, 128
    with FrontEnd(device) as vm:
        vm.start()
        for n in range(count):
            fd, at = memfd(size), (1 << 32) + n * size
            os.pwrite(fd, b"x" * size, 0)
            assert vm.accepted("ADD_MEM_REG", longs(0, at, size, USER + at, 0), [fd])
            os.close(fd)
    still_serves(device)


# the log


@pytest.mark.parametrize("how", ["full", "held"])
def test_standard_error_that_nobody_reads_stops_no_service(
    start: Start, stalling: Server, how: str
) -> None:
    """A pipe that the front end has as well: full, or its mutex is held."""
    reader, writer = os.pipe()
    device = start(
        wrapper=["sh", "-c", f'exec "$@" 2>/proc/self/fd/{writer}', "sh"], pass_fds=[writer]
    )

    def serves() -> None:
        with FrontEnd(device) as vm:
            vm.start()
            # Ten lines are logged.
            for ring in range(20):
                assert not vm.accepted("SET_VRING_NUM", words(ring, 3))
            vm.works()
        still_answers(device)

    if how == "full":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(PAGE))
        os.set_blocking(writer, True)
        serves()
        assert device.end() == 0
    else:
        threading.Thread(target=drain, args=(reader,), daemon=True).start()
        with stalling.holding(lambda libc, page: libc.write(writer, ctypes.c_void_p(page), 8)):
            serves()
            assert threads(device)["log"] == "D"
    os.close(writer)


def drain(reader: int) -> None:
    """Read until the last writer has gone."""
    while os.read(reader, 1 << 16):
        pass
    os.close(reader)


# V12: who may connect


def test_v12_idle_connections_do_not_block_others(device: Device) -> None:
    idle = [device.connect(device.front) for _ in range(40)]
    with FrontEnd(device) as vm:
        vm.start()
        vm.works()
        # The others have been ended: they are no second front ends.
        for each in idle:
            each.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
        vm.works()
    for each in idle:
        each.close()


def test_v12_the_first_message_makes_the_front_end(device: Device) -> None:
    with FrontEnd(device) as first, FrontEnd(device) as second:
        time.sleep(0.1)
        second.start()
        second.works()
        assert first.hung_up(PROMISE)


# V6: what QEMU sends when it measures how much is written


def test_v6_a_front_end_that_logs_writes(device: Device) -> None:
    with FrontEnd(device) as vm:
        vm.start()
        vm.works()
        vm.send("SET_LOG_BASE", longs(8192, 0))
        assert vm.accepted("SET_FEATURES", longs(ALL | EXTENDED | 1 << 26))
        for ring in range(4):
            at = USER + vm.bases[ring]
            body = words(ring, 1) + longs(at, at + 0x2000, at + 0x1000, at + 0x2000)
            assert vm.accepted("SET_VRING_ADDR", body)
        event = os.eventfd(0)
        assert vm.accepted("SET_LOG_FD", b"", [event])
        os.close(event)
        vm.fill(PLAY, 4 * MIB)
        assert vm.ask(REPORTING, (PLAY, MIB, True)) == 0
        assert vm.pages(INFLATE, [(PLAY + MIB) >> 12], 1) == 1
        assert vm.holds(PLAY, 4 * MIB) == 0x5A, "nothing changes that is not in the log"
        assert "logs writes" in str(device.status()["problems"])
        assert vm.accepted("SET_FEATURES", longs(ALL | EXTENDED))
        assert vm.ask(REPORTING, (PLAY, MIB, True)) == MIB
        # What came into the balloon meanwhile goes back now.
        assert eventually(lambda: vm.holds(PLAY + MIB, 4096) == 0)
        vm.works()
