# SPDX-License-Identifier: GPL-2.0
"""Guests of a bench, stepped from the host, and the costs they have there."""

import contextlib
import json
import mmap
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench.plan import BenchOptions
from lab.boot.argv import HUGE, WITH_HUGE
from lab.boot.guest import Guest, Keep, forget, running
from lab.boot.spec import BootSpec
from lab.core import run
from lab.core.errors import LabError, TestFailure

PAGE = 4096
MIB = 1 << 20
BALLOON = "virtio-balloon-pci,free-page-reporting=on"
# The shell in the guest: each line is a command, after which a line has its exit code.
LOOP = 'while IFS= read -r line; do eval "$line" </dev/null; echo "@done $?"; done'
DONE = "@done "
FLUSH = "/sys/kernel/mm/page_reporting/flush"
DELAY = "/sys/module/page_reporting/parameters/page_reporting_delay_ms"
LATE = f"echo 3600000 > {DELAY}"  # reports only come when they are measured
AT_ONCE = f"echo 1 > {DELAY}"
USUAL = f"echo 2000 > {DELAY}"  # the default; a bench has shorter delays
# Pages in the lists of a CPU are never reported. A flush drains these lists, and base has no flush.
# A low limit while a few pages are freed drains them on both sides.
LISTS = "/proc/sys/vm/percpu_pagelist_high_fraction"
DROP = (
    f"echo 3 > /proc/sys/vm/drop_caches; echo 100000 > {LISTS}; for i in 1 2 3 4 5 6 7 8; do cat "
    f"/proc/self/stat > /dev/null; done; echo 0 > {LISTS}"
)
PRIORITY = -10  # above ordinary programs, which then disturb less
DELAY_MS = 100  # so long that no report comes while the job still frees memory
# While nothing runs but reports: base reports in rounds, with this delay between them
SETTLE_MS = 10
STILL_S = 0.1
STILL_FIXED_S = 2.5  # of a kernel that has neither the delay nor a flush: it reports every 2 s
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
CPUCLOCK_SCHED = 2  # of the kernel's numbers of clocks: the CPU time of all threads


def resident(pid: int) -> int:
    """Resident bytes of a process, with huge pages of the pool, which statm leaves out."""
    found = re.search(r"(?m)^HugetlbPages:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text())
    small = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    return small + (int(found[1]) * 1024 if found else 0)


def cpu_ns(pid: int) -> int:
    """CPU time of a process in nanoseconds, also of its threads that have ended.

    OSError if the process has ended.
    """
    # The number of its clock, as clock_getcpuclockid(3) makes it. Python has no such function.
    return time.clock_gettime_ns(~pid << 3 | CPUCLOCK_SCHED)


@contextmanager
def held_host(size: int) -> Iterator[None]:
    """Hold ``size`` bytes of memory that the machine has, and free them at the end.

    If the machine is a guest, its free memory may have been reported. The next process that uses
    such memory waits for the host.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        try:
            with contextlib.suppress(OSError):  # QEMU asks for huge pages as well
                area.madvise(mmap.MADV_HUGEPAGE)
            area.madvise(POPULATE_WRITE)
        except OSError:
            for offset in range(0, size, PAGE):
                area[offset] = 1
        yield


def warm_host(size: int) -> None:
    """Have the machine back ``size`` bytes of its free memory; see ``held_host``.

    What is not used soon may be reported again.
    """
    with held_host(size):
        pass


def raise_priority(pid: int) -> bool:
    """Run all threads of a process above ordinary programs; False when that is not allowed."""
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), PRIORITY)
    except (PermissionError, ProcessLookupError):
        return False
    return True


@dataclass
class Side:
    """One running guest: ``name`` is base or ours, or that of a row; ``kernel``: base or ours."""

    name: str
    guest: Guest
    has_flush: bool = False
    has_delay: bool = True
    kernel: str = ""
    lines: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kernel = self.kernel or self.name
        self.lines = iter(self.guest.lines)

    def sh(self, command: str, *, check: bool = True) -> list[str]:
        """Run one line of shell in the guest; its lines of output. TestFailure when it fails."""
        self.guest.send(command)
        output: list[str] = []
        for line in self.lines:
            text = line.rstrip("\r\n")
            if not text.startswith(DONE):
                output.append(text)
                continue
            code = int(text.removeprefix(DONE))
            if code and check:
                why = "\n".join([f"`{command}` ended with exit code {code}", *output[-8:]])
                fix = (
                    "run the same command with `kz boot … -- sh -c '…'` and read the guest's "
                    "console log"
                )
                raise TestFailure(f"A step of the bench failed in the {self.name} guest", why, fix)
            return output
        try:
            self.guest.fail_early()
        except TestFailure as why:
            about = "\n".join([f"it was running `{command}`", *output[-8:], why.what, why.why])
            what = f"The {self.name} guest ended in the middle of a bench"
            # Of its own kind: a test may repeat what a fault of the emulator has ended.
            raise type(why)(what, about, why.fix) from None

    def number(self, command: str) -> int:
        return int(self.sh(command)[-1])

    def vmstat(self) -> dict[str, int]:
        """The counters of the guest's kernel as they are now."""
        return {name: int(value) for name, value in map(str.split, self.sh("cat /proc/vmstat"))}

    def json(self, *argv: str) -> dict[str, Any]:
        """Run a guest program that prints one JSON object; the object."""
        lines = self.sh(shlex.join(argv))
        with contextlib.suppress(IndexError, ValueError):
            found = json.loads(lines[-1])
            if isinstance(found, dict):
                return found
        what = f"A guest program printed no JSON ({self.name})"
        raise TestFailure(
            what, f"`{shlex.join(argv)}` printed {lines!r}", "run it with `kz boot … --`"
        )

    @property
    def processes(self) -> list[int]:
        """The processes that run the guest: QEMU, and the daemon if there is one."""
        daemon = self.guest.daemon
        return [self.guest.pid, *([daemon.process.pid] if daemon else [])]

    def prepare(self) -> None:
        """Set the guest up once: priority, a short report delay, and whether it can flush."""
        for pid in self.processes:
            raise_priority(pid)
        self.find_knobs()
        if self.has_delay:
            self.sh(f"echo {DELAY_MS} > {DELAY}")

    def find_knobs(self) -> None:
        """See what the kernel lets one change about reports."""
        self.has_flush, self.has_delay = (
            self.sh(f"test -e {file} && echo yes || echo no")[-1] == "yes"
            for file in (FLUSH, DELAY)
        )

    def free_and_report(self) -> None:
        """Drop caches, empty the CPU's lists, and flush if the kernel can.

        Reports are quick until ``reported``.
        """
        quick = f"delay=$(cat {DELAY}); echo {SETTLE_MS} > {DELAY}; " if self.has_delay else ""
        self.sh(f"{quick}{DROP}")
        if self.has_flush:
            self.sh(f"echo 0 > {FLUSH}")

    def reported(self, timeout: float) -> int:
        """Wait until the VMM stops shrinking, and put the delay of reports back.

        The VMM's resident bytes.
        """
        what, waits = f"the {self.name} guest", not (self.has_flush or self.has_delay)
        still_s = STILL_FIXED_S if waits else STILL_S
        size = settle_resident(self.guest.pid, timeout=timeout, what=what, still_s=still_s)
        if self.has_delay:
            self.sh(f"echo $delay > {DELAY}")
        return size

    def settle(self, timeout: float = 60.0) -> int:
        """Have all free memory reported; the VMM's resident bytes.

        TestFailure after ``timeout`` seconds.
        """
        self.free_and_report()
        return self.reported(timeout)


def settle_both(sides: Sequence[Side]) -> None:
    """Caches dropped and free memory reported in all guests; the waiting overlaps."""
    for side in sides:
        side.free_and_report()
    for side in sides:
        side.reported(timeout=60)


def settle_resident(pid: int, *, timeout: float, what: str, still_s: float = STILL_S) -> int:
    """Wait until the resident size of a process has moved by less than 1 MiB for ``still_s``
    seconds.
    """
    return settled(lambda: resident(pid), timeout, f"The resident size of {what}", still_s)


def settled(
    look: Callable[[], int], timeout: float, what: str, still_s: float, by: int = MIB
) -> int:
    """Wait until a number of bytes has moved by at most ``by`` for ``still_s`` seconds.

    TestFailure if it does not.
    """
    began = time.monotonic()
    mark, since = look(), began
    while True:
        time.sleep(still_s / 4)
        now, size = time.monotonic(), look()
        if abs(size - mark) > by:
            mark, since = size, now
        elif now - since >= still_s:
            return size
        if now - began > timeout:
            why = f"after {timeout:.0f} s it still moves, {size // MIB} MiB now"
            fix = "see whether something else runs in the guest, or whether the machine is swapping"
            raise TestFailure(f"{what} does not settle", why, fix)


def spec_for(options: BenchOptions, kernel: str | Path, qemu: Path, **more: Any) -> BootSpec:
    """The boot of one side; ``more`` overrides fields of BootSpec."""
    fields: dict[str, Any] = {"kernel": kernel, "qemu": qemu, "memory": options.memory}
    fields |= {
        "accel": options.accel,
        "devices": [BALLOON],
        "timeout": max(1800.0, 600.0 * options.pairs),
        "command": ["sh", "-c", LOOP],
    }
    fields |= {"daemon_profile": "release"} | more
    return BootSpec(**fields)


def shared_memory() -> str:
    """The memory of guests with the daemon: with huge pages where this user may have them."""
    return HUGE if run.ask([*WITH_HUGE, "true"]).returncode == 0 else ""


class Wanted(NamedTuple):
    """The name and the boot of a side; ``kernel`` as of ``Side``."""

    name: str
    spec: BootSpec
    kernel: str = ""


@contextmanager
def guests(specs: Sequence[Wanted], keep: Keep = forget) -> Iterator[list[Side]]:
    """Boot and prepare guests; LabError for unlike accelerators.

    ``keep`` gets each guest that has ended.
    """
    with ExitStack() as stack:
        sides = []
        for name, spec, kernel in specs:
            guest = stack.enter_context(running(replace(spec, label=name), keep))
            side = Side(name, guest, kernel=kernel)
            # One after the other: the CPUs of many guests that boot at once time out waiting for
            # each other.
            side.sh("true")
            sides.append(side)
        accels = sorted({side.guest.accel for side in sides})
        if len(accels) != 1:
            why = f"the guests run on {' and '.join(accels)}"
            raise LabError("Cannot measure", why, "name one with --accel")
        for side in sides:
            side.prepare()
        yield sides
        for side in sides:
            side.sh("true")  # fails if the guest has ended since its last step
