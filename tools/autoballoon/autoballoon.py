#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Keep a share of each guest's memory free; the host gets the rest through the balloon."""

import argparse
import contextlib
import json
import re
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn, TextIO

MIB = 1 << 20
# of its memory: a guest is left alone this near to the wanted share, or to its working set
BAND = 0.05
ANSWER_S = 10.0  # for an answer, and at least for new statistics
LINE = 1 << 20  # bytes of the longest answer
UNSET = (1 << 64) - 1  # QEMU's value of a statistic that the guest did not send
BROKEN = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)  # of a connection
NUMBERS = (
    ("free", 20, 80, "wanted free share of a guest's memory in percent"),
    ("margin", 128, 1 << 20, "MiB that a guest keeps beyond its working set"),
    ("step", 128, 1 << 20, "MiB to take at once, at most"),
    ("interval", 5, 3600, "seconds between two looks"),
)
# A guest's memory, that outside of its balloon, its statistics, and whether their total has the
# balloon.
Look = tuple[int, int, dict[str, Any], bool]
EXIT = "Exit: 0 ended by a signal, or --once succeeded; 1 --once failed for a guest; 2 bad usage."


class Trouble(Exception):
    """Statistics that cannot be used."""


def decide(look: Look, options: argparse.Namespace) -> tuple[int | None, str]:
    """The size that a guest should have, in whole MiB, and why.

    None for no change, Trouble for bad statistics.
    """
    memory, size, stats, in_total = look
    total, free, available = (
        stats.get(f"{name}_memory", UNSET) for name in ("total", "free", "available")
    )
    if UNSET in (total, free):
        raise Trouble(f"Incomplete statistics: the guest sends {stats}; update its balloon driver")
    available = free if available == UNSET else available  # Linux before 4.6
    why = f"total {total}, free {free}, available {available} in {size} of {memory} bytes"
    usual = 0 < size <= memory and 0 < total <= memory and 0 <= available <= total
    total -= memory - size if in_total else 0
    if not (usual and 0 <= free <= total):
        raise Trouble(f"Impossible statistics: {why}; check the guest, it may be compromised")
    used = total - min(available, total)
    floor, wanted = used + options.margin * MIB, options.free / 100
    if abs(free - wanted * total) <= BAND * total and floor <= total:
        return None, ""
    goal = max(int((total - free) / (1 - wanted)), floor)
    new = max(size + goal - total, size - options.step * MIB)
    new = min(memory, -(-new // MIB) * MIB)
    why = f"working set {used // MIB} MiB, free {free // MIB} of {size // MIB} MiB"
    return (new if new - size >= MIB or size - new > BAND * total else None), why


class Channel:
    """A unix socket with a JSON object in each line."""

    def __init__(self, path: str) -> None:
        self.memory, self.data, self.end = 0, b"", time.monotonic() + ANSWER_S
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_S)
        self.socket.connect(path)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.end = time.monotonic() + ANSWER_S
        self.socket.settimeout(ANSWER_S)
        self.socket.sendall(json.dumps(request).encode() + b"\n")
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next line, at most ANSWER_S after the last request."""
        while b"\n" not in self.data:
            left = self.end - time.monotonic()
            if left <= 0 or len(self.data) > LINE:
                raise TimeoutError(
                    f"no answer within {ANSWER_S:g} s, or a longer one than {LINE} bytes"
                )
            self.socket.settimeout(left)
            if not (more := self.socket.recv(1 << 16)):
                raise ConnectionError("the other end closed the connection")
            self.data += more
        line, _, self.data = self.data.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Qmp(Channel):
    """QEMU's monitor."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        if "QMP" not in self.read():
            raise ValueError("this is no QMP monitor")
        self.run("qmp_capabilities")
        folders = ("/machine/peripheral", "/machine/peripheral-anon")
        found = [(folder, one) for folder in folders for one in self.run("qom-list", path=folder)]
        found = [one for one in found if one[1]["type"].startswith("child<virtio-balloon")]
        if not found:
            raise ValueError("this QEMU has no device virtio-balloon-pci")
        self.balloon = f"{found[0][0]}/{found[0][1]['name']}"
        self.last = self.get("guest-stats")["last-update"]  # what is old does not count
        self.size = self.run("query-balloon")["actual"]

    def run(self, command: str, **arguments: Any) -> Any:
        answer = self.ask({"execute": command, "arguments": arguments})
        while "return" not in answer:
            if "error" in answer:
                raise ValueError(f"QEMU refuses {command}: {answer['error']['desc']}")
            answer = self.read()  # this was an event
        return answer["return"]

    def get(self, name: str) -> Any:
        return self.run("qom-get", path=self.balloon, property=name)

    def look(self, interval: int, stop: threading.Event) -> Look:
        """Wait for new statistics; Trouble when none come."""
        known = self.run("query-memory-size-summary")
        self.memory = known["base-memory"] + known.get("plugged-memory", 0)
        if not 1 <= self.get(name := "guest-stats-polling-interval") <= interval:
            self.run("qom-set", path=self.balloon, property=name, value=interval)
        end = time.monotonic() + max(ANSWER_S, 3 * interval)
        while (found := self.get("guest-stats"))["last-update"] in (0, self.last):
            if time.monotonic() > end or stop.wait(0.2):
                raise Trouble(
                    "No new statistics: the guest hangs, or has no balloon driver; see its console"
                )
        self.last = found["last-update"]
        stats = {
            name.removeprefix("stat-").replace("-", "_"): n for name, n in found["stats"].items()
        }
        before, self.size = self.size, self.run("query-balloon")["actual"]
        # While the balloon moves, the statistics are of a size between both: the larger one is
        # safe.
        return self.memory, max(before, self.size), stats, self.get("deflate-on-oom")

    def set(self, size: int) -> None:
        self.run("balloon", value=size)


class Control(Channel):
    """The control socket of vhost-user-balloon."""

    def run(self, command: str, **arguments: Any) -> dict[str, Any]:
        answer = self.ask({"command": command, **arguments})
        if not answer["ok"]:
            failure = Trouble if command == "stats" else ValueError
            raise failure(f"No {command}: {answer['error']}; see vhost-user-balloon status")
        return answer

    def look(self, interval: int, stop: threading.Event) -> Look:
        """The same as of Qmp; the daemon waits."""
        status = self.run("status")
        self.memory = sum(region["bytes"] for region in status["regions"])
        stats = self.run("stats")["stats"]
        held = min(status["actual"], self.run("target")["actual"])
        return self.memory, self.memory - held, stats, "deflate-on-oom" in status["features"]

    def set(self, size: int) -> None:
        self.run("target", bytes=self.memory - size)


class Guest:
    """One guest, with a thread and a connection of its own: one that hangs delays no other."""

    def __init__(self, name: str, options: argparse.Namespace, stop: threading.Event) -> None:
        self.name, self.options, self.stop = name, options, stop
        self.channel: Qmp | Control | None = None
        self.target, self.failure = -1, ""

    def say(self, text: str, to: TextIO) -> None:
        with contextlib.suppress(OSError):
            print(f"autoballoon: {self.name}: {text}", file=to, flush=True)

    def failed(self, text: str) -> None:
        if text != self.failure and not self.stop.is_set():
            self.say(text, sys.stderr)
        self.failure = text

    def turn(self) -> None:
        """Look at the guest once and set its target; ``failure`` says what does not work."""
        try:
            if self.channel is None:
                kind, _, path = self.name.partition(":")
                self.channel = (Qmp if kind == "qmp" else Control)(path)
            try:
                size, why = decide(
                    self.channel.look(self.options.interval, self.stop), self.options
                )
                if size is not None:
                    self.give(size, why)
                self.failure = ""
            except Trouble as trouble:
                self.failed(str(trouble))
                self.give(self.channel.memory, "its statistics cannot be used")
        except BROKEN as error:  # the target stays, and the next turn connects again
            self.failed(
                f"No connection: {error or type(error).__name__}; start the guest, or end other "
                "clients"
            )
            if self.channel:
                self.channel.socket.close()
            self.channel, self.target = None, -1

    def give(self, size: int, why: str) -> None:
        if self.channel and size not in (0, self.target):
            if not self.options.dry_run:
                self.channel.set(size)
            self.target = size
            self.say(
                f"{'would set' if self.options.dry_run else 'target'} {size // MIB} MiB: {why}",
                sys.stdout,
            )

    def run(self) -> None:
        self.turn()
        while not self.options.once and not self.stop.wait(self.options.interval):
            self.turn()
        if self.channel and not self.options.once:
            with contextlib.suppress(*BROKEN):
                self.give(self.channel.memory, "autoballoon ends")


class Parser(argparse.ArgumentParser):
    """Errors in three parts."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"autoballoon: Bad usage: {message}; see autoballoon --help\n")


def main() -> int:
    parser = Parser(prog="autoballoon", description=__doc__, epilog=EXIT)
    for name, default, _, words in NUMBERS:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{words} ({default})"
        )
    parser.add_argument(
        "--once", action="store_true", help="look at each guest once and leave its target"
    )
    parser.add_argument("--dry-run", action="store_true", help="print targets and set none")
    parser.add_argument(
        "guests", nargs="+", metavar="GUEST", help="qmp:PATH (QEMU) or control:PATH (daemon)"
    )
    parser.add_argument("--version", action="version", version="autoballoon 1.0")
    options, stop = parser.parse_args(), threading.Event()
    for name, _, high, _ in NUMBERS:
        if not 1 <= (value := getattr(options, name)) <= high:
            parser.error(f"--{name} {value} is not from 1 to {high}")
    for name in options.guests:
        if not re.match(r"(qmp|control):.", name):
            parser.error(f"'{name}' is neither qmp:PATH nor control:PATH")
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    guests = [Guest(name, options, stop) for name in dict.fromkeys(options.guests)]
    threads = [threading.Thread(target=guest.run) for guest in guests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(options.once and any(guest.failure for guest in guests))


if __name__ == "__main__":
    sys.exit(main())
