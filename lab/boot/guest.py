# SPDX-License-Identifier: GPL-2.0
"""Boot a kernel, run one command in it, and bring back what it said and how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lab.boot import accel, console, initramfs
from lab.build import daemon
from lab.build import linux as build
from lab.core import paths, progress, run
from lab.core.errors import MACHINE, USAGE, LabError, TestFailure, UsageError
from lab.machine import stock

# A kernel that went wrong ends its guest at once, and nobody waits for what its tasks will never say.
ENDS = "panic=-1 oops=panic"
# A kernel under KVM skips the check of its timer by itself; an emulated one on a busy machine may miss
# the ticks that the check counts, and panic.
APPEND = f"console=ttyS0 {ENDS} mitigations=off no_timer_check"
# An emulated counter jumps when its thread waits: it is neither timed nor watched. Delays as at 3 GHz and 250 Hz.
# A nice task (khugepaged) preempted in an RCU section waits for all others, many times as long as on hardware.
APPEND_TCG = "tsc=reliable lpj=12000000 rcupdate.rcu_cpu_stall_timeout=100"
APPEND_ARM64 = f"console=ttyAMA0 {ENDS} mitigations=off"
APPEND_UM = f"con=null con0=null,fd:1 console=tty0 earlyprintk {ENDS}"
KEEP_RUNS = 200
VHOST_USER = "vhost-user"
BOOTED = ("x86_64", "um", "i386", "arm64")
# As -m takes it, with what may follow (slots, the most of it); and as mem= does.
MEMORY = re.compile(r"(?:size=)?(?=[\d.]*[1-9])\d+(?:\.\d+)?[BKMGT]?(?:,.*)?", re.IGNORECASE)
MEMORY_UM = re.compile(r"(?=\d*[1-9])\d+[KMG]", re.IGNORECASE)
# QEMU names the option that it refuses. The accelerator, and memory, may be refused by the machine.
_REFUSED = re.compile(r"^[^\n:]+: -(?!accel\b)[a-z][\w-]*[ :]", re.MULTILINE)
_NO_ROOM = re.compile(r"Cannot allocate memory|No space left|Permission denied")
VIRTIO_ID_BALLOON = 5
LAST_WORDS = 10.0  # seconds a guest gets to switch off after it has reported
COMES_UP = 120.0  # seconds in which an emulated guest has reached user space, on the slowest of machines
_numbers = itertools.count()
_libc = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec


def _die_with_parent() -> None:
    """Between fork and exec: be killed when the thread that forked ends (PR_SET_PDEATHSIG)."""
    _libc.prctl(1, signal.SIGKILL, 0, 0, 0)


class EmulatorFault(TestFailure):
    """An emulated guest's kernel ended by what its emulator did wrong."""


class _NeverCameUp(TestFailure):
    """An emulated guest hung before it reached user space, or died there of what ``Guest.died_of_others`` tells."""


# What such guests said that were then started again: a run of tests tells it at its end.
started_again: list[str] = []
# Told of each guest that has ended, while the logs of its boot are there; by the thread that ends it.
ended: list[Callable[[Guest], None]] = []


@dataclass
class BootSpec:
    """One boot. ``kernel``: base, knownzero, off, debug, stock, or the path of an image.

    A device ``vhost-user`` is our daemon, started beside the guest; what follows a comma are its
    options: ``vhost-user,target=256M``.
    """

    kernel: str | Path = "knownzero"
    qemu: str | Path | None = None  # None: ours; "stock": the distribution's; or a path
    memory: str = "2G"
    cpus: int = 1
    devices: list[str] = field(default_factory=list)
    append: str = ""
    initrd: Path | None = (
        None  # of a system of its own, which runs the command by itself: see lab/boot/debian.py
    )
    add: list[tuple[Path, str]] = field(default_factory=list)
    accel: str = "auto"
    timeout: float = 300.0
    command: list[str] = field(default_factory=lambda: ["true"])
    extra_qemu: list[str] = field(default_factory=list)
    allow_warnings: bool = False
    arch: str = "x86_64"
    console_lines: Callable[[bytes], None] | None = None  # shown what comes on stdout, as it comes
    errors: Callable[[bytes], None] | None = None  # the same for stderr
    daemon_profile: str = "dev"  # of cargo: dev or release
    shared_memory: str = ""  # more about the memory that the daemon sees: hugetlb=on,hugetlbsize=2M
    mte: bool = False  # memory tags, which an arm64 machine can have
    label: str = ""  # what people call this guest, if there are several


@dataclass
class BootResult:
    """How a boot went. ``seconds`` is wall time from start to end of QEMU."""

    stdout: str
    stderr: str
    exit_code: int
    console: Path
    accel: str
    seconds: float
    violations: list[str]
    stdout_bytes: bytes = b""

    @property
    def console_text(self) -> str:
        """The whole console log."""
        return self.console.read_text(errors="replace")


def run_folder() -> Path:
    """A folder for the logs of one boot, under out/boot; the oldest ones go."""
    root = paths.out() / "boot"
    root.mkdir(exist_ok=True)
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    old = sorted(root.iterdir())[:-KEEP_RUNS]
    for gone in old:
        with contextlib.suppress(OSError):
            if time.time() - gone.stat().st_mtime > 3600:
                shutil.rmtree(gone)
    return folder


def resolve_kernel(kernel: str | Path, arch: str = "x86_64") -> tuple[Path, list[Path]]:
    """The image of a kernel (built when needed) and the modules it must load."""
    if str(kernel) in build.VARIANTS:
        return build.build_linux(str(kernel), arch), []
    if str(kernel) == "stock":
        return stock.kernel()
    path = Path(kernel)
    if not path.is_file():
        raise LabError(
            f"no kernel {kernel}",
            "it is neither a variant (base, knownzero, off, debug, stock) nor a file",
            "name one of them",
            2,
        )
    return path.absolute(), []


def resolve_qemu(qemu: str | Path | None, arch: str = "x86_64") -> Path:
    """The QEMU to use: ours unless told otherwise, or the distribution's for another processor."""
    if qemu is None and arch == "arm64":
        return stock.qemu(arch)
    if qemu is None:
        return build.build_qemu("knownzero")
    if str(qemu) in build.QEMU_VARIANTS:
        return build.build_qemu(str(qemu))
    if str(qemu) == "stock":
        return stock.qemu()
    path = Path(qemu)
    if not path.is_file():
        raise LabError(
            f"no QEMU {qemu}",
            "it is neither a variant (base, knownzero, stock) nor a file",
            "name one of them with --qemu",
            2,
        )
    return path.absolute()


def _refuse(spec: BootSpec) -> None:
    """UsageError for what no guest can have; whatever else only QEMU knows, QEMU refuses."""
    if spec.arch not in BOOTED:
        raise UsageError("Bad --arch", f"nothing here boots a guest of '{spec.arch}'", f"use {_or(BOOTED)}")
    if spec.mte and spec.arch != "arm64":
        raise UsageError(
            "no memory tags here", f"the machine is {spec.arch}", "give --mte with --arch arm64 only"
        )
    sized = MEMORY_UM if spec.arch == "um" else MEMORY
    if not sized.fullmatch(spec.memory):
        raise UsageError(
            "Bad --memory", f"'{spec.memory}' is not an amount of memory", "write it as 2G or 2048M"
        )
    if spec.arch != "um":
        return
    for option, given, why in (
        ("--device", [name for name in spec.devices if name.split(",")[0] != VHOST_USER], "it has no QEMU"),
        ("--qemu", spec.qemu, "it has no QEMU"),
        ("--qemu-arg", spec.extra_qemu, "it has no QEMU"),
        (
            "--accel",
            spec.accel if spec.accel not in ("auto", "um") else "",
            "it runs on the machine's own CPU",
        ),
        ("--cpus", spec.cpus if spec.cpus != 1 else 0, "it has one CPU"),
    ):
        if given:
            raise UsageError(
                f"Bad {option}",
                f"the guest is User-Mode Linux: {why}",
                f"leave it out, or choose another --arch; its one device is --device {VHOST_USER}",
            )


def _or(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


class Guest:
    """A guest that runs. Made by ``running`` and ``boot``; ended by ``close`` at the latest."""

    def __init__(self, spec: BootSpec, interactive: bool = False, talks: bool = True) -> None:
        _refuse(spec)
        self.spec = spec
        self.folder = run_folder()
        self.console = self.folder / "console.log"
        self.console.touch()
        self.interactive = interactive
        self._control = b""
        self._out = bytearray()
        self._err = bytearray()
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._exit: int | None = None
        self._taint = 0
        self._late = False
        self._ready = threading.Event()
        self.daemon: daemon.Daemon | None = None
        self.kernel: Path | None = None  # the images it runs on
        self.qemu: Path | None = None
        self._monitor: Any = None
        self._ours: dict[str, socket.socket] = {}
        theirs: dict[str, socket.socket] = {}
        self.talks = talks
        names = ["ctl", "qmp"] if interactive else ["ctl", "out", "err", "qmp"]
        if spec.arch == "um":
            names = ["ctl", "out", "err", "con"]
        if talks and not interactive:
            names.append("in")
        for name in names:
            self._ours[name], theirs[name] = socket.socketpair()
        try:
            self._start_daemon()
            argv = self._um_argv(theirs) if spec.arch == "um" else self._qemu_argv(theirs)
            (self.folder / "command").write_text(
                "\n".join(argv) + "\n", encoding="utf-8", errors="surrogateescape"
            )
            self._began = time.monotonic()
            self.process = self._start(argv, theirs)
        except BaseException:
            for end in self._ours.values():
                end.close()
            if self.daemon:
                self.daemon.close()
            raise
        finally:
            for end in theirs.values():
                end.close()
        self.pid = self.process.pid
        self._ended = self._began
        self._reader = threading.Thread(target=self._read, name="guest", daemon=True)
        self._reader.start()

    def _start(self, argv: list[str], ends: dict[str, socket.socket]) -> subprocess.Popen[bytes]:
        with (self.folder / "vmm.log").open("wb") as log:
            # User-Mode Linux has its console, from the first message on, on stdout.
            output = ends["con"].fileno() if "con" in ends else None if self.interactive else log
            try:
                return subprocess.Popen(
                    argv,
                    stdin=None if self.interactive else subprocess.DEVNULL,
                    stdout=output,
                    stderr=log,
                    pass_fds=[end.fileno() for end in ends.values()],
                    # A terminal stays usable only in its own session.
                    start_new_session=not self.interactive,
                    # Not even SIGKILL for us may leave a guest behind.
                    preexec_fn=_die_with_parent,
                )
            except OSError as error:
                raise LabError(
                    f"cannot start {argv[0]}",
                    error.strerror or str(error),
                    "check that it is a program for this machine",
                ) from None

    def _start_daemon(self) -> None:
        wanted = [device for device in self.spec.devices if device.split(",")[0] == VHOST_USER]
        if len(wanted) > 1:
            raise LabError("two balloons", "a guest can have one only", "give --device vhost-user once", 2)
        for device in wanted:
            options = [f"--{option}" for option in device.split(",")[1:]]
            self.daemon = daemon.Daemon(daemon.build(self.spec.daemon_profile), options, self.folder)

    def _initrd(self, channels: str, modules: list[Path]) -> Path:
        if self.spec.initrd:
            return self.spec.initrd
        initrd = self.folder / "initrd.cpio"
        mode = f"{channels} in" if self.talks else channels
        initramfs.write(initrd, self.spec.command, mode, self.spec.add, modules, self.spec.arch)
        return initrd

    def _counter(self) -> str:
        """How fast the emulated time stamp counter counts, which is the machine's own.

        A kernel that finds it out with emulated timers, on a busy machine, may be wrong by a factor of six.
        """
        if "-icount" in self.spec.extra_qemu:
            return ""  # 1 GHz of a virtual clock, in which nothing is late
        khz = accel.tsc_khz()
        return f" tsc_early_khz={khz}" if khz else ""

    def _qemu_argv(self, ends: dict[str, socket.socket]) -> list[str]:
        spec = self.spec
        kernel, modules = resolve_kernel(spec.kernel, spec.arch)
        qemu = resolve_qemu(spec.qemu, spec.arch)
        self.kernel, self.qemu = kernel, qemu
        self.accel = accel.choose(spec.accel, qemu, kernel, spec.arch)
        initrd = self._initrd("tty" if self.interactive else "ports", modules)
        argv = [
            str(qemu),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-machine",
            ("virt,mte=on" if spec.mte else "virt") if spec.arch == "arm64" else "q35",
        ]
        argv += accel.cpu(self.accel, spec.arch, spec.mte)
        argv += ["-m", spec.memory, "-smp", str(spec.cpus), "-kernel", str(kernel), "-initrd", str(initrd)]
        append = APPEND_ARM64 if spec.arch == "arm64" else APPEND
        if spec.arch == "x86_64" and self.accel == "tcg":
            append += f" {APPEND_TCG}{self._counter()}"
        argv += ["-append", f"{append} {spec.append}".strip()]
        argv += ["-chardev", f"file,id=kzconsole,path={self.console}", "-serial", "chardev:kzconsole"]
        argv += ["-device", "virtio-serial-pci,id=kzserial"]
        for name, end in ends.items():
            argv += ["-chardev", f"socket,id=kz{name},fd={end.fileno()}"]
            if name == "qmp":
                argv += ["-mon", "chardev=kzqmp,mode=control"]
            else:
                argv += ["-device", f"virtserialport,chardev=kz{name},name=kz.{name}"]
        if self.interactive:
            argv += ["-chardev", "stdio,id=kztty,signal=off", "-device", "virtconsole,chardev=kztty"]
        if self.daemon:
            # Memory that two processes see, and a socket that is taken again when it was lost.
            more = f",{spec.shared_memory}" if spec.shared_memory else ""
            argv += ["-object", f"memory-backend-memfd,id=kzmemory,size={spec.memory},share=on{more}"]
            argv += ["-machine", "memory-backend=kzmemory"]
            argv += ["-chardev", f"socket,id=kzballoon,path={self.daemon.socket},reconnect-ms=100"]
            argv += ["-device", "vhost-user-balloon-pci,chardev=kzballoon"]
        for device in spec.devices:
            if device.split(",")[0] != VHOST_USER:
                argv += ["-device", device]
        return argv + spec.extra_qemu

    def _um_argv(self, ends: dict[str, socket.socket]) -> list[str]:
        spec = self.spec
        kernel, _ = resolve_kernel(spec.kernel, "um")
        self.kernel = kernel
        self.accel = "um"
        initrd = self._initrd("ssl", [])
        argv = [str(kernel), f"mem={spec.memory}", f"initrd={initrd}", *APPEND_UM.split()]
        for number, name in enumerate(name for name in ("ctl", "out", "err", "in") if name in ends):
            argv.append(f"ssl{number}=fd:{ends[name].fileno()},fd:{ends[name].fileno()}")
        if self.daemon:
            argv.append(f"virtio_uml.device={self.daemon.socket}:{VIRTIO_ID_BALLOON}")
        return argv + spec.append.split()

    # What comes from the guest.

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
                    elif key.data in files:
                        files[key.data].write(data)
                        files[key.data].flush()
                    self._take(key.data, data)
                if self._exit is not None:
                    deadline = min(deadline, self._reported + LAST_WORDS)
                if time.monotonic() > deadline:
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

    def _take(self, name: str, data: bytes) -> None:
        if name == "out":
            self._out += data
            *whole, self._partial = (self._partial + data).split(b"\n")
            for line in whole:
                self._lines.put(line.decode(errors="replace"))
            if self.spec.console_lines and data:
                self.spec.console_lines(data)
        elif name == "err":
            self._err += data
            if self.spec.errors and data:
                self.spec.errors(data)
        elif name == "ctl":
            *whole, self._control = (self._control + data).split(b"\n")
            for line in whole:
                self._report(line.decode(errors="replace"))

    def _report(self, line: str) -> None:
        match = re.fullmatch(r"(ready|taint|exit) (-?\d+)\r?", line)
        if not match:
            return
        if match[1] == "ready":
            self._ready.set()
        elif match[1] == "taint":
            self._taint = int(match[2])
        else:
            self._exit = int(match[2])
            self._reported = time.monotonic()

    def _console_text(self) -> str:
        return self.console.read_text(errors="replace")

    # What callers use.

    def comes_up(self) -> bool:
        """Wait for user space; False when an emulated guest never came up for no fault of ours.

        One that is told not to start by itself (-S) is not waited for.
        """
        if self.accel != "tcg" or "-S" in self.spec.extra_qemu:
            return True
        while not self._ready.wait(0.1):
            if not self._reader.is_alive():
                return self._ready.is_set() or not self.died_of_others(self._console_text())
            if time.monotonic() > self._began + COMES_UP:
                return not console.is_hang(self._console_text())
        return True

    @property
    def lines(self) -> Iterator[str]:
        """Lines of the command's stdout as they come, without their newline; ends with the guest."""
        while True:
            line = self._lines.get()
            if line is None:
                self._lines.put(None)
                return
            yield line

    def send(self, line: str) -> None:
        """Write a line to the command's stdin; raises TestFailure when the guest is gone."""
        # User-Mode Linux never hears of what was there before it opened its end.
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
            raise LabError(
                f"QEMU does not do {command}", str(error), "check the command and its arguments"
            ) from None

    def wait(self) -> BootResult:
        """Wait for the end of the guest and judge it.

        Raises TestFailure when it was late, died before it reported, or (unless warnings are
        allowed) when its kernel found fault with itself; LabError when QEMU did not start.
        """
        while self._reader.is_alive():
            self._reader.join(0.2)  # in slices: Ctrl-C is seen
        text = self._console_text()
        found = console.violations(text) + console.taint_reasons(self._taint)
        if self._exit is None:
            self._fail(text, found)
        result = BootResult(
            self._out.decode(errors="replace"),
            self._err.decode(errors="replace"),
            self._exit if self._exit is not None else 126,
            self.console,
            self.accel,
            self._ended - self._began,
            found,
            bytes(self._out),
        )
        if found and not self.spec.allow_warnings:
            if fault := self.emulator_fault(text):
                raise fault
            raise TestFailure(
                f"the guest's kernel reported a fault (its command ended with {result.exit_code})",
                f"{_shown(text, found)}\n(console: {self.console})",
                "read the console log; --allow-warnings lets such a run pass",
            )
        return result

    def emulator_fault(self, text: str) -> EmulatorFault | None:
        """What a console log tells of the emulator, if that is to blame."""
        if self.accel != "tcg" or self.spec.cpus < 2 or not console.stale_breakpoint(text):
            return None
        return EmulatorFault(
            "an emulated CPU ran code that was no longer there",
            f"its kernel met a breakpoint that had been taken out (console: {self.console})",
            "run it again; if it comes back, it is not the emulator",
        )

    def died_of_others(self, text: str) -> bool:
        """Whether a guest with this console died of a race of Linux or of the emulator that is known, and no other."""
        if console.timer_race(text):
            return True
        return self.spec.cpus > 1 and not console.violations(text) and console.stale_section(self._vmm_log())

    def _vmm_log(self) -> str:
        return (self.folder / "vmm.log").read_text(errors="replace").strip()

    def _fail(self, text: str, found: list[str]) -> None:
        if fault := self.emulator_fault(text):
            raise fault
        forgiven = self.died_of_others(text) or (self._late and console.is_hang(text))
        early = self.accel == "tcg" and not self._ready.is_set()
        failure = _NeverCameUp if early and forgiven else TestFailure
        where = f"{_shown(text, found)}\n(console: {self.console})"
        if self._late:
            raise failure(
                f"the guest did not finish within {self.spec.timeout:g} s",
                f"it {'was running its command' if self._ready.is_set() else 'had not reached user space'}; its console last said:\n{where}",
                "look at the console log, or give it longer with --timeout",
            )
        log = self._vmm_log()
        if not text.strip() and self.process.returncode:
            raise LabError(
                "the guest did not start",
                console.last_lines(log)
                + f"\n(exit code {self.process.returncode}, log: {self.folder / 'vmm.log'})",
                "check the devices and options given; `kz doctor` shows the state of the machine",
                USAGE if _REFUSED.search(log) and not _NO_ROOM.search(log) else MACHINE,
            )
        raise failure(
            f"the guest died before its command reported (QEMU's exit code {self.process.returncode})",
            where + (f"\n{console.last_lines(log)}" if log else ""),
            "look at the console log",
        )

    def fail_early(self) -> NoReturn:
        """Say why a guest is gone that was still needed; TestFailure or LabError, see ``wait``."""
        self.wait()
        raise TestFailure(
            "the guest ended while it was being talked to",
            f"its command ended with {self._exit} (console: {self.console})",
            "look at the console log",
        )

    def close(self) -> None:
        """End the guest, whatever it is doing, and forget its large files."""
        if self.process.poll() is None:
            if self.interactive:
                self.process.kill()
            else:
                run.end_group(self.process, 0.5)
        self._reader.join(15)
        if self._monitor is not None:
            with contextlib.suppress(Exception):  # the peer is gone; nothing is left to lose
                self._monitor.close()
        for end in self._ours.values():
            end.close()
        if self.daemon:
            self.daemon.close()
        (self.folder / "initrd.cpio").unlink(missing_ok=True)
        for told in ended:
            told(self)


def _shown(text: str, found: list[str]) -> str:
    """The faults of a console, the first of them with what the kernel said about it; its end if there are none."""
    if not found:
        return console.last_lines(text)
    first = console.first_report(text)
    more = [line for line in found if line not in first]
    left = [f"… and {len(more) - 12} more"] if len(more) > 12 else []
    return "\n".join(part for part in (first, *more[:12], *left) if part)


def _fault(guest: Guest) -> TestFailure | None:
    """What a guest's console tells that must fail a test."""
    text = guest._console_text()
    found = console.violations(text)
    if not found or guest.spec.allow_warnings:
        return None
    return guest.emulator_fault(text) or TestFailure(
        "the guest's kernel reported a fault",
        f"{_shown(text, found)}\n(console: {guest.console})",
        "read the console log",
    )


@contextlib.contextmanager
def running(spec: BootSpec) -> Iterator[Guest]:
    """A running guest to talk to; it is ended with the block.

    A guest that was not waited for is judged by its console all the same. One that never came up is
    started again as ``boot`` does it.
    """
    guest = Guest(spec)
    if not guest.comes_up():
        text = guest._console_text()
        log = console.last_lines(guest._vmm_log())
        _note_again(f"{_shown(text, console.violations(text))}\n(console: {guest.console})\n{log}".rstrip())
        guest.close()
        guest = Guest(spec)
    try:
        try:
            yield guest
        except Exception as error:
            # What the kernel has to say explains the rest, or is worse.
            if fault := _fault(guest):
                # The cause is not named where it is the emulator: for that the test is repeated, for the other never.
                raise fault from (None if isinstance(fault, EmulatorFault) else error)
            raise
        if guest._reader.is_alive() and (fault := _fault(guest)):
            raise fault
    finally:
        guest.close()


def boot(spec: BootSpec) -> BootResult:
    """Boot, run the command to its end, and return what it said; see ``Guest.wait`` for errors.

    Under emulation one boot in some hundreds hangs in the first seconds, before user space: such a guest
    is started again, once, and that is said. So is one that dies there of ``console.timer_race`` or
    ``console.stale_section``, each of which was seen once. Whatever else a kernel finds fault with is never forgiven.
    """
    try:
        return _boot_once(spec)
    except _NeverCameUp as early:
        _note_again(f"{early.what}: {early.why}")
    return _boot_once(spec)


def _note_again(why: str) -> None:
    started_again.append(why)
    progress.note(f"the guest did not reach user space, and is started again: {why}")


def _boot_once(spec: BootSpec) -> BootResult:
    guest = Guest(spec, talks=False)
    try:
        return guest.wait()
    finally:
        guest.close()


def interactive(spec: BootSpec) -> int:
    """A guest on this terminal; returns the exit code of its command."""
    saved = termios.tcgetattr(0) if sys.stdin.isatty() else None
    guest = Guest(spec, interactive=True)
    try:
        if saved is not None:
            tty.setraw(0)
        return guest.wait().exit_code
    finally:
        guest.close()
        if saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)
