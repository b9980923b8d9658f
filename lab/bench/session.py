# SPDX-License-Identifier: GPL-2.0
"""Two guests side by side, base and ours, stepped by turns from the host."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from lab.bench import BenchOptions
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from lab.build import ahead
from lab.build.images import metadata
from lab.build.linux import VARIANTS, build_linux, find_linux
from lab.build.qemu import build_qemu, find_qemu
from lab.core.errors import LabError, TestFailure
from lab.core.paths import REPO
from lab.machine import tools
from lab.report.evidence import SNAPSHOT

PAGE = 4096
MIB = 1 << 20
BALLOON = "virtio-balloon-pci,free-page-reporting=on"
# The guest's side: each line is a command; when it is done, a line says so with its exit code.
LOOP = 'while IFS= read -r line; do eval "$line" </dev/null; echo "@done $?"; done'
DONE = "@done "
FLUSH = "/sys/module/page_reporting/parameters/flush"
DELAY = "/sys/module/page_reporting/parameters/page_reporting_delay_ms"
# Nothing is reported but when it is measured.
LATE = f"echo 3600000 > {DELAY}"
# Pages that the guest's CPU keeps in lists of its own are never reported. A flush drains these lists,
# base has no flush: so both are made to drain them, by a low limit for as long as a few pages are freed.
LISTS = "/proc/sys/vm/percpu_pagelist_high_fraction"
DROP = (
    f"echo 3 > /proc/sys/vm/drop_caches; echo 100000 > {LISTS}; "
    f"for i in 1 2 3 4 5 6 7 8; do cat /proc/self/stat > /dev/null; done; echo 0 > {LISTS}"
)
# Above ordinary programs, so that what else the machine does disturbs less; both sides alike.
PRIORITY = -10
# Long enough not to run while the job is still freeing memory.
DELAY_MS = 100
# While nothing but reporting goes on. A kernel without flush reports in rounds, with the delay between them.
SETTLE_MS = 10
STILL_S = 0.1

POPULATE_WRITE = 23  # MADV_POPULATE_WRITE


@dataclass(frozen=True)
class HostCost:
    """What a step cost the VMM on its host: page faults, CPU seconds in the kernel and outside it."""

    faults: int
    system_s: float
    user_s: float


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def _cpu(pid: int) -> tuple[int, float, float]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[7]), int(fields[12]) / tick, int(fields[11]) / tick


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process, in nanoseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text().split()[0])
    return total


def warm_host(size: int) -> None:
    """Touch ``size`` bytes of the machine's free memory and give them back.

    A machine that is itself a guest may have lent its free memory out; without this the first
    touch would be charged to whichever side of a pair comes first.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        try:
            # In large pages where there are some, as QEMU asks for its guest's memory.
            with contextlib.suppress(OSError):
                area.madvise(mmap.MADV_HUGEPAGE)
            area.madvise(POPULATE_WRITE)
        except OSError:
            for offset in range(0, size, PAGE):
                area[offset] = 1


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
    """One running guest: ``name`` is base or ours."""

    name: str
    guest: Guest
    has_flush: bool = False
    kernel: str = ""
    steps: int = 0
    lines: Iterator[str] = field(init=False)

    def __post_init__(self) -> None:
        self.lines = iter(self.guest.lines)

    def sh(self, command: str, *, check: bool = True) -> list[str]:
        """Run one line of shell in the guest; its lines of output. TestFailure when it fails."""
        self.steps += 1
        self.guest.send(command)
        output: list[str] = []
        for line in self.lines:
            text = line.rstrip("\r\n")
            if text.startswith(DONE):
                code = int(text[len(DONE) :])
                if code and check:
                    raise TestFailure(
                        f"A step of the bench failed in the {self.name} guest",
                        f"`{command}` ended with exit code {code}\n" + "\n".join(output[-8:]),
                        "run the same command with `kz boot … -- sh -c '…'` and read the guest's console log",
                    )
                return output
            output.append(text)
        try:
            self.guest.fail_early()
        except TestFailure as why:
            raise TestFailure(
                f"The {self.name} guest ended in the middle of a bench",
                f"it was running `{command}`\n" + "\n".join([*output[-8:], why.what, why.why]),
                why.fix,
            ) from None

    def json(self, *argv: str) -> dict[str, Any]:
        """Run a guest program that prints one JSON line; the object."""
        lines = self.sh(shlex.join(argv))
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise TestFailure(
                f"A guest program said nothing that could be read ({self.name})",
                f"`{shlex.join(argv)}` printed {lines!r}",
                "run it with `kz boot … --` and look",
            ) from None
        if not isinstance(found, dict):
            raise TestFailure(
                f"A guest program gave no object ({self.name})", repr(found), "run it with `kz boot`"
            )
        return found

    def prepare(self) -> None:
        """Set the guest up once: a short report delay, and whether it can be told to flush."""
        raise_priority(self.guest.pid)
        self.sh(f"echo {DELAY_MS} > {DELAY}")
        self.has_flush = self.sh(f"test -e {FLUSH} && echo yes || echo no")[-1] == "yes"
        self.kernel = self.sh("uname -r")[-1]
        self.sh(SNAPSHOT)

    def free_and_report(self) -> None:
        """Drop caches, free what the CPU keeps back, and report now where the kernel can be told to.

        Reports follow each other quickly until ``reported``.
        """
        self.sh(f"delay=$(cat {DELAY}); echo {SETTLE_MS} > {DELAY}; {DROP}")
        if self.has_flush:
            self.sh(f"echo 0 > {FLUSH}")

    def reported(self, timeout: float) -> int:
        """Wait until the VMM stops shrinking; its resident bytes. The delay of reports is what it was."""
        size = settle_resident(self.guest.pid, timeout=timeout, what=f"the {self.name} guest")
        self.sh(f"echo $delay > {DELAY}")
        return size

    def settle(self, timeout: float = 60.0) -> int:
        """Have all free memory reported, and wait until the VMM stops shrinking.

        The same for both kernels; where the kernel has a flush it is used as well. Returns the
        VMM's resident bytes. TestFailure when it has not settled after ``timeout`` seconds.
        """
        self.free_and_report()
        return self.reported(timeout)

    @contextmanager
    def host_cost(self) -> Iterator[list[HostCost]]:
        """Measure what the steps inside cost the VMM; the list holds one entry afterwards."""
        found: list[HostCost] = []
        before = _cpu(self.guest.pid)
        yield found
        after = _cpu(self.guest.pid)
        found.append(HostCost(after[0] - before[0], after[1] - before[1], after[2] - before[2]))


def settle_resident(pid: int, *, timeout: float, what: str, still_s: float = STILL_S) -> int:
    """Wait until the resident size of a process has moved by less than 1 MiB for ``still_s`` seconds."""
    began = time.monotonic()
    mark, since = resident(pid), began
    while True:
        time.sleep(still_s / 4)
        now, size = time.monotonic(), resident(pid)
        if abs(size - mark) > MIB:
            mark, since = size, now
        elif now - since >= still_s:
            return size
        if now - began > timeout:
            raise TestFailure(
                f"The resident size of {what} does not settle",
                f"after {timeout:.0f} s it still moves, {size // MIB} MiB now",
                "see whether something else runs in the guest, or whether the machine is swapping",
            )


@dataclass(frozen=True)
class Built:
    """What a run uses from its beginning to its end, whatever happens to the sources meanwhile."""

    qemu: Path
    base: str | Path
    ours: str | Path

    def versions(self) -> dict[str, str]:
        """QEMU's version, this repository's commit, and what the images are called in the cache."""
        found = {"qemu": _first_line([str(self.qemu), "--version"]), "knownzero": commit()}
        for side, image in (("base", self.base), ("ours", self.ours)):
            found[f"image_{side}"] = image.parent.name if isinstance(image, Path) else image
            if about := kernel_facts(image):
                found[f"linux_{side}"] = about
        return found


def kernel_facts(image: str | Path) -> str:
    """Release, configuration and compiler of a kernel, as far as there is anything beside its image."""
    path = Path(image)
    if path.parent == Path():
        return ""  # the name of an image, and no path
    about = metadata(path)
    facts = [f"Linux {about['release']}"] if "release" in about else []
    with contextlib.suppress(OSError):
        config = hashlib.sha256((path.parent / ".config").read_bytes()).hexdigest()
        facts.append(f".config sha256 {config[:16]}")
    return ", ".join([*facts, *([str(about["compiler"])] if "compiler" in about else [])])


def built(options: BenchOptions) -> Built:
    """Build or find QEMU and both kernels; LabError when that fails."""

    def image(kernel: str) -> str | Path:
        return build_linux(kernel) if kernel in VARIANTS else kernel

    kernels = [kernel for kernel in (options.base, options.ours) if kernel in VARIANTS]
    if not find_qemu() and not all(find_linux(kernel) for kernel in kernels):
        tools.need(*tools.DEMO)
        with ahead.of_kernels():
            build_qemu("knownzero")
    return Built(build_qemu("knownzero"), image(options.base), image(options.ours))


@dataclass
class Pair:
    """Both guests, and what they run on."""

    base: Side
    ours: Side
    accel: str
    built: Built

    def sides(self, turn: int) -> tuple[Side, Side]:
        """Both sides; who goes first changes with each turn, so that neither always follows the other."""
        return (self.base, self.ours) if turn % 2 == 0 else (self.ours, self.base)


def spec_for(options: BenchOptions, kernel: str | Path, qemu: Path, **more: Any) -> BootSpec:
    """The boot of one side; ``more`` overrides fields of BootSpec."""
    fields: dict[str, Any] = {
        "kernel": kernel,
        "qemu": qemu,
        "memory": options.memory,
        "cpus": 1,
        "devices": [BALLOON],
        "accel": options.accel,
        "timeout": 1800.0,
        "command": ["sh", "-c", LOOP],
    }
    return BootSpec(**(fields | more))


@contextmanager
def guests(specs: Sequence[tuple[str, BootSpec]]) -> Iterator[list[Side]]:
    """Boot guests, each with the name of its side, hand them out prepared, and end them.

    LabError when they run on different accelerators.
    """
    with ExitStack() as stack:
        sides = []
        for name, spec in specs:
            side = Side(name, stack.enter_context(running(replace(spec, label=name))))
            # One after the other: CPUs of too many guests that come up at once wait for each other in vain.
            side.sh("true")
            sides.append(side)
        accels = {side.guest.accel for side in sides}
        if len(accels) != 1:
            raise LabError(
                "Cannot measure",
                f"the guests run on different accelerators: {sorted(accels)}",
                "name one with --accel",
            )
        for side in sides:
            side.prepare()
        yield sides
        for side in sides:
            side.sh(SNAPSHOT)


T = TypeVar("T")


def by_turns(things: Sequence[T], turn: int) -> list[T]:
    """Any number of guests in the order of a turn: each comes first, and each follows any other, at times."""
    at = turn % len(things)
    order = [*things[at:], *things[:at]]
    return order if turn // len(things) % 2 == 0 else order[::-1]


@contextmanager
def pair(
    options: BenchOptions,
    images: Built,
    extra: dict[str, list[str]] | None = None,
    balloon: str | None = BALLOON,
) -> Iterator[Pair]:
    """Boot both guests, hand them out prepared, and end them.

    ``extra`` is what QEMU is told besides, by side (base, ours); ``balloon`` is the device of both, if any.
    """
    specs = []
    for name, kernel in (("base", images.base), ("ours", images.ours)):
        more = {"extra_qemu": (extra or {}).get(name, []), "devices": [balloon] if balloon else []}
        specs.append((name, spec_for(options, kernel, images.qemu, **more)))
    with guests(specs) as sides:
        yield Pair(sides[0], sides[1], sides[0].guest.accel, images)


def _first_line(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def commit() -> str:
    """This repository's commit, as git describes it."""
    return _first_line(["git", "-C", str(REPO), "describe", "--always", "--dirty", "--tags"])


def host_facts() -> dict[str, str]:
    """The machine, as far as it matters to a figure."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"cpu": model, "cpus": str(os.cpu_count() or 0), "kernel": platform.release()}


def reproduce(name: str, options: BenchOptions, accel: str) -> str:
    """The command line that does it again."""
    argv = [
        "./kz",
        "bench",
        name,
        "--pairs",
        str(options.pairs),
        "--size",
        str(options.size_mb),
        "--accel",
        accel,
    ]
    plain = BenchOptions()
    for flag, value, usual in (
        ("--memory", options.memory, plain.memory),
        ("--base", options.base, plain.base),
        ("--ours", options.ours, plain.ours),
    ):
        if value != usual:
            argv += [flag, value]
    return shlex.join(argv)
