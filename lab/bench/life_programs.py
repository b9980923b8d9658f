# SPDX-License-Identifier: GPL-2.0
"""The real programs of the bench life, in a Debian: a compiler, and a server that answers."""

import csv
import itertools
import time
from collections.abc import Iterable
from pathlib import Path

from lab.bench import init_on_alloc, programs
from lab.bench.plugin import stored
from lab.bench.repeat import Values
from lab.bench.runner import Run
from lab.bench.session import PAGE, Side, cpu_ns
from lab.core.errors import TestFailure
from lab.core.paths import REPO

KIND = "programs"  # beside the kinds of pages
PHASES = ("first", "again", "later")
SERVER = REPO / "guest" / "server.sh"
SCRIPTS = {"gcc": "/programs/gcc.sh", "server": f"/kz/{SERVER.name}"}
ADDED = [(programs.PROGRAMS / "setup", "/kz/"), (SERVER, "/kz/")]
CONFIG = "programs"  # of the kernels, in linux/configs/matrix
# The columns of redis-benchmark: the figures of a server.
LATENCIES = {"median": "p50_latency_ms", "longest": "max_latency_ms"}
KINDS = ("zeroed", "skipped", "time", "cpu")
NOTE = (
    "gcc and the server run in guests of their own, one after the other in each phase, in a "
    "Debian on a disk that is not written (snapshot=on). Such a guest is not saved or restored. "
    "The server is Redis at its defaults: one client sets 100 keys to 1 MiB each; the latencies "
    "are those of redis-benchmark. Time and CPU time of QEMU are those of the whole script, which "
    "starts and ends the server. Bytes skipped are pgzeroed_skip; base skips no page."
)
COUNTED = (
    "Bytes zeroed by gcc and the server are those that the kernel stores with `rep stos`, counted "
    "by a TCG plugin in all guests; kzeropaged zeroes with other instructions. The plugin needs a "
    "CPU model that has `rep stos`: their times do not compare with those of the other lives."
)
NOT_COUNTED = (
    "Without the emulator, bytes zeroed by gcc and the server are counted with init_on_alloc=1 "
    "only: base has no counter, and zeroes each page that it allocates. On ours they are "
    "pgzeroed_cleared."
)


def latencies(lines: Iterable[str]) -> dict[str, float]:
    """The latencies in ms that redis-benchmark prints as CSV; none for another output."""
    row = next(csv.DictReader(lines), {})
    return {name: float(row[column]) for name, column in LATENCIES.items() if column in row}


def play(side: Side, name: str, init: int, counts: Path | None) -> dict[str, float]:
    """Run a program once: its figures. ``counts``: the file of the plugin, if there is one.

    TestFailure for a server without latencies.
    """
    known = stored(counts) if counts else 0
    before, cpu, began = side.vmstat(), cpu_ns(side.guest.pid), time.monotonic()
    lines = side.sh(programs.in_debian(SCRIPTS[name]))
    found = {
        "time": (time.monotonic() - began) * 1e3,
        "cpu": (cpu_ns(side.guest.pid) - cpu) / 1e9,
    }
    after = side.vmstat()
    # Fails for a page that was not zero.
    cleared = float(init_on_alloc.zeroed(side, before, after))
    skipped = after.get("pgzeroed_skip", 0) - before.get("pgzeroed_skip", 0)
    found["skipped"] = float(skipped * PAGE)
    if counts:
        found["zeroed"] = float(stored(counts) - known)
    elif init:
        found["zeroed"] = cleared
    if name != "server":
        return found
    answered = latencies(lines)
    if not answered:
        why, fix = f"{SERVER.name} printed {lines!r}", "read the guest's console log"
        raise TestFailure("The server has no latencies", why, fix)
    return found | {f"latency_{statistic}": value for statistic, value in answered.items()}


def play_all(side: Side, init: int, counts: Path | None) -> dict[str, float]:
    """Run each program once: its figures by ``PROGRAM.KIND``."""
    return {
        f"{name}.{kind}": value
        for name in SCRIPTS
        for kind, value in play(side, name, init, counts).items()
    }


def figures(
    run: Run, found: Values, base: str, others: Iterable[str], inits: Iterable[int]
) -> None:
    """Each column against base with the same init_on_alloc; what either side lacks is left out."""
    for init, side, program, phase in itertools.product(inits, [*others], SCRIPTS, PHASES):
        of: dict[str, object] = {"init": init, "side": side, "program": program, "phase": phase}
        for kind in KINDS:
            values = [found[one, init, KIND, phase, f"{program}.{kind}"] for one in (base, side)]
            if all(values):
                name = f"life.init{{init}}.{{side}}.{{program}}.{{phase}}.{kind}"
                run.add(name, (values[0], values[1]), of)
        for statistic in LATENCIES:
            last = f"{program}.latency_{statistic}"
            values = [found[one, init, KIND, phase, last] for one in (base, side)]
            if all(values):
                metric = "life.init{init}.{side}.{program}.{phase}.latency_{statistic}"
                run.add(metric, (values[0], values[1]), of | {"statistic": statistic})
