# SPDX-License-Identifier: GPL-2.0
"""Both ends.

Bytes zeroed by a host and by its guest, with base and ours in each place, on an emulated KVM.
"""

import functools
import itertools
import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from lab.bench.jobs import BASE_COUNTS, HUGE, check_zeros, zeroed_bytes
from lab.bench.kzeropaged import ON, PREZEROED
from lab.bench.repeat import Values, measured
from lab.bench.runner import Run
from lab.bench.session import DELAY, DELAY_MS, LATE, MIB, PAGE, Side, Wanted, settled
from lab.boot import nested
from lab.boot.spec import BootSpec

# The kernels outside and inside; the others are compared with the first pair.
ENDS = {
    "base_base": ("base", "base"),
    "ours_base": ("ours", "base"),
    "base_ours": ("base", "ours"),
    "ours_ours": ("ours", "ours"),
}
FIGURES = ("use", "outer", "inner", "idle", "ms")


class Way(NamedTuple):
    """A way to use memory again.

    ``rest``: the host is idle before; ``reports``: the guest has given the memory back; ``pool``:
    the host's memory is a pool of huge pages.
    """

    rest: bool = True
    reports: bool = True
    pool: bool = False


# Results take the titles from words.use in lab/report/metrics.toml.
WAYS = {
    "rest": Way(),
    "busy": Way(rest=False),
    "kept": Way(reports=False),
    "memfd": Way(),
    "hugetlb": Way(pool=True),
}
# Shared memory of the inner guest, by way: QEMU's object without its size.
MEMFD = "memory-backend-memfd,id=memory,share=on"
SHARED = {"memfd": MEMFD, "hugetlb": f"{MEMFD},hugetlb=on,hugetlbsize=2M"}
POOL = "echo {pages} > /proc/sys/vm/nr_hugepages; test $(cat /proc/sys/vm/nr_hugepages) = {pages}"
POOL_DELAY_MS = 1000
NOTE = (
    "Each guest runs in a guest, the host here, with KVM on a processor that QEMU emulates. A "
    "turn makes memory of the inner guest dirty, frees and reports it, and uses as much again. "
    "kzeropaged is on in the outer guest if its kernel is ours, and off in the inner one. "
    "After a rest: the outer guest is idle until kzeropaged has no more work. Never idle: another "
    "program runs in the outer guest until the use begins. Never given back: the inner guest "
    "reports nothing, so its memory stays in QEMU; giving it back is measured against this."
)
MORE_MB = 64  # made dirty beyond what is used
OUTER_MB = 1024  # memory of the outer guest beyond the inner one's
STILL_S, REST_S, WAIT_S = 1.5, 4.0, 120.0  # kzeropaged pauses for a second after steal time
BUSY, IDLE = "while :; do :; done & busy=$!", "kill $busy; "
# Counters of the outer kernel, then of the QEMU in it: page faults, its huge pages of the pool, and
# all of its memory, both in units of 4 KiB.
COUNTS = (
    "cat /proc/vmstat; awk '{ print \"minor_faults\", $10 }' /proc/$vmm/stat; "
    "awk '/^VmRSS/ { n = $2 } /^HugetlbPages/ { pool = $2 } "
    'END { print "pool", pool / 4; print "resident", (n + pool) / 4 }\' /proc/$vmm/status'
)


class Inner(Side):
    """A guest in the guest ``outer``, whose shell passes each line on."""

    def __init__(self, name: str, outer: Side, spec: BootSpec, kernel: str = "") -> None:
        super().__init__(name, outer.guest, kernel=kernel)
        self.outer = outer
        for line in nested.start(spec):
            outer.sh(line)
        self.sh(f"echo {DELAY_MS} > {DELAY}")
        self.find_knobs()

    def sh(self, command: str, *, check: bool = True, first: str = "") -> list[str]:
        """Run a line of shell, after ``first`` in the outer guest."""
        return self.outer.sh(f"{first}inner {shlex.quote(command)}", check=check)

    def counts(self) -> dict[str, int]:
        """COUNTS by name."""
        return {name: int(value) for name, value in map(str.split, self.outer.sh(COUNTS))}

    def settled(self, name: str, still_s: float, by: int = 0) -> int:
        """Bytes of that count, once it has moved by at most ``by`` bytes in ``still_s`` s."""
        what = f"{name} of {self.outer.name}"
        return settled(lambda: self.counts().get(name, 0) * PAGE, WAIT_S, what, still_s, by)

    def reported(self, timeout: float = WAIT_S) -> int:
        size = self.settled("resident", STILL_S, MIB)
        self.sh(f"echo $delay > {DELAY}")
        return size


def zeroed(changes: dict[str, int]) -> int:
    """Bytes that the outer kernel zeroed; see BASE_COUNTS.

    Base zeroes each huge page of the pool that QEMU takes.
    """
    check_zeros(changes.get("pgzeroed_bad"), "an outer guest")
    if "pgzeroed_cleared" in changes:
        return changes["pgzeroed_cleared"] * PAGE
    huge = changes["thp_fault_alloc"] + max(0, changes["pool"]) * PAGE // HUGE
    return huge * HUGE + max(0, changes["minor_faults"] - huge) * PAGE


def use(inner: Inner, size_mb: int, way: Way = WAYS["rest"]) -> dict[str, float]:
    """Make memory dirty, free it, report it, and write to each byte of as much.

    The values of FIGURES for that use.
    """
    if not way.rest:
        inner.outer.sh(BUSY)
    began = inner.counts()
    inner.sh(f"fillfree --size {size_mb + MORE_MB} > /dev/null")
    if way.reports:
        inner.settle()
    if way.rest:
        inner.settled(PREZEROED, REST_S)
    before = inner.counts()
    argv = ["alloc_once", "--size", str(size_mb), "--mode", "touch_all", "--pages", "thp"]
    answer = json.loads(inner.sh(shlex.join(argv), first="" if way.rest else IDLE)[-1])
    outer = zeroed({name: value - before[name] for name, value in inner.counts().items()})
    own = zeroed_bytes(answer, inner.kernel)
    idle = (before.get(PREZEROED, 0) - began.get(PREZEROED, 0)) * PAGE
    return {
        "use": outer + own,
        "outer": outer,
        "inner": own,
        "idle": idle,
        "ms": answer["wall_ns"] / 1e6,
    }


def rounds(run: Run, names: Sequence[str], found: dict[str, Values]) -> None:
    """Turns of use, free, report and rest in a guest for each of ENDS.

    ``names``: of WAYS, all with the same kind of memory in the inner guest.
    """
    memory, inner, extra = f"{run.options.memory_mb + OUTER_MB}M", {}, []
    if names[0] in SHARED:
        extra = ["-object", f"{SHARED[names[0]]},size={run.options.memory}"]
        extra += ["-machine", "memory-backend=memory"]
    specs = []
    for name, (outside, inside) in ENDS.items():
        inner[name] = run.spec(inside, extra_qemu=extra)
        spec = run.spec(f"outer_{outside}", devices=[], memory=memory)
        wanted = nested.outer(spec, inner[name], run.images.qemu)
        specs.append(Wanted(name, wanted, outside))
    with run.guests(specs) as sides:
        if WAYS[names[0]].pool:
            for side in sides:
                side.sh(POOL.format(pages=run.options.memory_mb * MIB // HUGE))
        insides = [Inner(side.name, side, inner[side.name], ENDS[side.name][1]) for side in sides]
        for one in insides:
            if one.outer.kernel == "ours":
                one.outer.sh(ON)
                one.settled(PREZEROED, REST_S)
        for name in names:
            way = WAYS[name]
            for one in insides:
                # A report shrinks QEMU's part of the pool: it must not come before COUNTS is read.
                delay = POOL_DELAY_MS if way.pool else DELAY_MS
                one.sh(f"echo {delay} > {DELAY}" if way.reports else LATE)
            size = run.options.size_mb
            words = f"both ends, {name}, {size} MiB"
            once = functools.partial(use, size_mb=size, way=way)
            found[name] = measured(words, insides, once, run.pairs)


def measure(run: Run) -> None:
    """All ways to use memory, for each pair of kernels."""
    run.sides = ["base in both", "these kernels"]
    run.note(NOTE, BASE_COUNTS)
    found: dict[str, Values] = {}
    size: dict[str, object] = {"size_mb": run.options.size_mb}
    rounds(run, [name for name in WAYS if name not in SHARED], found)
    for name in SHARED:
        rounds(run, [name], found)
    for name, what, ends in itertools.product(WAYS, FIGURES, [*ENDS][1:]):
        values = found[name]["base_base", what], found[name][ends, what]
        run.add(f"both-ends.{{use}}.{what}.{{ends}}", values, {"use": name, "ends": ends} | size)
    for what in ("use", "ms"):
        kept = found["kept"]["base_base", what]
        given = found["rest"]["ours_ours", what]
        run.add(f"both-ends.given_back.{what}", (kept, given), size)
