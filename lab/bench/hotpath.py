# SPDX-License-Identifier: GPL-2.0
"""Instructions of the hot paths.

Base against ours, compiled out, without a source of zeros, and with one.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from lab.bench.plan import Image
from lab.bench.repeat import Values, turns
from lab.bench.runner import COUNTING, FLOOR_NOTE, Run
from lab.bench.session import BALLOON, LATE, Side, settle_both, spec_for
from lab.boot import accel
from lab.boot.guest import boot, running
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.core.progress import step

BOOTS = 2
REPS, FEW = 1001, 101
WARM_UPS = 16  # of guest/hotpath.c
SKIPPED, SKIPPED_AT_LEAST = "pgzeroed_skip", 0.9
# The depth of the page table depends on the place of user space.
APPEND = "nokaslr norandmaps"
# A kernel that has zeroed a page when it was freed need not do it again at the next fault.
ON_FREE = "init_on_free=1 init_on_alloc=0"
ICOUNT = ("-icount", "shift=0")
# By the guest's own clock. A kernel without flush reports in a few dozen rounds, 10 ms apart, after
# the first delay.
# The resident size of the VMM does not show it: this memory was never on the host.
REPORTED = "sleep 5"


@dataclass(frozen=True)
class HotPath:
    """A path that guest/hotpath.c knows as ``name``.

    Its metric is hotpath.``metric``.instructions (or ``name``). ``bound``: the limit holds for it.
    """

    name: str
    reps: int = REPS
    bound: bool = True
    metric: str = ""
    length: str = "short"  # of its chart

    @property
    def path(self) -> str:
        """The parameter of its metrics."""
        return self.metric or self.name


# Emulated, a huge page or a process takes as long as hundreds of the others: fewer repetitions.
PATHS = (
    HotPath("fault"),
    HotPath("alloc_free"),
    HotPath("buddy", FEW, metric="buddy_alloc_free", bound=False),
    HotPath("thp_fault", FEW, length="long"),
)
MORE = (
    HotPath("order3", metric="alloc_free_order3"),
    HotPath("order9", metric="alloc_free_order9", length="long"),
    HotPath("fork", FEW, metric="fork_exit", length="long"),
    HotPath("exec", FEW, metric="fork_exec", length="long"),
    HotPath("populate"),
    HotPath("over_limit", FEW, length="long"),
)
# With ON_FREE.
FREED = (HotPath("thp_fault", FEW, bound=False, metric="thp_fault_init_on_free", length="long"),)
# Each repetition uses memory that was not used since it was reported.
NEW = (
    HotPath("new_fault"),
    HotPath("new_thp", FEW, metric="new_thp_fault", length="long"),
)
PAGES = {"new_fault": 32, "new_thp": 512}  # of a repetition

IDLE, OFF, ACTIVE = "", "off.", "active."
NOTE = (
    "Instructions are counted by the guest's own clock under -icount shift=0, where each emulated "
    "instruction takes one nanosecond; each boot gives the median of 1001 repetitions (of 101 "
    "where an operation is long). Without a balloon device, nothing is ever known to be zero. "
    "alloc_free is the difference of two pipe loops, one that needs a page for each packet and "
    "one that does not. over_limit is a huge page that its memory cgroup has no room for. "
    f"thp_fault_init_on_free ran with {ON_FREE}."
)
ACTIVE_NOTE = (
    "hotpath.off.* has the series with every option of it compiled out in the second column. For "
    "hotpath.active.* both guests have a balloon that has reported all free memory; from then on "
    "nothing is reported. new_fault and new_thp_fault use memory that is still free since then, "
    "on ours known to be zero; the other paths reuse their own."
)
NATIVE_NOTE = (
    "Natively, each value is the median of 1001 repetitions (of 101 where an operation is long), "
    "by the time stamp counter, in guests side by side. alloc_free is the difference of two pipe "
    "loops. A path that traps (fault, fork, exec) costs more than on hardware, on both sides."
)

Kernels = Mapping[str, Image]
Counts = dict[str, float]
Rows = dict[str, list[Counts]]  # the counts of each boot, by kernel


def medians(lines: Sequence[str]) -> Counts:
    answers = [json.loads(line) for line in lines if line.startswith("{")]
    return {str(answer["path"]): float(answer["median"]) for answer in answers}


def _spec(run: Run, kernel: Image, append: str = "", **more: Any) -> BootSpec:
    options = replace(run.options, accel="tcg")
    more |= {"append": f"{APPEND} {append}".strip(), "extra_qemu": [*ICOUNT]}
    return spec_for(options, kernel, run.images.qemu, **more)


def _boot(run: Run, kernel: Image, paths: Sequence[HotPath], append: str = "") -> Counts:
    """One boot of one kernel without a balloon; the median of each path.

    ``append``: more of the kernel's command line.
    """
    # A process for each, so that no path starts with the memory of another.
    steps = [f"hotpath --reps {path.reps} {path.name}" for path in paths]
    command = ["sh", "-ec", "; ".join(steps)]
    spec = _spec(run, kernel, append, devices=[], timeout=900.0, command=command)
    done = boot(spec, keep=run.keep)
    if done.exit_code:
        why = (
            f"hotpath ended with exit code {done.exit_code} on kernel {kernel}; console: "
            f"{done.console}"
        )
        raise TestFailure("The instruction count failed in the guest", why, "read the console log")
    return medians(done.stdout.splitlines())


def check_skipped(path: HotPath, pages: int, name: str) -> None:
    """TestFailure unless a path of NEW got memory known to be zero; ``pages`` were skipped."""
    wanted = (path.reps + WARM_UPS) * PAGES[path.name]
    if pages < SKIPPED_AT_LEAST * wanted:
        why = f"{pages} of {wanted} pages of {path.name} were known to be zero"
        fix = "look at pgzeroed_* in its /proc/vmstat, or give it more memory (--memory)"
        raise TestFailure(f"The source of zeros is not active in the {name} guest", why, fix)


def _active(run: Run, kernel: Image, paths: Sequence[HotPath]) -> Counts:
    """One boot of one kernel with a balloon that has reported all free memory.

    The median of each path.
    """
    found: Counts = {}
    with running(_spec(run, kernel), run.keep) as guest:
        side = Side(str(kernel), guest)
        side.find_knobs()
        side.free_and_report()
        side.sh(f"{REPORTED}; {LATE}")
        for path in paths:
            before = side.vmstat()
            found |= medians(side.sh(f"hotpath --reps {path.reps} {path.name}"))
            if SKIPPED in before and path.name in PAGES:
                check_skipped(path, side.vmstat()[SKIPPED] - before[SKIPPED], side.name)
    return found


def _count(
    run: Run,
    kernels: Kernels,
    paths: Sequence[HotPath],
    boots: int,
    active: bool = False,
    append: str = "",
) -> Rows:
    """Boot each kernel so many times; the counts of each boot, by the name of the kernel."""
    how = _active if active else functools.partial(_boot, append=append)
    what = ", memory reported" if active else f", {append}" if append else ""
    # Two at once: other load does not change a count.
    what = f"instruction counts{what}: {boots} boots of each kernel"
    with step(what), ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [(name, pool.submit(how, run, kernels[name], paths)) for name in [*kernels] * boots]
        found: Rows = {name: [] for name in kernels}
        for name, job in jobs:
            found[name].append(job.result())
    return found


def compare(
    run: Run,
    rows: Rows,
    paths: Sequence[HotPath],
    prefix: str,
    other: str = "ours",
) -> None:
    """Add one comparison of the base kernel with the ``other``."""
    for path in paths:
        limit = [row[path.name] for row in rows.get("floor", []) if path in NEW]
        values = [row[path.name] for row in rows["base"]], [row[path.name] for row in rows[other]]
        run.add(
            f"hotpath.{prefix}{{path}}.instructions",
            values,
            {
                "path": path.path,
                "counted": path.path,
                "length": path.length,
                "bound": "yes" if path.bound else "no",
            },
            floor=limit,
            accelerator=COUNTING,
        )


def natively(run: Run) -> None:
    """Time of each path in guests side by side, without a source of zeros and with one."""
    khz = accel.tsc_khz()  # the ticks of guest/hotpath.c, whose medians are free of interrupts
    for prefix, paths, names, devices, append in (
        (IDLE, [*PATHS, *MORE], ("base", "ours"), [], APPEND),
        (IDLE, FREED, ("base", "ours"), [], f"{APPEND} {ON_FREE}"),
        (ACTIVE, [*NEW, *PATHS, *MORE], ("base", "ours", "floor"), [BALLOON], APPEND),
    ):
        with run.kernels(*names, append=append, devices=devices) as sides:
            for path in paths:
                found = Values()
                with step(f"hotpath.{prefix}{path.path}: {run.pairs} pairs"):
                    for side, counts in turns(sides, run.pairs):
                        if path in NEW:
                            settle_both([side])
                        value = medians(side.sh(f"hotpath --reps {path.reps} {path.name}"))
                        if counts:
                            found.note(side.name, ns=value[path.name] / khz * 1e6)
                of = {"path": path.path, "counted": path.path, "length": path.length}
                limit = found["floor", "ns"] if path in NEW else []
                run.add(f"hotpath.{prefix}{{path}}.time", found.both("ns"), of, floor=limit)
    run.job = {"memory": run.options.memory, "cpus": 1, "pairs": run.pairs}
    run.note(NATIVE_NOTE)


def measure(run: Run) -> None:
    if run.native:
        natively(run)
        return
    paths, every = [*PATHS, *MORE], [*NEW, *PATHS, *MORE]
    with_floor, with_off = (
        {name: run.images.kernels[name] for name in ("base", "ours", third)}
        for third in ("floor", "off")
    )
    run.note(FLOOR_NOTE)
    reported = _count(run, with_floor, every, BOOTS, active=True)
    rows = _count(run, with_off, paths, BOOTS)
    compare(run, rows, paths, IDLE)
    compare(run, rows, paths, OFF, "off")
    freed = _count(run, with_off, FREED, 1, append=ON_FREE)
    compare(run, freed, FREED, IDLE)
    compare(run, freed, FREED, OFF, "off")
    compare(run, reported, every, ACTIVE)
    run.job = {"memory": run.options.memory, "cpus": 1, "boots": BOOTS, "icount": "shift=0"}
    run.note(NOTE, ACTIVE_NOTE)
