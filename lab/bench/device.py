# SPDX-License-Identifier: GPL-2.0
"""The balloon in a process of its own against the one in QEMU.

Reports, inflation and deflation, stalls; the command to report against inflating.
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.bench.host import take_back
from lab.bench.plan import available_gb
from lab.bench.repeat import Figures, Values, measured
from lab.bench.runner import Pair, Run
from lab.bench.session import (
    DROP,
    FLUSH,
    LATE,
    MIB,
    PAGE,
    Side,
    Wanted,
    cpu_ns,
    warm_host,
)
from lab.boot import balloon
from lab.core.errors import LabError, TestFailure

SIDES = ["in QEMU", "vhost-user"]
IN_TREE = balloon.device(free_page_reporting="on", device_init_on_inflate="on")
VHOST_USER = "daemon,stats-interval=0,device-init-on-inflate=on"
DIRTY = f"fillfree --share 80 > /dev/null; {DROP}"
STEPS = ("report", "inflate", "deflate")
COSTS = ("rate", "host_cpu", "daemon_cpu")  # of a step
REPORTED = "pgzeroed_set_reported"  # pages that the device confirmed as zero after a report
LATENCY_MB = 32
# GiB that a guest has used and freed, and the least GiB that the machine needs for so much.
BACK = {"0.5": 0, "3": 0, "12": 16}
# Of the guest's memory, what a balloon has to leave: watermarks and per-CPU lists grow with memory.
BACK_REST_MB = 384
BACK_REST_SHARE = 8  # and the size divided by that
BACK_TURNS = 3  # at most; one with 12 GiB takes minutes under emulation
BACK_WAYS = ("report_now", "inflate", "deflate")
# Almost all of it: free memory that the host does not back costs nothing to inflate.
ALL_DIRTY = f"fillfree --share 95 > /dev/null; {DROP}"
STALLS = ("spin", "alloc")  # the programs of guest/stall.c
# The time without reports is as long: its stalls are the machine's noise.
STATES = ("reporting", "idle")
# The value from the output of guest/stall.c.
GAPS: dict[str, Callable[[dict[str, Any]], float]] = {
    "longest": lambda out: out["longest_ns"] / 1e6,
    "p99": lambda out: out["p99_ns"] / 1e3,
    "lost": lambda out: out["lost_ns"] / out["wall_ns"] * 100,
}


def memory_on_host(side: Side) -> int:
    """Bytes of guest memory that the host has pages for."""
    for entry in Path(f"/proc/{side.guest.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:memory-backend" in os.readlink(entry):
                return entry.stat().st_blocks * 512
    raise LabError("Cannot see the guest's memory", "QEMU has no memfd", "read the log of the boot")


def resize(side: Side, size: int) -> tuple[int, float]:
    """Have the balloon hold ``size`` bytes; the bytes moved, and seconds."""
    began, before = time.monotonic(), balloon.held(side.guest)
    balloon.fill(side.guest, size, timeout=300.0)
    return abs(size - before), time.monotonic() - began


@contextmanager
def arriving(side: Side, least: int = 64 * MIB) -> Iterator[list[int]]:
    """The block adds the bytes that it reported.

    TestFailure unless these are ``least``, and the host has them.
    """
    known: list[int] = []
    on_host = memory_on_host(side)
    yield known
    back = on_host - memory_on_host(side)
    if known[0] < least or back < 0.8 * known[0]:
        why = f"{known[0] // MIB} MB were reported as zero and the host has {back // MIB} MB back"
        raise TestFailure(
            f"Reports do not arrive ({side.name})", why, "look at the status of the device"
        )


def report(side: Side) -> tuple[int, float]:
    """Report everything that is free: bytes and seconds."""
    before = side.vmstat()[REPORTED]
    with arriving(side) as known:
        began = time.monotonic()
        side.sh(f"echo 0 > {FLUSH}")
        seconds = time.monotonic() - began
        known.append((side.vmstat()[REPORTED] - before) * PAGE)
    return known[0], seconds


def latency(side: Side) -> float:
    """Milliseconds until the host has a little memory that was just freed."""
    side.sh(f"fillfree --size {LATENCY_MB} > /dev/null; {DROP}")
    with arriving(side, LATENCY_MB * MIB // 2) as known:
        answer = side.json("flush", "0")
        known.append(answer["vmstat"][REPORTED] * PAGE)
    return float(answer["wall_ns"]) / 1e6


def stall(side: Side, mode: str) -> dict[str, dict[str, Any]]:
    """The output of guest/stall.c for a time with reports and one as long without, after memory
    became dirty.
    """
    side.sh(DIRTY)
    with arriving(side) as known:
        answer = side.json("stall", "--mode", mode, "--report")
        known.append(answer["vmstat"][REPORTED] * PAGE)
    milliseconds = str(max(1, answer["wall_ns"] // 1_000_000))
    return {"reporting": answer, "idle": side.json("stall", "--mode", mode, "--ms", milliseconds)}


def timed(side: Side, what: Callable[[], tuple[int, float]]) -> dict[str, float]:
    """Do a step; its rate, and the CPU time of all processes of the side."""
    before = [cpu_ns(pid) for pid in side.processes]
    size, seconds = what()
    spent = [now - then for now, then in zip(map(cpu_ns, side.processes), before, strict=True)]
    each = 1e6 * size / 1e9  # ns to ms, for each GB
    return {
        "rate": size / seconds / 1e6,
        "host_cpu": sum(spent) / each,
        "daemon_cpu": sum(spent[1:]) / each,
    }


def steps(side: Side, size: int) -> Figures:
    """Report, and take and give back ``size`` bytes."""
    warm_host(size + 64 * MIB)
    side.sh(DIRTY)
    costs = {"report": timed(side, lambda: report(side)), "latency": {"ms": latency(side)}}
    side.sh(DIRTY)
    costs["inflate"] = timed(side, lambda: resize(side, size))
    return costs | {"deflate": timed(side, lambda: resize(side, 0))}


def stalls(side: Side, size: int) -> Figures:
    warm_host(size + 64 * MIB)
    return {
        mode: {
            state: {gap: value(answer) for gap, value in GAPS.items()}
            for state, answer in stall(side, mode).items()
        }
        for mode in STALLS
    }


def rounds(both: Pair, pairs: int, size_mb: int) -> Values:
    size = size_mb * MIB
    words = f"reports, and {size_mb} MB in and out"
    found = measured(words, both, functools.partial(steps, size=size), pairs)
    words = "stalls while memory is reported"
    found.update(measured(words, both, functools.partial(stalls, size=size), pairs))
    return found


def pressed(side: Side) -> int:
    """How often an allocation in the guest waited for reclaim, or ended a process."""
    counts = side.vmstat().items()
    return sum(count for name, count in counts if name.startswith(("allocstall_", "oom_kill")))


def back(side: Side, size: int) -> dict[str, dict[str, float]]:
    """Take ``size`` bytes from a guest that used them: by the command to report, and by inflating.

    The milliseconds and the CPU time of each way, and how often it pressed the guest.
    """
    steps: dict[str, Callable[[], float]] = {
        "report_now": lambda: take_back(side, lambda: balloon.report_now(side.guest), size),
        "inflate": lambda: take_back(side, lambda: resize(side, size), size),
        "deflate": lambda: resize(side, 0)[1] * 1e3,
    }
    found = {}
    for name, do in steps.items():
        if name != "deflate":
            warm_host(size)
            side.sh(ALL_DIRTY)
        before, spent = pressed(side), sum(map(cpu_ns, side.processes))
        found[name] = {"time": do()}
        found[name]["cpu"] = (sum(map(cpu_ns, side.processes)) - spent) / 1e6
        found[name]["pressed"] = pressed(side) - before
    found["times"] = {"faster": found["inflate"]["time"] / found["report_now"]["time"]}
    return found


def backs(run: Run, specs: Callable[[str], list[Wanted]]) -> None:
    """The command to report against inflating, in guests of their own for each size."""
    for gib, least in BACK.items():
        if available_gb() < least:
            run.note(f"{gib} GiB are left out: {least} GiB of memory were not available.")
            continue
        size = int(float(gib) * 1024)
        with run.guests(specs(f"{size + BACK_REST_MB + size // BACK_REST_SHARE}M")) as sides:
            for side in sides:
                side.sh(LATE)
            words = f"{gib} GiB taken back by the command and by inflating"
            once = functools.partial(back, size=size * MIB)
            found = measured(words, sides, once, min(run.pairs, BACK_TURNS))
        back_figures(run, gib, found)


def back_figures(run: Run, gib: str, found: Values) -> None:
    for way, cost in itertools.product(BACK_WAYS, ("time", "cpu", "pressed")):
        run.add(
            f"device.back.{{gib}}.{cost}.{{way}}", found.both(way, cost), {"gib": gib, "way": way}
        )
    run.add("device.back.{gib}.faster", found.both("times", "faster"), {"gib": gib})


def figures(run: Run, found: Values) -> None:
    for name, cost in itertools.product(STEPS, COSTS):
        run.add(f"device.{{step}}.{cost}", found.both(name, cost), {"step": name})
    run.add("device.report.latency", found.both("latency", "ms"), {"latency_mb": LATENCY_MB})
    for mode, gap, state in itertools.product(STALLS, GAPS, STATES):
        metric = f"device.stall.{{program_of}}.{gap}.{{state}}"
        run.add(metric, found.both(mode, state, gap), {"program_of": mode, "state": state})


def measure(run: Run) -> None:
    run.sides = SIDES
    run.note(
        "Both guests run our kernel, with a shared memfd as memory; bits 6 and 7 are on in both "
        "devices. vhost-user-balloon is a release build.",
        "A guest has one CPU: a gap includes the guest's own work on reports, the same on both "
        "sides. The rows called idle are of the same length of time without reports; their stalls "
        "are noise.",
        "Rows of memory taken back are of guests of that size and a little more, which wrote to "
        "95 % of their free memory and freed it. The time of the command (balloon-report-now, or "
        "the daemon's report) and of inflating ends when the host has 90 % of the size; the "
        "command returns all that is free. Pressed counts allocations of the guest that waited for "
        "reclaim, and processes ended for want of memory.",
    )

    def specs(memory: str) -> list[Wanted]:
        shared = f"memory-backend-memfd,id=shared,size={memory},share=on"
        more = ["-object", shared, "-machine", "memory-backend=shared"]
        in_tree = run.spec("ours", devices=[IN_TREE], extra_qemu=more, memory=memory)
        return [
            Wanted("base", in_tree),
            Wanted("ours", run.spec("ours", devices=[VHOST_USER], memory=memory)),
        ]

    with run.guests(specs(run.options.memory)) as sides:
        for side in sides:
            if not side.has_flush:
                raise LabError(
                    "Cannot measure", "the kernel has no attribute flush", "give --ours knownzero"
                )
            side.sh(LATE)
        figures(run, rounds(Pair(*sides), run.pairs, run.options.size_mb))
    backs(run, specs)
