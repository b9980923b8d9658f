# SPDX-License-Identifier: GPL-2.0
"""A front end, its guest and a control client, all of which may send anything, against a running
daemon.
"""

from __future__ import annotations

import array
import contextlib
import json
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
PAGE = 4096
RAM = 64 * MIB
PLAY = 4 * MIB  # rings and buffers are below
USER = 0x7F00_0000_0000  # where the front end has mapped the guest
ENTRIES = 128
LIST, ANSWER = 0x8000, 0xC000
ALL = 0b1111_0111
EXTENDED = 1 << 30 | 1 << 32  # protocol features, version 1
INFLATE, DEFLATE, STATS, REPORTING = range(4)
NAMES = {
    "GET_FEATURES": 1,
    "SET_FEATURES": 2,
    "SET_OWNER": 3,
    "SET_MEM_TABLE": 5,
    "SET_VRING_NUM": 8,
    "SET_VRING_ADDR": 9,
    "SET_VRING_BASE": 10,
    "GET_VRING_BASE": 11,
    "SET_VRING_KICK": 12,
    "SET_VRING_CALL": 13,
    "SET_VRING_ERR": 14,
    "GET_PROTOCOL_FEATURES": 15,
    "SET_PROTOCOL_FEATURES": 16,
    "GET_QUEUE_NUM": 17,
    "SET_VRING_ENABLE": 18,
    "SET_BACKEND_REQ_FD": 21,
    "SET_LOG_BASE": 6,
    "SET_LOG_FD": 7,
    "GET_CONFIG": 24,
    "SET_CONFIG": 25,
    "RESET_DEVICE": 34,
    "ADD_MEM_REG": 37,
    "REM_MEM_REG": 38,
}
PROMISE = 1.0  # seconds by Device.clock(): no connection stops another one for longer
PATIENCE = 120.0  # seconds that a test waits on a busy machine for what must happen


def longs(*values: int) -> bytes:
    """64 bits each."""
    return struct.pack(f"={len(values)}Q", *values)


def words(*values: int) -> bytes:
    """32 bits each."""
    return struct.pack(f"={len(values)}I", *(value & 0xFFFF_FFFF for value in values))


def memfd(size: int, flags: int = 0) -> int:
    """Guest memory without a name."""
    fd = os.memfd_create("guest", flags | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def eventually(holds: Any) -> bool:
    """Whether ``holds()`` becomes true."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def repeated(work: Callable[[], object], processes: int = 1) -> Iterator[None]:
    """Repeat ``work`` in other processes meanwhile, with the memory and descriptors of this one.

    A thread would hold the interpreter's lock, for which this process would wait.
    """
    children = []
    try:
        for _ in range(processes):
            if not (child := os.fork()):
                try:
                    while True:
                        work()
                finally:
                    os._exit(1)
            children.append(child)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), "the work failed before its time"


def _waited(thread: str) -> int:
    """Nanoseconds in which a thread of /proc could run and had no CPU."""
    return int(Path(f"/proc/{thread}/schedstat").read_text().split()[1])


class Device:
    """A release build that runs, with its sockets in a folder of its own."""

    def __init__(self, binary: Path, *options: str, **popen: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kz-hostile-"))
        self.binary = binary
        if "user" in popen:
            # That user may not read root's folders.
            self.binary = Path(shutil.copy(binary, self.folder))
            os.chown(self.folder, popen["user"], -1)
        self.front, self.control = self.folder / "front", self.folder / "control"
        self.options = options
        self.start(**popen)

    def start(
        self, *options: str, wrapper: Sequence[str] = (), front: bool = True, **popen: Any
    ) -> None:
        """Start it, and wait until it answers."""
        argv = [
            *wrapper,
            str(self.binary),
            "--control",
            str(self.control),
            "--device-init-on-inflate",
            "on",
        ]
        argv += ["--metrics-socket", str(self.folder / "metrics")]
        argv += ["--socket-path", str(self.front)] if front else []
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*argv, *self.options, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **popen,
            )
        assert eventually(lambda: self.process.poll() is not None or self.answers()), self.log()
        assert self.process.poll() is None, self.log()

    def answers(self) -> bool:
        """Whether the control socket is served."""
        try:
            return bool(self.ask(command="status")["ok"])
        except OSError:
            return False

    def log(self) -> str:
        """All that it has logged."""
        return (self.folder / "log").read_text()

    def connect(self, path: Path | None = None) -> socket.socket:
        """Connect to its control socket, or to another one."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE)
        try:
            connection.connect(str(path or self.control))
        except OSError:
            connection.close()
            raise
        return connection

    def ask(self, **request: object) -> dict[str, Any]:
        """A control request, which is answered within the second that is promised."""
        began = self.clock()
        with self.connect() as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer: dict[str, Any] = json.loads(answers.readline())
        assert self.clock() - began < PROMISE, self.log()
        return answer

    def status(self) -> dict[str, Any]:
        """Everything it knows."""
        return self.ask(command="status")

    def metrics(self) -> str:
        """The body of a scrape."""
        with self.connect(self.folder / "metrics") as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            with connection.makefile("r", encoding="utf-8") as answer:
                return answer.read().partition("\n\n")[2]

    def about(self, name: str) -> int:
        """A line of /proc/PID/status, in its own unit."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(
            next(line for line in text.splitlines() if line.startswith(f"{name}:")).split()[1]
        )

    def cpu(self) -> float:
        """Seconds of CPU time."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def sleeps(self) -> bool:
        """Whether it waits for something that happens.

        One that polls without a pause takes over 0.05 s of CPU time in a second, on a busy machine
        as well.
        """
        used = self.cpu()
        time.sleep(1)
        return self.cpu() - used < 0.05

    def clock(self) -> float:
        """Seconds, without those in which the serving thread or this one waited for a CPU."""
        waited = _waited("thread-self")
        with contextlib.suppress(OSError):  # it has ended
            waited += _waited(str(self.process.pid))
        return time.monotonic() - waited / 1e9

    def serves(self) -> None:
        """It answers an operator, and does the work of the next front end, within a second each."""
        assert self.process.poll() is None, self.log()
        self.status()
        with FrontEnd(self) as vm:
            began = self.clock()
            vm.start()
            vm.works()
            assert self.clock() - began < PROMISE, self.log()

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit code."""
        began = now = self.clock()
        self.process.send_signal(number)
        while self.process.poll() is None and now - began < PROMISE:
            time.sleep(0.005)
            now = self.clock()
        return self.process.wait(0)

    def close(self) -> None:
        """Clean up, whatever has happened."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class FrontEnd:
    """A VMM with a guest of 64 MiB; says nothing by itself."""

    def __init__(
        self, device: Device, size: int = RAM, memory: int = -1, path: Path | None = None
    ) -> None:
        self.device = device
        self.size = size
        self.fd = os.dup(memory) if memory >= 0 else memfd(size)
        self.memory = mmap.mmap(self.fd, size)
        self.socket = device.connect(path or device.front)
        self.kicks = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(5)]
        self.calls = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(5)]
        self.bases = [0x10_0000 + n * 0x1_0000 for n in range(5)]
        self.next, self.free, self.seen = [0] * 5, [0] * 5, [0] * 5

    def __enter__(self) -> FrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up, and give everything back."""
        self.socket.close()
        with contextlib.suppress(BufferError):
            self.memory.close()
        for fd in (self.fd, *self.kicks, *self.calls):
            with contextlib.suppress(OSError):
                os.close(fd)
        self.kicks, self.calls = [], []

    # messages

    def raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Bytes on the front end's socket, with descriptors."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.sendmsg([data], rights)

    def send(
        self, name: str | int, body: bytes = b"", fds: Sequence[int] = (), flags: int = 1
    ) -> None:
        """One message."""
        number = NAMES[name] if isinstance(name, str) else name
        self.raw(struct.pack("=III", number, flags, len(body)) + body, fds)

    def reply(self) -> bytes:
        """The body of the next reply, which comes within the second that is promised."""
        began = self.device.clock()
        header = self.exactly(12)
        body = self.exactly(struct.unpack("=III", header)[2])
        assert self.device.clock() - began < PROMISE, self.device.log()
        return body

    def exactly(self, size: int) -> bytes:
        """So many bytes."""
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the device has hung up")
            data += part
        return data

    def get(self, name: str, body: bytes = b"") -> bytes:
        """The answer to a question."""
        self.send(name, body)
        return self.reply()

    def accepted(self, name: str, body: bytes = b"", fds: Sequence[int] = ()) -> bool:
        """Whether a request is accepted."""
        self.send(name, body, fds, 1 | 8)
        return self.reply() == bytes(8)

    def hung_up(self, seconds: float = 3.0) -> bool:
        """Whether the device closes the connection in that time, by Device.clock()."""
        began = self.device.clock()
        self.socket.settimeout(PATIENCE)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        return self.device.clock() - began < seconds

    # a driver

    def negotiate(self, features: int = ALL) -> None:
        """Features of both kinds."""
        self.send("SET_OWNER")
        self.get("GET_FEATURES")
        self.send("SET_PROTOCOL_FEATURES", self.get("GET_PROTOCOL_FEATURES"))
        assert self.accepted("SET_FEATURES", struct.pack("=Q", features | EXTENDED))

    def table(self, *regions: tuple[int, int, int, int], fds: Sequence[int] = ()) -> bool:
        """Regions: guest, size, user, offset."""
        body = struct.pack("=II", len(regions), 0) + b"".join(
            struct.pack("=4Q", *region) for region in regions
        )
        return self.accepted("SET_MEM_TABLE", body, fds or [self.fd] * len(regions))

    def start(self, features: int = ALL) -> None:
        """All of what a driver does."""
        self.negotiate(features)
        assert self.table((0, self.size, USER, 0))
        for ring in range(4):
            self.start_ring(ring)

    def address(self, ring: int, base: int | None = None, user: int = USER) -> bool:
        """Where a ring is: descriptors, used, available."""
        at = user + (self.bases[ring] if base is None else base)
        return self.accepted(
            "SET_VRING_ADDR", struct.pack("=II4Q", ring, 0, at, at + 0x2000, at + 0x1000, 0)
        )

    def start_ring(self, ring: int, user: int = USER) -> None:
        """Set a ring up from the start."""
        base = self.bases[ring]
        self.memory[base : base + 0x3000] = bytes(0x3000)
        self.next[ring] = self.free[ring] = self.seen[ring] = 0
        assert self.accepted("SET_VRING_NUM", struct.pack("=II", ring, ENTRIES))
        assert self.accepted("SET_VRING_BASE", struct.pack("=II", ring, 0))
        assert self.address(ring, user=user)
        assert self.accepted("SET_VRING_KICK", struct.pack("=Q", ring), [self.kicks[ring]])
        assert self.accepted("SET_VRING_CALL", struct.pack("=Q", ring), [self.calls[ring]])
        assert self.accepted("SET_VRING_ENABLE", struct.pack("=II", ring, 1))

    def stop_ring(self, ring: int) -> int:
        """The index at which it stopped."""
        answer: tuple[int, int] = struct.unpack(
            "=II", self.get("GET_VRING_BASE", struct.pack("=II", ring, 0))
        )
        return answer[1]

    def descriptor(
        self, ring: int, slot: int, address: int, length: int, flags: int = 0, following: int = 0
    ) -> None:
        """One entry of a ring's table."""
        at = self.bases[ring] + slot * 16
        self.memory[at : at + 16] = struct.pack("<QIHH", address, length, flags, following)

    def offer(self, ring: int, head: int) -> None:
        """Make a chain available."""
        at = self.bases[ring] + 0x1000
        slot = at + 4 + self.next[ring] % ENTRIES * 2
        self.memory[slot : slot + 2] = struct.pack("<H", head)
        self.next[ring] = (self.next[ring] + 1) & 0xFFFF
        self.memory[at + 2 : at + 4] = struct.pack("<H", self.next[ring])

    def put(self, ring: int, *parts: tuple[int, int, bool]) -> None:
        """A chain: address, length, whether the device may write."""
        head = self.free[ring]
        for n, (address, length, writable) in enumerate(parts):
            slot, more = (head + n) % ENTRIES, n + 1 < len(parts)
            self.descriptor(ring, slot, address, length, more | writable << 1, (slot + 1) % ENTRIES)
        self.free[ring] = (head + len(parts)) % ENTRIES
        self.offer(ring, head)

    def kick(self, ring: int) -> None:
        """Tell the device."""
        os.eventfd_write(self.kicks[ring], 1)

    def used_index(self, ring: int) -> int:
        """How many chains came back, in 16 bits."""
        at = self.bases[ring] + 0x2002
        index: tuple[int] = struct.unpack("<H", self.memory[at : at + 2])
        return index[0]

    def used(self, ring: int) -> int:
        """The used length of the next chain that comes back."""
        deadline = time.monotonic() + PATIENCE
        while self.used_index(ring) == self.seen[ring]:
            select.select([self.calls[ring]], [], [], 0.01)
            assert time.monotonic() < deadline, f"nothing came back: {self.device.log()}"
        at = self.bases[ring] + 0x2004 + self.seen[ring] % ENTRIES * 8
        self.seen[ring] = (self.seen[ring] + 1) & 0xFFFF
        element: tuple[int, int] = struct.unpack("<II", self.memory[at : at + 8])
        return element[1]

    def ask(self, ring: int, *parts: tuple[int, int, bool]) -> int:
        """The used length of a chain."""
        self.put(ring, *parts)
        self.kick(ring)
        return self.used(ring)

    def pages(self, ring: int, pfns: Sequence[int], room: int = 0) -> int:
        """Inflate or deflate, with so many bytes for an answer."""
        data = struct.pack(f"<{len(pfns)}I", *pfns)
        self.memory[LIST : LIST + len(data)] = data
        self.memory[ANSWER : ANSWER + 64] = b"\xff" * 64
        return self.ask(ring, (LIST, len(data), False), *([(ANSWER, room, True)] if room else []))

    def fill(self, at: int, size: int) -> None:
        """Write something that is no zero."""
        self.memory[at : at + size] = b"\x5a" * size

    def holds(self, at: int, size: int) -> int | None:
        """The byte that is everywhere in there; None: several."""
        data = self.memory[at : at + size]
        return data[0] if data.count(data[:1]) == size else None

    def blocks(self) -> int:
        """Bytes of guest memory that the host has memory for."""
        return os.fstat(self.fd).st_blocks * 512

    def works(self) -> None:
        """The device still discards what is reported."""
        at = self.size - MIB
        self.fill(at, 0x4000)
        assert self.ask(REPORTING, (at, 0x4000, True)) in (0, 0x4000)
        assert self.holds(at, 0x4000) == 0, self.device.log()


@contextlib.contextmanager
def limited_memory(limit: int) -> Iterator[Path | None]:
    """A cgroup of so many bytes that processes can be moved to; None: not on this machine."""
    root = Path("/sys/fs/cgroup")
    name = f"kz-hostile-{os.getpid()}"
    for group, file in (
        (root / "memory" / name, "memory.limit_in_bytes"),
        (root / name, "memory.max"),
    ):
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / file).write_text(str(limit))
            yield group
            return
        except OSError:
            continue
        finally:
            members = group / "cgroup.procs"
            eventually(lambda members=members: not members.read_text())
            with contextlib.suppress(OSError):
                group.rmdir()
    yield None
