# SPDX-License-Identifier: GPL-2.0
"""The balloon as a process of its own against the one in QEMU: reports, inflation and deflation, stalls."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.bench import BenchOptions
from lab.bench.jobs import WARM_UPS, elapsed, within
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
from lab.boot import balloon
from lab.build import daemon
from lab.core.errors import LabError, TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

SIDES = ["in QEMU", "vhost-user"]
IN_TREE = balloon.device(free_page_reporting="on", device_init_on_inflate="on")
VHOST_USER = "vhost-user,stats-interval=0,device-init-on-inflate=on"
DIRTY = f"fillfree --share 80 > /dev/null; {DROP}"
WORDS = {
    "report": "All free memory reported at once, from the write to the flush parameter to its return",
    "inflate": "The balloon filled with memory that the guest had used",
    "deflate": "The balloon emptied",
}
LATENCY_MB = 32
PUNCH_LIMIT = 10.0  # percent
PUNCH_TURNS = 20  # for each pair; one takes a fifth of a second, and memory comes at two speeds
STALLS = {
    "spin": "A program that does nothing but read the clock",
    "alloc": "A program that maps a page, writes to it and unmaps it, over and over",
}
# At the same time, and for as long with nothing to report: what the second shows is the machine's noise.
STATES = {"reporting": "while all free memory is reported", "idle": "while nothing is reported"}
GAPS = {
    "longest": ("ms", "the longest time it was kept from its next step"),
    "p99": ("µs", "the time that 99 of 100 of its steps took at most"),
    "lost": ("percent", "the part of the time that went into steps of 1 ms and more"),
}


@dataclass
class Step:
    """What one step took on one side, an entry for each repetition."""

    rate: list[float] = field(default_factory=list)  # MB/s
    cpu: list[float] = field(default_factory=list)  # ms of all threads per GB
    daemon: list[float] = field(default_factory=list)  # of these, the daemon's


@dataclass
class Stall:
    """How a busy program in the guest fared, an entry for each repetition; units as in GAPS."""

    longest: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def add(self, told: dict[str, Any]) -> None:
        """Take in what guest/stall.c says."""
        self.longest.append(told["longest_ns"] / 1e6)
        self.p99.append(told["p99_ns"] / 1e3)
        self.lost.append(told["lost_ns"] / told["wall_ns"] * 100)


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
    known = reported(side) - known
    arrived(side, known, on_host - memory_on_host(side))
    return known, seconds


def arrived(side: Side, known: int, back: int, least: int = 64 * MIB) -> None:
    """TestFailure unless at least so many bytes were reported, and the host has them."""
    if known < least or back < 0.8 * known:
        raise TestFailure(
            f"Reports do not arrive ({side.name})",
            f"{known // MIB} MB were reported as zero and the host has {back // MIB} MB back",
            "look at the status of the device",
        )


def latency(side: Side) -> float:
    """Milliseconds until the host has a little memory that was just freed."""
    side.sh(f"fillfree --size {LATENCY_MB} > /dev/null; {DROP}")
    on_host = memory_on_host(side)
    told = side.json("flush", "0")
    known = told["vmstat"]["pgzeroed_set_reported"] * PAGE
    arrived(side, known, on_host - memory_on_host(side), LATENCY_MB * MIB // 2)
    return float(told["wall_ns"]) / 1e6


def stall(side: Side, mode: str) -> dict[str, dict[str, Any]]:
    """What guest/stall.c says of a time with reports and of one as long without, after memory became dirty."""
    side.sh(DIRTY)
    on_host = memory_on_host(side)
    told = side.json("stall", "--mode", mode, "--report")
    arrived(side, told["vmstat"]["pgzeroed_set_reported"] * PAGE, on_host - memory_on_host(side))
    milliseconds = max(1, told["wall_ns"] // 1_000_000)
    return {
        "reporting": told,
        "idle": side.json("stall", "--mode", mode, "--ms", str(milliseconds)),
    }


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


@dataclass
class Found:
    """Everything that is measured with guests, by side; stalls by mode and state as well."""

    steps: dict[str, dict[str, Step]]
    latencies: dict[str, list[float]]
    stalls: dict[tuple[str, str], dict[str, Stall]]

    @classmethod
    def empty(cls) -> Found:
        """Nothing yet."""
        return cls(
            {name: {"base": Step(), "ours": Step()} for name in WORDS},
            {"base": [], "ours": []},
            {(mode, state): {"base": Stall(), "ours": Stall()} for mode in STALLS for state in STATES},
        )


def rounds(both: Pair, options: BenchOptions) -> Found:
    """Every step on both sides by turns."""
    found = Found.empty()
    size = options.size_mb * MIB
    with step(f"reports, and {options.size_mb} MB in and out: {options.pairs} pairs"):
        for turn in range(-WARM_UPS, options.pairs):
            for side in both.sides(turn):
                to = {name: found.steps[name][side.name] if turn >= 0 else None for name in WORDS}
                warm_host((options.size_mb + 64) * MIB)
                side.sh(DIRTY)
                timed(side, lambda side=side: report(side), to["report"])  # type: ignore[misc]
                soon = latency(side)
                if turn >= 0:
                    found.latencies[side.name].append(soon)
                side.sh(DIRTY)
                timed(side, lambda side=side: moved(side, size), to["inflate"])  # type: ignore[misc]
                timed(side, lambda side=side: moved(side, 0), to["deflate"])  # type: ignore[misc]
    with step(f"stalls while memory is reported: {options.pairs} pairs"):
        for turn in range(-WARM_UPS, options.pairs):
            for side in both.sides(turn):
                warm_host((options.size_mb + 64) * MIB)
                for mode in STALLS:
                    for state, told in stall(side, mode).items():
                        if turn >= 0:
                            found.stalls[mode, state][side.name].add(told)
    return found


def not_worse(metric: Metric, *, more_is_better: bool = False) -> Metric:
    """The same with a target: not worse than the device in QEMU, as far as the measurement can tell."""
    low, high = metric.change_interval or (metric.change_percent or 0.0,) * 2
    met = high >= 0 if more_is_better else low <= 0
    return replace(metric, target=Target("not slower than the device in QEMU", met))


def metrics_of(found: Found) -> list[Metric]:
    """The figures of all steps."""
    metrics = []
    for name, words in WORDS.items():
        base, ours = found.steps[name]["base"], found.steps[name]["ours"]
        rate = Metric.of(
            f"device.{name}.rate", "MB/s", base.rate, ours.rate, sentence=f"{words}: memory per second."
        )
        metrics.append(not_worse(rate, more_is_better=True))
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
    metrics.append(
        not_worse(
            Metric.of(
                "device.report.latency",
                "ms",
                found.latencies["base"],
                found.latencies["ours"],
                sentence=f"From the write to the flush parameter until the host has {LATENCY_MB} MB that were just "
                "freed, by the guest's clock.",
            )
        )
    )
    return metrics + stall_metrics(found)


def stall_metrics(found: Found) -> list[Metric]:
    """What reports keep a program in the guest from."""
    metrics = []
    for mode, program in STALLS.items():
        for gap, (unit, words) in GAPS.items():
            for state, when in STATES.items():
                sides = found.stalls[mode, state]
                made = Metric.of(
                    f"device.stall.{mode}.{gap}.{state}",
                    unit,
                    getattr(sides["base"], gap),
                    getattr(sides["ours"], gap),
                    sentence=f"{program}, on the guest's only CPU, {when}: {words}.",
                )
                metrics.append(not_worse(made) if state == "reporting" else made)
    return metrics


def punch_metric(options: BenchOptions) -> Metric:
    """The daemon beside a loop that punches the same holes, with neither guest nor VMM."""
    turns = PUNCH_TURNS * options.pairs
    with step(f"the daemon and a bare loop punch the same holes: {turns} pairs"):
        found = daemon.punch(turns, options.size_mb)
    made = Metric.of(
        "device.punch.rate",
        "MB/s",
        found["bare"],
        found["daemon"],
        sentence="Blocks of 2 and 4 MiB of a filled memfd. The first column is a bare loop of fallocate(2), the "
        "second the daemon with a front end that reports the very same blocks, 32 at a time as Linux does.",
    )
    words = f"within {PUNCH_LIMIT:.0f} % of the loop"
    return replace(made, target=within(made, PUNCH_LIMIT, PUNCH_LIMIT, words, more_is_better=True))


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
    metrics.append(punch_metric(options))
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
            "Stalls are of a guest with one CPU: a part of a gap is the guest's own work on reports, which its "
            "scheduler lets run by turns with the program, the same on both sides. The rows called idle are of "
            "the same length of time without reports; what they have is noise.",
        ],
        sides=SIDES,
        seconds=elapsed(began),
    )
