# SPDX-License-Identifier: GPL-2.0
"""Both ends.

Bytes zeroed by a host and by its guest, with base and ours in each place, on an emulated KVM.
"""

import itertools
import json
import shlex

from lab.bench.jobs import BASE_COUNTS, HUGE, MODES, Runs
from lab.bench.kzeropaged import FOLDER
from lab.bench.repeat import Values, turns
from lab.bench.runner import Run
from lab.bench.session import DELAY, DELAY_MS, MIB, PAGE, HostCost, Side, Wanted, settled
from lab.boot import nested
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.core.progress import step

# The kernels outside and inside; the others are compared with the first pair.
ENDS = {
    "base_base": ("base", "base"),
    "ours_base": ("ours", "base"),
    "base_ours": ("base", "ours"),
    "ours_ours": ("ours", "ours"),
}
FIGURES = ("use", "outer", "inner", "idle", "ms")
KEYS = {
    "rest": "after a rest",
    "busy": "on a host that was never idle",
    "memfd": "after a rest, guest memory in a memfd",
}
MEMFD = "memory-backend-memfd,id=memory,share=on,size="
JOBS = {"rest": [*MODES], "busy": ["touch_all"], "memfd": ["touch_all"]}
NOTE = (
    "Each guest runs in a guest, the host here, with KVM on a processor that QEMU emulates. A "
    "turn makes memory of the inner guest dirty, frees and reports it, and uses as much again. "
    "kzeropaged is on (all) in the outer guest if its kernel is ours, and off in the inner one. "
    "After a rest: the outer guest is idle until kzeropaged has no more work. Never idle: another "
    "program runs in the outer guest until the use begins."
)
PREZEROED = "pgzeroed_set_prezeroed"
MORE_MB, OUTER_MB = (
    64,
    1024,
)  # more than is used is made dirty; more memory than the inner guest's, outside
STILL_S, REST_S, WAIT_S = 1.5, 4.0, 120.0  # kzeropaged pauses for a second between two batches
# A host on hardware has no other host that could use its memory: all of it is zeroed.
ALL = f"echo all > {FOLDER}/enabled"
BUSY, IDLE = "while :; do :; done & busy=$!", "kill $busy; "
COUNTS = (
    'cat /proc/vmstat; awk \'{ print "minor_faults", $10; print "resident", $24 }\' /proc/$vmm/stat'
)


class Inner(Side):
    """A guest in the guest ``outer``, whose shell passes each line on; ``name``: base or ours."""

    def __init__(self, name: str, outer: Side, spec: BootSpec) -> None:
        super().__init__(name, outer.guest)
        self.outer = outer
        for line in nested.start(spec):
            outer.sh(line)
        self.sh(f"echo {DELAY_MS} > {DELAY}")
        self.find_flush()

    def sh(self, command: str, *, check: bool = True, first: str = "") -> list[str]:
        """Run a line of shell, after ``first`` in the outer guest."""
        return self.outer.sh(f"{first}inner {shlex.quote(command)}", check=check)

    def counts(self) -> dict[str, int]:
        """The outer guest's /proc/vmstat; of the QEMU in it, page faults, and pages that it has."""
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
    """Bytes that the outer kernel zeroed; see BASE_COUNTS."""
    if changes.get("pgzeroed_bad"):
        why = f"pgzeroed_bad rose by {changes['pgzeroed_bad']} in an outer guest"
        raise TestFailure(
            "Memory that should have been zero was not", why, "use the debug kernel outside"
        )
    if "pgzeroed_cleared" in changes:
        return changes["pgzeroed_cleared"] * PAGE
    huge = changes["thp_fault_alloc"]
    return huge * HUGE + max(0, changes["minor_faults"] - huge) * PAGE


def use(inner: Inner, size_mb: int, mode: str, rest: bool = True) -> dict[str, float]:
    """Make memory dirty, free it, report it, and use it again.

    The values of FIGURES for that use.
    """
    if not rest:
        inner.outer.sh(BUSY)
    began = inner.counts()
    inner.sh(f"fillfree --size {size_mb + MORE_MB} > /dev/null")
    inner.settle()
    if rest:
        inner.settled(PREZEROED, REST_S)
    before = inner.counts()
    argv = ["alloc_once", "--size", str(size_mb), "--mode", mode, "--pages", "thp"]
    answer = json.loads(inner.sh(shlex.join(argv), first="" if rest else IDLE)[-1])
    outer = zeroed({name: value - before[name] for name, value in inner.counts().items()})
    runs = Runs()
    runs.add(inner, answer, HostCost(0, 0, 0))
    own, idle = runs.zeroed[0], (before.get(PREZEROED, 0) - began.get(PREZEROED, 0)) * PAGE
    return {
        "use": outer + own,
        "outer": outer,
        "inner": own,
        "idle": idle,
        "ms": answer["wall_ns"] / 1e6,
    }


def rounds(run: Run, keys: list[str], extra: list[str], found: Values) -> None:
    """Turns of use, free, report and rest in a guest for each of ENDS.

    ``extra``: options of the inner QEMU.
    """
    memory, inner = f"{run.options.memory_mb + OUTER_MB}M", {}
    specs = []
    for name, (outside, inside) in ENDS.items():
        inner[name] = run.spec(inside, extra_qemu=extra)
        spec = run.spec(f"outer_{outside}", devices=[], memory=memory)
        wanted = nested.outer(spec, inner[name], run.images.qemu)
        specs.append(Wanted(name, wanted, outside))
    with run.guests(specs) as sides:
        insides = [Inner(ENDS[side.name][1], side, inner[side.name]) for side in sides]
        for one in insides:
            if one.outer.kernel == "ours":
                one.outer.sh(ALL)
                one.settled(PREZEROED, REST_S)
        for key, mode in [(one, mode) for one in keys for mode in JOBS[one]]:
            with step(
                f"both ends, {KEYS[key]}, {mode}: {run.pairs} turns of {run.options.size_mb} MB"
            ):
                for one, counts in turns(insides, run.pairs):
                    figures = use(one, run.options.size_mb, mode, key != "busy")
                    if counts:
                        found.note(one.outer.name, mode, key, **figures)


def measure(run: Run) -> None:
    """All ways to use memory, for each pair of kernels."""
    run.sides = ["base in both", "these kernels"]
    run.note(NOTE, BASE_COUNTS)
    found = Values()
    memfd = ["-object", MEMFD + run.options.memory, "-machine", "memory-backend=memory"]
    rounds(run, ["rest", "busy"], [], found)
    rounds(run, ["memfd"], memfd, found)
    for key, what, name in itertools.product(KEYS, FIGURES, [*ENDS][1:]):
        for mode in JOBS[key]:
            values = found["base_base", mode, key, what], found[name, mode, key, what]
            of = {"use": key, "mode": mode, "ends": name}
            metric = f"both-ends.{{use}}.{what}.{{mode}}.{{ends}}"
            run.add(metric, values, {**of, "size_mb": run.options.size_mb})
