# SPDX-License-Identifier: GPL-2.0
"""A running guest: its channels, its end, and what it printed."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import selectors
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lab.boot import argv, console, hugepages, initramfs, resolve
from lab.boot.argv import Images
from lab.boot.spec import BootSpec
from lab.boot.verdict import EmulatorFault, Ending, NeverCameUp
from lab.build import daemon
from lab.core import paths, progress, run
from lab.core.errors import LabError, TestFailure

LAST_WORDS = 10.0  # seconds that a guest gets to switch off after its report
COMES_UP = 120.0  # seconds in which an emulated guest reaches user space on the slowest machine
Sink = Callable[[bytes], None] | None


# The last lines of guests that were started again; a test run lists them at its end.
started_again: list[str] = []


@dataclass
class BootResult:
    """The output and the end of a boot. ``seconds`` is wall time from start to end of QEMU."""

    stdout: str
    stderr: str
    exit_code: int
    console: Path
    accel: str
    seconds: float
    violations: list[str]
    accel_reason: str = ""


class Guest:
    """A guest that runs. Made by ``running`` and ``boot``; ended by ``close`` at the latest."""

    def __init__(
        self,
        spec: BootSpec,
        images: Images,
        *,
        interactive: bool = False,
        talks: bool = True,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """Start a guest on images that exist (see ``resolve.images``).

        ``interactive``: it has this terminal. ``talks``: its command reads what ``send`` writes.
        ``sinks`` get what the command writes to stdout and stderr, as it comes.
        """
        self.spec = spec
        self.images = images
        self.kernel, self.qemu, self.accel = images.kernel, images.qemu, images.accel
        self.accel_reason = images.reason
        self.folder = paths.run_folder("boot")
        self.console = self.folder / "console.log"
        self.console.touch()
        self._initrd_file = self.folder / "initrd.cpio"
        if spec.arch == "um" and " " in str(self.folder):
            # It reads its arguments as one line, in which a space ends the name of a file.
            self._initrd_file = paths.sub("work") / f"{self.folder.name}.cpio"
        self.interactive = interactive
        self._sinks = dict(zip(("out", "err"), sinks, strict=False))
        self._control = b""
        self._out = bytearray()
        self._err = bytearray()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._exit: int | None = None
        self._taint = 0
        self._late = False
        self._ready = threading.Event()
        self.daemon: daemon.Daemon | None = None
        self.huge_pages: hugepages.Taken | None = None
        self._monitor: Any = None
        self._ours: dict[str, socket.socket] = {}
        self._launch(talks)
        self.pid = self.process.pid
        self._ended = self._began
        self._reader = threading.Thread(target=self._read, name="guest", daemon=True)
        self._reader.start()

    def _channels(self, talks: bool) -> list[str]:
        """The names of the sockets that this guest has."""
        if self.spec.arch == "um":
            names = ["ctl", "out", "err", "con"]
        else:
            names = ["ctl", "qmp"] if self.interactive else ["ctl", "out", "err", "qmp"]
        return [*names, "in"] if talks and not self.interactive else names

    def _launch(self, talks: bool) -> None:
        """Start the daemon, if there is one, and the guest; nothing is left if that fails."""
        theirs: dict[str, socket.socket] = {}
        for name in self._channels(talks):
            self._ours[name], theirs[name] = socket.socketpair()
        try:
            if self.images.daemon is not None:
                options = self.spec.daemon_options() or []
                self.daemon = daemon.Daemon(self.images.daemon, options, self.folder)
            if self.accel == "pvm" and self.spec.pool:
                self.huge_pages = hugepages.take(self.spec.memory)
            ends = argv.Ends(
                self._initrd(talks),
                self.console,
                {name: end.fileno() for name, end in theirs.items()},
                daemon=self.daemon.socket if self.daemon else None,
                interactive=self.interactive,
                huge_pages=self.huge_pages is not None,
            )
            words = argv.make(self.spec, self.images, ends)
            (self.folder / "command").write_bytes(os.fsencode("\n".join([*words, ""])))
            self._began = time.monotonic()
            self.process = self._start(words, theirs)
        except BaseException:
            self._close_ends()
            raise
        finally:
            for end in theirs.values():
                end.close()

    def _initrd(self, talks: bool) -> Path:
        if self.spec.initrd:
            return self.spec.initrd
        target = self._initrd_file
        channels = "ssl" if self.spec.arch == "um" else "tty" if self.interactive else "ports"
        mode = f"{channels} in" if talks else channels
        initramfs.write(
            target,
            self.spec.command,
            mode,
            self.spec.add,
            list(self.images.modules),
            self.spec.arch,
            base=self.images.archive,
        )
        return target

    def _start(self, words: list[str], ends: dict[str, socket.socket]) -> subprocess.Popen[bytes]:
        run.show(words)
        with (self.folder / "vmm.log").open("wb") as log:
            # User-Mode Linux has its console, from the first message on, on stdout.
            output = ends["con"].fileno() if "con" in ends else None if self.interactive else log
            stdin = None if self.interactive else subprocess.DEVNULL
            fds = [end.fileno() for end in ends.values()]
            own = not self.interactive  # a terminal stays usable only in its own session
            try:
                # A guest ends even if the lab gets SIGKILL.
                return subprocess.Popen(
                    words,
                    stdin=stdin,
                    stdout=output,
                    stderr=log,
                    pass_fds=fds,
                    start_new_session=own,
                    preexec_fn=run.die_with_parent,
                )
            except OSError as error:
                fix = "check that it is a program for this machine"
                raise LabError(
                    f"cannot start {words[0]}", error.strerror or str(error), fix
                ) from None

    def _read(self) -> None:
        deadline = self._began + self.spec.timeout
        with (
            selectors.DefaultSelector() as selector,
            (self.folder / "stdout").open("wb") as saved,
            self.console.open("ab") as console_log,
        ):
            files = {"out": saved, "con": console_log}
            for name in ("ctl", "out", "err", "con"):
                if name in self._ours:
                    selector.register(self._ours[name], selectors.EVENT_READ, name)
            while selector.get_map():
                for key, _ in selector.select(0.5):
                    try:
                        data = self._ours[key.data].recv(1 << 16)
                    except OSError:
                        data = b""
                    if not data:
                        selector.unregister(key.fileobj)
                    try:
                        if key.data in files:
                            files[key.data].write(data)
                            files[key.data].flush()
                        self._take(key.data, data)
                    except OSError as error:  # a full disk, or stdout is a pipe that was closed
                        self._broken = error
                if self._exit is not None:
                    deadline = min(deadline, self._reported + LAST_WORDS)
                if time.monotonic() > deadline or self._broken:
                    self._late = self._exit is None
                    run.end_group(self.process) if not self.interactive else self.process.kill()
                    break
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_WORDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._ended = time.monotonic()
        if self._partial:
            self._lines.put(self._partial.decode(errors="replace"))
        self._lines.put(None)

    _partial = b""
    _reported = 0.0
    _broken: OSError | None = None

    def _take(self, name: str, data: bytes) -> None:
        if name == "out":
            self._out += data
            *whole, self._partial = (self._partial + data).split(b"\n")
            for line in whole:
                self._lines.put(line.decode(errors="replace"))
        elif name == "err":
            self._err += data
        elif name == "ctl":
            *whole, self._control = (self._control + data).split(b"\n")
            for line in whole:
                self._report(line.decode(errors="replace"))
        if name in ("out", "err") and data and (sink := self._sinks.get(name)):
            sink(data)

    def _report(self, line: str) -> None:
        match = re.fullmatch(r"(ready|taint|exit) (-?\d+)\r?", line)
        if match and match[1] == "ready":
            self._ready.set()
        elif match and match[1] == "taint":
            self._taint = int(match[2])
        elif match:
            self._exit, self._reported = int(match[2]), time.monotonic()

    def ending(self) -> Ending:
        """Its state; if it has ended, after all that it reported."""
        if self.process.poll() is not None:
            self._reader.join(15)
        how = self._taint, self._exit, self._ready.is_set(), self._late, self.process.returncode
        text, log = self.console.read_text(errors="replace"), self.folder / "vmm.log"
        return Ending(self.spec, self.accel, text, self.console, log, *how)

    def comes_up(self) -> bool:
        """Wait for user space, except with -S.

        False when an emulated guest met a known hang or race.
        """
        if self.accel != "tcg" or "-S" in self.spec.extra_qemu:
            return True
        while not self._ready.wait(0.1):
            if not self._reader.is_alive():
                return self._ready.is_set() or not self.ending().forgiven()
            if time.monotonic() > self._began + COMES_UP:
                return not console.is_hang(self.ending().text)
        return True

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the command's stdout as they come, without their newline.

        Ends with the guest.
        """
        while True:
            if (line := self._lines.get()) is None:
                self._lines.put(None)
                return
            yield line

    def send(self, line: str) -> None:
        """Write a line to the command's stdin; raises TestFailure when the guest has ended."""
        # User-Mode Linux loses bytes that are sent before it opens its end.
        while self.accel == "um" and not self._ready.wait(0.1):
            if not self._reader.is_alive():
                break
        try:
            self._ours["in"].sendall(line.encode() + b"\n")
        except OSError:
            self.fail_early()

    def qmp(self, command: str, **arguments: object) -> Any:
        """Run a QMP command and return its answer; raises LabError when QEMU refuses."""
        from qemu.qmp import QMPError
        from qemu.qmp.legacy import QEMUMonitorProtocol

        try:
            if self._monitor is None:
                self._monitor = QEMUMonitorProtocol(self._ours["qmp"])
                self._monitor.connect()
            return self._monitor.cmd(command, **arguments)
        except QMPError as error:
            fix = "check the command and its arguments"
            raise LabError(f"QEMU refuses {command}", str(error), fix) from None

    def wait(self) -> BootResult:
        """Wait for the end of the guest and judge it.

        TestFailure: it was late, died before it reported, or its kernel reported a fault. LabError:
        QEMU did not start.
        """
        while self._reader.is_alive():
            self._reader.join(0.2)  # in slices: Ctrl-C is seen
        if self._broken:
            raise self._broken
        ending = self.ending()
        if self._exit is None:
            raise ending.failure()
        if fault := ending.fault():
            raise fault
        out, err = (one.decode(errors="replace") for one in (self._out, self._err))
        took, faults = self._ended - self._began, ending.faults()
        return BootResult(
            out,
            err,
            self._exit,
            self.console,
            self.accel,
            took,
            faults,
            self.accel_reason,
        )

    def fail_early(self) -> NoReturn:
        """Raise the error of a guest that ended while it was needed; see ``wait``."""
        self.wait()
        why = f"its command ended with {self._exit} (console: {self.console})"
        raise TestFailure(
            "the guest ended before it read its next command", why, "look at the console log"
        )

    def _close_ends(self) -> None:
        for end in self._ours.values():
            end.close()
        if self.daemon:
            self.daemon.close()
        hugepages.give_back(self.huge_pages)
        self.huge_pages = None

    def close(self) -> None:
        if self.process.poll() is None:
            if self.interactive:
                self.process.kill()
            else:
                run.end_group(self.process, 0.5)
        self._reader.join(15)
        if self._monitor is not None:
            with contextlib.suppress(Exception):  # the peer has ended
                self._monitor.close()
        self._close_ends()
        self._initrd_file.unlink(missing_ok=True)


Keep = Callable[[Guest], None]


def forget(guest: Guest) -> None:
    """Keep nothing of a guest that has ended."""


@contextlib.contextmanager
def running(spec: BootSpec, keep: Keep = forget) -> Iterator[Guest]:
    """A running guest, ended with the block; judged, and started again, as by ``boot``.

    ``keep`` gets each guest that has ended, while its logs exist.
    """
    images = resolve.images(spec)
    guest = Guest(spec, images)
    if not guest.comes_up():
        ending = guest.ending()
        _note_again(f"{ending.shown()}\n{console.last_lines(ending.log())}".rstrip())
        guest.close()
        keep(guest)
        guest = Guest(spec, images)
    try:
        try:
            yield guest
        except Exception as error:
            # A fault of the kernel explains the rest, or is worse.
            if fault := guest.ending().fault():
                # An emulator's fault is raised without its cause: the test is repeated for it, and
                # for no other.
                raise fault from (None if isinstance(fault, EmulatorFault) else error)
            raise
        if fault := guest.ending().fault():
            raise fault
    finally:
        guest.close()
        keep(guest)


def boot(spec: BootSpec, *sinks: Sink, keep: Keep = forget) -> BootResult:
    """Boot, run the command to its end, and return its output; see ``Guest.wait`` for errors.

    Under emulation one boot in some hundreds hangs before user space, dies there of
    ``console.timer_race`` or ``console.stale_section``, or has no channels (``console.no_port``):
    such a guest is started again, once, with a note. No other fault is forgiven. ``keep`` as for
    ``running``.
    """
    images = resolve.images(spec)
    try:
        return _boot_once(spec, images, sinks, keep)
    except NeverCameUp as early:
        _note_again(f"{early.what}: {early.why}")
    return _boot_once(spec, images, sinks, keep)


def _note_again(why: str) -> None:
    started_again.append(why)
    progress.note(f"starting the guest again, since it never was ready: {why}")


def _boot_once(spec: BootSpec, images: Images, sinks: Sequence[Sink], keep: Keep) -> BootResult:
    guest = Guest(spec, images, talks=False, sinks=sinks)
    try:
        return guest.wait()
    finally:
        guest.close()
        keep(guest)


def interactive(spec: BootSpec) -> int:
    """A guest on this terminal; returns the exit code of its command."""
    saved = termios.tcgetattr(0) if sys.stdin.isatty() else None
    guest = Guest(spec, resolve.images(spec), interactive=True)
    try:
        if saved is not None:
            tty.setraw(0)
        return guest.wait().exit_code
    finally:
        guest.close()
        if saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
