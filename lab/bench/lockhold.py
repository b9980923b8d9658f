# SPDX-License-Identifier: GPL-2.0
"""How long a zone's lock is held, in instructions, counted by a TCG plugin: base against ours."""

from __future__ import annotations

import itertools
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from lab.bench import session
from lab.bench.host import fill, fill_mb, release, sizes, until_back
from lab.bench.kzeropaged import zero_all
from lab.bench.plan import available_gb
from lab.bench.plugin import Symbols, symbols
from lab.bench.runner import Run
from lab.bench.session import MIB, Side, Wanted
from lab.boot.guest import Keep, forget
from lab.boot.spec import BootSpec
from lab.core.errors import LabError, TestFailure
from lab.core.progress import step

# The plugin's file: magic, slots, lost, wrong, taken, released, number of locks, the locks; then
# the holds.
HEADER = struct.Struct("<8s6Q32Q")
HOLD = struct.Struct("<3Q")
MAGIC = b"KZLOCKS1"
NO_WATCH = "Cannot watch zone->lock in this kernel"
# Spinlocks are taken and released in these functions, out of line (CONFIG_UNINLINE_SPIN_UNLOCK).
TAKE, RELEASE = ("_raw_spin_lock", "_raw_spin_trylock"), ("_raw_spin_unlock",)
# They take zone->lock and no other lock.
LEARN = ("free_pcppages_bulk", "free_one_page")
# The beginnings of the functions that hold the lock for a report, and for kzeropaged.
REPORTING = ("page_reporting",)
ZEROING = ("prezero",)

# With huge pages; and with small ones, each of which takes an emulated page fault.
FILL_PERCENT, SMALL_PERCENT = 40, 12
BACK_PERCENT = 60  # freed memory in the lists of the CPU is not reported
MORE_MB = 64
PIECES = "/sys/kernel/mm/transparent_hugepage/hugepages-"
MIDDLE = f"echo never > {PIECES}2048kB/enabled; echo madvise > {PIECES}16kB/enabled"
USUAL = f"echo never > {PIECES}16kB/enabled; echo inherit > {PIECES}2048kB/enabled"
# Freed small pages stay in the lists of the CPU, up to a limit.
SMALL = f"fillfree --size {MORE_MB} --nothp > /dev/null"
REST_S = 1.0
STEPS = ("program", "report", "flush", "prezero")
BASE_STEPS = ("program", "report")
NOTE = (
    "A TCG plugin outside the guest counts a hold from the instruction after the one that takes "
    "zone->lock to the one that releases it; the kernels are those of the other benches. The "
    "guests have one CPU, so the lock has no waiters, and interrupts are off while it is held. "
    "Instructions are no time: a walk of a list misses the cache, which the emulator does not "
    "model."
)


@dataclass(frozen=True)
class Seen:
    """The plugin's file. ``holds``: how many by return address and length in instructions."""

    taken: int
    released: int
    locks: tuple[int, ...]
    holds: Counter[tuple[int, int]]


def parse(data: bytes) -> Seen:
    """Read the plugin's file.

    LabError for another file, TestFailure for one that contradicts itself.
    """
    what = "Cannot read the counts of the plugin lockhold"
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise LabError(what, f"its file does not begin with {MAGIC.decode()}", "run it again")
    _, slots, lost, wrong, taken, released, nr_locks, *locks = HEADER.unpack_from(data)
    if len(data) != HEADER.size + slots * HOLD.size or nr_locks > len(locks):
        raise LabError(what, f"its file has {len(data)} bytes for {slots} slots", "run it again")
    if lost or wrong:
        why = (
            f"{wrong} times a held lock was taken, or a free one was released; {lost} holds did "
            "not fit"
        )
        fix = (
            "see how the spinlocks of this kernel are released (TAKE, RELEASE in "
            "lab/bench/lockhold.py)"
        )
        raise TestFailure("The plugin did not see all holds of zone->lock", why, fix)
    rows = HOLD.iter_unpack(data[HEADER.size :])
    holds = Counter({(site, length): count for site, length, count in rows if count})
    return Seen(taken, released, tuple(locks[:nr_locks]), holds)


def ranges(table: Symbols) -> list[str]:
    """The plugin's arguments for a kernel; LabError when a function is missing."""
    found: dict[str, list[str]] = {"lock": [], "unlock": [], "learn": []}
    for at, name in enumerate(table.names[:-1]):
        plain = name.split(".")[0]  # without the compiler's .part.0, .isra.0
        kinds = {
            "lock": name.startswith(TAKE),
            "unlock": name.startswith(RELEASE),
            "learn": plain in LEARN,
        }
        for kind in (kind for kind, wanted in kinds.items() if wanted):
            end = next(one for one in table.addresses[at:] if one > table.addresses[at])
            found[kind].append(f"{kind}={table.addresses[at]:x}-{end:x}")
    if missing := [kind for kind, lines in found.items() if not lines]:
        why = f"its System.map has none of the functions for: {', '.join(missing)}"
        raise LabError(NO_WATCH, why, "see TAKE, RELEASE and LEARN in lab/bench/lockhold.py")
    return [line for lines in found.values() for line in lines]


@dataclass
class Holds:
    """Holds of zone->lock: how many of each length, by the function that took it."""

    by_function: dict[str, Counter[int]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Seen, after: Seen, table: Symbols) -> Holds:
        """The holds between two looks, with their return addresses looked up in the kernel's
        symbols.
        """
        made = cls()
        for (site, length), count in (after.holds - before.holds).items():
            made.by_function.setdefault(table.function_at(site - 1), Counter())[length] += count
        return made

    def of(self, prefixes: tuple[str, ...]) -> Holds:
        found = {
            name: counts for name, counts in self.by_function.items() if name.startswith(prefixes)
        }
        return Holds(found)

    @property
    def longest(self) -> tuple[int, str]:
        """Instructions of the longest, and the function that took the lock.

        TestFailure without a hold.
        """
        if not self.by_function:
            why = "the plugin saw no hold in a step that needs the lock"
            raise TestFailure(
                "zone->lock was never taken", why, "see LEARN in lab/bench/lockhold.py"
            )
        return max((max(counts), name) for name, counts in self.by_function.items())


class Watch(NamedTuple):
    """The plugin's file of a running guest."""

    file: Path
    table: Symbols

    def look(self) -> Seen:
        return parse(self.file.read_bytes())

    @contextmanager
    def during(self) -> Iterator[Holds]:
        found, before = Holds(), self.look()
        yield found
        found.by_function = Holds.between(before, self.look(), self.table).by_function


@contextmanager
def watched(
    name: str, spec: BootSpec, plugin: Path, keep: Keep = forget
) -> Iterator[tuple[Side, Watch]]:
    """Boot a guest with one CPU under the plugin; LabError without the kernel's symbols."""
    system_map = Path(spec.kernel).parent / "System.map"
    if not system_map.is_file():
        why = f"there is no {system_map.name} beside {spec.kernel}"
        raise LabError(NO_WATCH, why, "use a kernel that `kz build linux` has built")
    table = symbols(system_map)
    with tempfile.TemporaryDirectory(prefix="lockhold-") as folder:
        out = Path(folder) / "holds"
        words = ",".join([str(plugin), f"out={out}", *ranges(table)])
        spec = replace(spec, accel="tcg", append="nokaslr", extra_qemu=["-plugin", words])
        with session.guests([Wanted(name, spec)], keep) as sides:
            yield sides[0], Watch(out, table)


def report(side: Side, watch: Watch, gb: int) -> Holds:
    """Fill, free, and let the worker report all of it; the holds of the worker."""
    side.sh(session.AT_ONCE)
    wanted = fill_mb(gb, FILL_PERCENT)
    full = fill(side, wanted, warm=False)
    with watch.during() as found:
        release(side)
        side.sh("wait")
        until_back(side, full, wanted * MIB * BACK_PERCENT // 100)
        session.settle_resident(
            side.guest.pid, timeout=120, what=f"the {side.name} guest", still_s=REST_S
        )
    side.sh(session.LATE)
    return found.of(REPORTING)


def program(side: Side, watch: Watch, gb: int) -> Holds:
    """Use and free pages of 4 KiB with gaps, of 2 MiB and of 16 KiB."""
    side.sh(session.LATE)
    with watch.during() as found:
        fill(side, fill_mb(gb, SMALL_PERCENT), more="--nothp --gaps 4", warm=False)
        side.sh(session.DROP)  # from the CPU's lists to those of the zone
        side.sh(f"alloc_once --size {MORE_MB} --mode touch_line --pages nothp > /dev/null")
        release(side)
        side.sh(f"wait; fillfree --size {fill_mb(gb, SMALL_PERCENT)} > /dev/null")
        side.sh(f"{MIDDLE}; fillfree --size {MORE_MB} > /dev/null; {USUAL}")
    return found


def flush(side: Side, watch: Watch, gb: int) -> Holds:
    """Report everything by a flush, which empties the CPU's lists first."""
    del gb
    side.sh(SMALL)
    full = session.resident(side.guest.pid)
    with watch.during() as found:
        side.sh(f"echo 0 > {session.FLUSH}")
    if session.resident(side.guest.pid) >= full:
        what, why = (
            f"A flush did not report anything ({side.name})",
            f"QEMU still has {full // MIB} MB",
        )
        raise TestFailure(what, why, "look at the status of the balloon")
    return found


def prezero(side: Side, watch: Watch, gb: int) -> Holds:
    """Zero free memory, much of it in pieces of 64 KiB; the holds of kzeropaged."""

    def gaps(side: Side) -> None:
        fill(side, fill_mb(gb, SMALL_PERCENT), more="--nothp --gaps 64", warm=False)
        side.sh(session.DROP)

    with watch.during() as found:
        zero_all(side, gaps)
    release(side)
    side.sh("wait")
    return found.of(ZEROING)


Found = dict[tuple[str, str, int], Holds]  # by kernel, step and GiB
# Reported memory is not zeroed, so pre-zeroing has a guest of its own, without a balloon.
GUESTS = {"base": (report, program), "ours": (report, program, flush), "prezero": (prezero,)}


def _guest(run: Run, kind: str, gb: int, found: Found) -> None:
    kernel, devices = (
        "base" if kind == "base" else "ours",
        [] if kind == "prezero" else [session.BALLOON],
    )
    spec = run.spec(kernel, memory=f"{gb}G", devices=devices)
    plugin = run.images.plugins["lockhold"]
    with watched(f"locks-{kind}-{gb}", spec, plugin, run.keep) as (side, watch):
        for one in GUESTS[kind]:
            found[kernel, one.__name__, gb] = one(side, watch, gb)


def holds(run: Run, gbs: Sequence[int]) -> Found:
    found: Found = {}
    # Two at once: other load does not change a count, and the memory of more would.
    what = f"holds of zone->lock: guests of {', '.join(map(str, gbs))} GiB"
    with step(what), ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(_guest, run, kind, gb, found) for gb in gbs for kind in GUESTS]
        for job in jobs:
            job.result()
    run.note(NOTE)
    return found


def against_base(run: Run, found: Found, gbs: Sequence[int]) -> None:
    for gb, name in itertools.product(gbs, STEPS):
        ours, has = found["ours", name, gb], name in BASE_STEPS
        steps = [found["base", step, gb] for step in ((name,) if has else BASE_STEPS)]
        base = max(steps, key=lambda one: one.longest)
        (one, first), (two, second) = base.longest, ours.longest
        of = {"work": name, "gb": gb}
        functions = {"function_base": first, "function_ours": second}
        longest = [float(one)], [float(two)]
        run.add("lockhold.{work}.{gb}gb.longest", longest, {**of, **functions})


def measure(run: Run) -> None:
    gbs = sizes(available_gb())
    run.job = {"sizes_gb": list(gbs), "cpus": 1, "fill_percent": [FILL_PERCENT, SMALL_PERCENT]}
    found = holds(run, gbs)
    against_base(run, found, gbs)
