# SPDX-License-Identifier: GPL-2.0
"""Instructions of the hot paths.

Base against ours, compiled out, without a source of zeros, and with one.
"""

import functools
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.bench.plan import Image
from lab.bench.plugin import Symbols, symbols
from lab.bench.repeat import Values, turns
from lab.bench.runner import COUNTING, FLOOR_NOTE, Run
from lab.bench.session import BALLOON, LATE, Side, settle_both, spec_for
from lab.boot import accel
from lab.boot.guest import boot, running
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.observations import metrics

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

    Its metric is hotpath.``metric``.instructions (or ``name``).

    A breakdown repeats ``loop`` of guest/hotpath.c, with ``operations`` of them in each repetition,
    and names functions that differ by at least ``worth`` instructions for each operation.
    ``bound``: the limit holds for it.
    """

    name: str
    loop: str
    operations: int = 1
    reps: int = REPS
    worth: float = 0.5
    bound: bool = True
    metric: str = ""
    length: str = "short"  # of its chart

    @property
    def path(self) -> str:
        """The parameter of its metrics."""
        return self.metric or self.name


# Emulated, a huge page or a process takes as long as hundreds of the others: fewer repetitions.
PATHS = (
    HotPath("fault", "fault", 32),
    HotPath("alloc_free", "pipe_deep", 13),
    HotPath("buddy", "buddy", 221, FEW, metric="buddy_alloc_free", bound=False),
    HotPath("thp_fault", "thp_fault", 1, FEW, length="long"),
)
MORE = (
    HotPath("order3", "list3", metric="alloc_free_order3"),
    HotPath("order9", "list9", metric="alloc_free_order9", length="long"),
    HotPath("fork", "fork", 1, FEW, 200.0, metric="fork_exit", length="long"),
    HotPath("exec", "exec", 1, FEW, 200.0, metric="fork_exec", length="long"),
    HotPath("populate", "populate", 32),
    HotPath("over_limit", "over_limit", 1, FEW, 200.0, length="long"),
)
# With ON_FREE.
FREED = (
    HotPath(
        "thp_fault",
        "thp_fault",
        reps=FEW,
        worth=200.0,
        bound=False,
        metric="thp_fault_init_on_free",
        length="long",
    ),
)
# Each repetition uses memory that was not used since it was reported.
NEW = (
    HotPath("new_fault", "new_fault", 32),
    HotPath("new_thp", "new_thp", 1, FEW, metric="new_thp_fault", length="long"),
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


def _spec(
    run: Run, kernel: Image, extra: Sequence[str] = (), append: str = "", **more: Any
) -> BootSpec:
    options = replace(run.options, accel="tcg")
    more |= {"append": f"{APPEND} {append}".strip(), "extra_qemu": [*ICOUNT, *extra]}
    return spec_for(options, kernel, run.images.qemu, **more)


def _boot(
    run: Run, kernel: Image, paths: Sequence[HotPath], extra: Sequence[str] = (), append: str = ""
) -> Counts:
    """One boot of one kernel without a balloon; the median of each path.

    ``append``: more of the kernel's command line.
    """
    # A process for each, so that no path starts with the memory of another.
    steps = [f"hotpath --reps {path.reps} {path.name}" for path in paths]
    command = ["sh", "-ec", "; ".join(steps)]
    spec = _spec(run, kernel, extra, append, devices=[], timeout=900.0, command=command)
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


def by_function(counted: str, table: Symbols) -> Counter[str]:
    """The plugin's output, ``ADDRESS INSTRUCTIONS`` a line, added up by function."""
    total: Counter[str] = Counter()
    for address, count in (line.split() for line in counted.splitlines()):
        total[table.function_at(int(address, 16))] += int(count)
    del total["?"]
    return total


def _functions(run: Run, kernel: Path, path: HotPath) -> Counts:
    """Instructions in each function of the kernel for one operation of a path."""
    plugin, table = run.images.plugins["functions"], symbols(kernel.parent / "System.map")
    counts, repetitions = [], (path.reps // 10, path.reps)
    with tempfile.TemporaryDirectory(prefix="functions-") as folder:
        for reps in repetitions:
            file = Path(folder) / str(reps)
            one = replace(path, name=path.loop, reps=reps)
            _boot(run, kernel, [one], ["-plugin", f"{plugin},out={file}"])
            counts.append(by_function(file.read_text(encoding="utf-8"), table))
    few, many = counts
    done = (repetitions[1] - repetitions[0]) * path.operations
    return {function: (many[function] - few[function]) / done for function in many | few}


def breakdown(
    run: Run, images: Kernels, path: HotPath, prefix: str = IDLE, other: str = "ours"
) -> None:
    """Add the functions that make the difference: those with another share of a path in other."""
    kernels = [Path(images["base"]), Path(images[other])]
    if not all((one.parent / "System.map").is_file() for one in kernels):
        return
    with (
        step(f"instructions of {path.name} by function"),
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        base, ours = pool.map(lambda kernel: _functions(run, kernel, path), kernels)
    # Boots differ: a count below zero is of the waiting in one of them, not of the path.
    names = [name for name in base | ours if min(base.get(name, 0.0), ours.get(name, 0.0)) >= 0]
    differs = {name: ours.get(name, 0.0) - base.get(name, 0.0) for name in names}
    for name in sorted(differs, key=lambda name: -abs(differs[name])):
        if abs(differs[name]) >= path.worth:
            values = [base.get(name, 0.0)], [ours.get(name, 0.0)]
            metric = f"hotpath.{prefix}{{path}}.in.{{function}}"
            of = {"path": path.path, "path_name": path.path, "function": name}
            run.add(metric, values, of, accelerator=COUNTING)


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
    images: Kernels,
    rows: Rows,
    paths: Sequence[HotPath],
    prefix: str,
    other: str = "ours",
) -> None:
    """Add one comparison of the base kernel with the ``other``.

    Without an active source it has a limit, and a breakdown beyond the limit.
    """
    for path in paths:
        limit = [row[path.name] for row in rows.get("floor", []) if path in NEW]
        values = [row[path.name] for row in rows["base"]], [row[path.name] for row in rows[other]]
        found = run.add(
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
        (made,) = metrics(found)
        if any(one and not one.met for one in (made.target, made.near_floor)):
            breakdown(run, images, path, prefix, other)


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
    images = run.images
    paths, every = [*PATHS, *MORE], [*NEW, *PATHS, *MORE]
    known = images.kernels
    kernels = {"base": images.base, "ours": images.ours}
    run.note(FLOOR_NOTE)
    reported = _count(run, kernels | {"floor": known["floor"]}, every, BOOTS, active=True)
    rows = _count(run, kernels | {"off": known["off"]}, paths, BOOTS)
    compare(run, kernels, rows, paths, IDLE)
    compare(run, known, rows, paths, OFF, "off")
    freed = _count(run, kernels | {"off": known["off"]}, FREED, 1, append=ON_FREE)
    compare(run, kernels, freed, FREED, IDLE)
    compare(run, known, freed, FREED, OFF, "off")
    compare(run, kernels, reported, every, ACTIVE)
    run.job = {"memory": run.options.memory, "cpus": 1, "boots": BOOTS, "icount": "shift=0"}
    run.note(NOTE, ACTIVE_NOTE)
