# SPDX-License-Identifier: GPL-2.0
"""The balloon as a process of its own against the one in QEMU: reports, inflation and deflation."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import balloon
from lab.bench import BenchOptions
from lab.bench.jobs import WARM_UPS, elapsed
from lab.bench.session import (
    DROP,
    FLUSH,
    LATE,
    MIB,
    PAGE,
    Built,
    Pair,
    Side,
    built,
    cpu_ns,
    guests,
    host_facts,
    raise_priority,
    reproduce,
    spec_for,
    warm_host,
)
from lab.errors import LabError, TestFailure
from lab.progress import step
from lab.results import Metric, Result, Target

SIDES = ["in QEMU", "vhost-user"]
IN_TREE = balloon.device(free_page_reporting="on", device_init_on_inflate="on")
VHOST_USER = "vhost-user,stats-interval=0,device-init-on-inflate=on"
DIRTY = f"fillfree --share 80 > /dev/null; {DROP}"
WORDS = {
    "report": "All free memory reported at once, from the write to the flush parameter to its return",
    "inflate": "The balloon filled with memory that the guest had used",
    "deflate": "The balloon emptied",
}
BLOCK = 4 * MIB
PUNCH_HOLE = 2 | 1  # with FALLOC_FL_KEEP_SIZE


@dataclass
class Step:
    """What one step took on one side, an entry for each repetition."""

    rate: list[float] = field(default_factory=list)  # MB/s
    cpu: list[float] = field(default_factory=list)  # ms of all threads per GB
    daemon: list[float] = field(default_factory=list)  # of these, the daemon's


def processes(side: Side) -> list[int]:
    """QEMU, and the daemon if there is one."""
    return [side.guest.pid, *([side.guest.daemon.process.pid] if side.guest.daemon else [])]


def memory_on_host(side: Side) -> int:
    """Bytes of guest memory that the host has pages for."""
    for entry in Path(f"/proc/{side.guest.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:memory-backend" in os.readlink(entry):
                return entry.stat().st_blocks * 512
    raise LabError("Cannot see the guest's memory", "QEMU has no memfd", "read the log of the boot")


def actual(side: Side) -> int:
    """Bytes in the balloon."""
    if side.guest.daemon:
        return int(side.guest.daemon.ask(command="target")["actual"])
    total = int(side.guest.qmp("query-memory-size-summary")["base-memory"])
    return total - balloon.actual(side.guest)


def ask(side: Side, size: int) -> None:
    """Tell the device how large the balloon is to be."""
    if side.guest.daemon:
        side.guest.daemon.ask(command="target", bytes=size)
    else:
        total = int(side.guest.qmp("query-memory-size-summary")["base-memory"])
        side.guest.qmp("balloon", value=total - size)


def resize(side: Side, size: int, timeout: float = 300.0) -> int:
    """Have the balloon hold ``size`` bytes and wait until it does; how many bytes that moved."""
    before = actual(side)
    deadline = time.monotonic() + timeout
    ask(side, size)
    while (now := actual(side)) != size:
        if time.monotonic() > deadline:
            raise TestFailure(
                "the balloon does not get to its size",
                f"after {timeout:g} s it holds {now // MIB} MB and should hold {size // MIB} MB",
                "look at the guest's console log for 'Out of puff'",
            )
        time.sleep(0.01)
    return abs(size - before)


def reported(side: Side) -> int:
    """Bytes of which the device has said that they are zero after a report."""
    return int(side.sh("awk '$1 == \"pgzeroed_set_reported\" { print $2 }' /proc/vmstat")[-1]) * PAGE


def report(side: Side) -> tuple[int, float]:
    """Report everything that is free: bytes and seconds; TestFailure when the host does not get them."""
    known, on_host = reported(side), memory_on_host(side)
    began = time.monotonic()
    side.sh(f"echo 0 > {FLUSH}")
    seconds = time.monotonic() - began
    back, known = on_host - memory_on_host(side), reported(side) - known
    if known < 64 * MIB or back < 0.8 * known:
        raise TestFailure(
            f"Reports do not arrive ({side.name})",
            f"{known // MIB} MB were reported as zero and the host has {back // MIB} MB back",
            "look at the status of the device",
        )
    return known, seconds


def timed(side: Side, what: Callable[[], tuple[int, float]], to: Step | None) -> None:
    """Do a step, and note its rate and what all processes of the side took for it."""
    before = [cpu_ns(pid) for pid in processes(side)]
    size, seconds = what()
    spent = [now - then for now, then in zip(map(cpu_ns, processes(side)), before, strict=True)]
    if to is None:
        return
    to.rate.append(size / seconds / 1e6)
    to.cpu.append(sum(spent) / 1e6 / (size / 1e9))
    to.daemon.append(sum(spent[1:]) / 1e6 / (size / 1e9))


def moved(side: Side, size: int) -> tuple[int, float]:
    """Resize the balloon: bytes and seconds."""
    began = time.monotonic()
    return resize(side, size), time.monotonic() - began


def rounds(both: Pair, options: BenchOptions) -> dict[str, dict[str, Step]]:
    """Every step on both sides by turns."""
    found = {name: {"base": Step(), "ours": Step()} for name in WORDS}
    size = options.size_mb * MIB
    with step(f"reports, and {options.size_mb} MB in and out: {options.pairs} pairs"):
        for turn in range(-WARM_UPS, options.pairs):
            for side in both.sides(turn):
                to = {name: found[name][side.name] if turn >= 0 else None for name in WORDS}
                warm_host((options.size_mb + 64) * MIB)
                side.sh(DIRTY)
                timed(side, lambda side=side: report(side), to["report"])  # type: ignore[misc]
                side.sh(DIRTY)
                timed(side, lambda side=side: moved(side, size), to["inflate"])  # type: ignore[misc]
                timed(side, lambda side=side: moved(side, 0), to["deflate"])  # type: ignore[misc]
    return found


def metrics_of(found: dict[str, dict[str, Step]]) -> list[Metric]:
    """The figures of all steps."""
    metrics = []
    for name, words in WORDS.items():
        base, ours = found[name]["base"], found[name]["ours"]
        made = Metric.of(f"device.{name}.rate", "MB/s", base.rate, ours.rate)
        # Slower is what the measurement can tell from chance.
        best = made.change_interval[1] if made.change_interval else made.change_percent or 0.0
        metrics.append(
            Metric.of(
                made.name,
                made.unit,
                base.rate,
                ours.rate,
                sentence=f"{words}: memory per second.",
                target=Target("not slower than the device in QEMU", best >= 0),
            )
        )
        metrics.append(
            Metric.of(
                f"device.{name}.host_cpu",
                "ms/GB",
                base.cpu,
                ours.cpu,
                sentence=f"{words}: CPU time of QEMU, guest included, and of the daemon, for each GB.",
            )
        )
        metrics.append(
            Metric.of(
                f"device.{name}.daemon_cpu",
                "ms/GB",
                base.daemon,
                ours.daemon,
                sentence=f"{words}: of that, the daemon's.",
            )
        )
    return metrics


def bare_rate(size: int) -> float:
    """MB/s at which this machine punches a filled memfd, with nobody in between."""
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    fd = os.memfd_create("bare")
    try:
        for at in range(0, size, BLOCK):
            os.pwrite(fd, b"\x5a" * BLOCK, at)
        began = time.monotonic()
        for at in range(0, size, BLOCK):
            if punch(fd, PUNCH_HOLE, at, BLOCK):
                code = ctypes.get_errno()
                raise LabError("cannot punch a memfd", os.strerror(code), "see what limits this process")
        return size / (time.monotonic() - began) / 1e6
    finally:
        os.close(fd)


@contextmanager
def pair(options: BenchOptions, images: Built) -> Iterator[Pair]:
    """Two guests with the same kernel and the same kind of memory, and one device each."""
    shared = f"memory-backend-memfd,id=shared,size={options.memory},share=on"
    devices: dict[str, dict[str, Any]] = {
        "base": {
            "devices": [IN_TREE],
            "extra_qemu": ["-object", shared, "-machine", "memory-backend=shared"],
        },
        "ours": {"devices": [VHOST_USER], "daemon_profile": "release"},
    }
    specs = [(name, spec_for(options, images.ours, images.qemu, **more)) for name, more in devices.items()]
    with guests(specs) as sides:
        for side in sides:
            for pid in processes(side):
                raise_priority(pid)
            if not side.has_flush:
                raise LabError("Cannot measure", "the kernel has no flush parameter", "give --ours knownzero")
            side.sh(LATE)
        yield Pair(sides[0], sides[1], sides[0].guest.accel, images)


def run(options: BenchOptions) -> Result:
    """Measure both devices; raises LabError when that is not possible."""
    began = time.monotonic()
    images = built(options)
    with pair(options, images) as both:
        metrics = metrics_of(rounds(both, options))
        accel = both.accel
    size = options.size_mb * MIB
    bare = sorted(bare_rate(size) for _ in range(5))[2]
    return Result(
        name="device",
        accelerator=accel,
        versions=images.versions(),
        reproduce=reproduce("device", options, accel),
        metrics=metrics,
        job={"size_mb": options.size_mb, "memory": options.memory, "cpus": 1, "pairs": options.pairs},
        host=host_facts(),
        notes=[
            "Both guests run our kernel, with a shared memfd as memory; bits 6 and 7 are on in both devices. "
            "vhost-user-balloon is a release build.",
            f"With nobody in between, this machine punches {options.size_mb} MB of a filled memfd in blocks of "
            f"{BLOCK // MIB} MiB at {bare:,.0f} MB/s (median of 5).",
        ],
        sides=SIDES,
        seconds=elapsed(began),
    )
