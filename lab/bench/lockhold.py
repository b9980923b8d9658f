# SPDX-License-Identifier: GPL-2.0
"""How long a zone's lock is held, in instructions, seen from outside by a TCG plugin: base against ours."""

from __future__ import annotations

import bisect
import functools
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench import BenchOptions
from lab.bench.hostmemory import fill, release, until_back
from lab.bench.hotpath import symbols
from lab.bench.jobs import elapsed
from lab.bench.kzeropaged import PACE, Cost, zero_all
from lab.bench.plugin import build_plugin
from lab.bench.session import (
    BALLOON,
    DELAY,
    DROP,
    FLUSH,
    LATE,
    MIB,
    Built,
    Side,
    built,
    guests,
    host_facts,
    reproduce,
    resident,
    settle_resident,
    spec_for,
)
from lab.bench.sizes import available_gb, sizes
from lab.core.errors import LabError, TestFailure
from lab.core.progress import step
from lab.report.results import Metric, Result, Target

# As the plugin writes it: magic, slots, lost, wrong, taken, released, how many locks, the locks; then the holds.
HEADER = struct.Struct("<8s6Q32Q")
HOLD = struct.Struct("<3Q")
MAGIC = b"KZLOCKS1"
# Spinlocks are taken and released in these, out of line (CONFIG_UNINLINE_SPIN_UNLOCK).
TAKE, RELEASE = ("_raw_spin_lock", "_raw_spin_trylock"), ("_raw_spin_unlock",)
# They take zone->lock and no other lock.
LEARN = ("free_pcppages_bulk", "free_one_page")
# So begin the functions that hold the lock for a report, and for kzeropaged. What the CPU's lists give back
# meanwhile, late, is of whoever freed it.
REPORTING = ("page_reporting",)
ZEROING = ("prezero", "putback_untouched_block")

# With huge pages; and with small ones, of which each takes an emulated page fault.
FILL_PERCENT, SMALL_PERCENT = 40, 12
# What the CPU keeps of freed memory in lists of its own is not reported.
BACK_PERCENT = 60
MORE_MB = 64
PIECES = "/sys/kernel/mm/transparent_hugepage/hugepages-"
MIDDLE = f"echo never > {PIECES}2048kB/enabled; echo madvise > {PIECES}16kB/enabled"
USUAL = f"echo never > {PIECES}16kB/enabled; echo inherit > {PIECES}2048kB/enabled"
# Freed small pages stay in the CPU's lists, as many as these may hold.
SMALL = f"fillfree --size {MORE_MB} --nothp > /dev/null"
AT_ONCE = f"echo 1 > {DELAY}"
REST_S = 1.0
WORDS = {
    "program": "programs use and free memory in pages of 4 KiB, 16 KiB and 2 MiB, next to long free lists",
    "report": "the worker reports, without delay, what a program freed",
    "flush": "everything free is reported with the flush parameter",
    "prezero": "kzeropaged zeroes what is free",
}
BASE_STEPS, OURS_STEPS = ("program", "report"), tuple(WORDS)
NOTE = (
    "A hold is counted by a TCG plugin outside the guest, from the instruction after the one that takes zone->lock "
    "to the one that releases it; the kernels are those that are measured elsewhere. The guests have one CPU, so "
    "nobody waits for the lock, and interrupts are off while it is held. Instructions are no time: a list that is "
    "walked misses the cache, which no emulator knows of."
)


@dataclass(frozen=True)
class Seen:
    """What the plugin has seen so far. ``holds``: how often, by return address and length in instructions."""

    taken: int
    released: int
    locks: tuple[int, ...]
    holds: Counter[tuple[int, int]]


def parse(data: bytes) -> Seen:
    """Read the plugin's file; LabError when it is none, TestFailure when it does not hang together."""
    if len(data) < HEADER.size or data[: len(MAGIC)] != MAGIC:
        raise LabError(
            "Cannot read what the plugin has counted", "its file does not begin as it should", "run it again"
        )
    _, slots, lost, wrong, taken, released, nr_locks, *locks = HEADER.unpack_from(data)
    if len(data) != HEADER.size + slots * HOLD.size or nr_locks > len(locks):
        raise LabError(
            "Cannot read what the plugin has counted",
            f"its file has {len(data)} bytes for {slots} slots",
            "run it again",
        )
    if lost or wrong:
        raise TestFailure(
            "The plugin did not see all holds of zone->lock",
            f"{wrong} times a lock was taken that was held, or released that was not; {lost} holds did not fit",
            "look at how the spinlocks of this kernel are released (TAKE, RELEASE in lab/bench/lockhold.py)",
        )
    holds: Counter[tuple[int, int]] = Counter()
    for site, length, count in HOLD.iter_unpack(data[HEADER.size :]):
        if count:
            holds[site, length] = count
    return Seen(taken, released, tuple(locks[:nr_locks]), holds)


def _is(name: str, functions: Sequence[str]) -> bool:
    """Whether a symbol is one of these functions, or a copy of it that the compiler made (.part.0, .isra.0 …)."""
    return name.split(".")[0] in functions


def ranges(table: tuple[list[int], list[str]]) -> str:
    """What the plugin wants to know of a kernel; LabError when a function is not there."""
    addresses, names = table
    found: dict[str, list[str]] = {"lock": [], "unlock": [], "learn": []}
    for at, name in enumerate(names[:-1]):
        for kind, wanted in (
            ("lock", name.startswith(TAKE)),
            ("unlock", name.startswith(RELEASE)),
            ("learn", _is(name, LEARN)),
        ):
            if wanted:
                end = next(one for one in addresses[at:] if one > addresses[at])
                found[kind].append(f"{kind} {addresses[at]:x} {end:x}\n")
    missing = [kind for kind, lines in found.items() if not lines]
    if missing:
        raise LabError(
            "Cannot watch zone->lock in this kernel",
            f"its System.map has none of the functions for: {', '.join(missing)}",
            "see TAKE, RELEASE and LEARN in lab/bench/lockhold.py",
        )
    return "".join(line for lines in found.values() for line in lines)


@dataclass
class Holds:
    """Holds of zone->lock by function that took it: how many of each length."""

    by_function: dict[str, Counter[int]] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Seen, after: Seen, table: tuple[list[int], list[str]]) -> Holds:
        """What came on top between two looks. The return addresses are looked up in the kernel's symbols."""
        made = cls()
        for (site, length), count in (after.holds - before.holds).items():
            at = bisect.bisect_right(table[0], site - 1) - 1
            made.by_function.setdefault(table[1][at] if at >= 0 else "?", Counter())[length] += count
        return made

    def of(self, prefixes: tuple[str, ...]) -> Holds:
        """Those of functions that begin so."""
        return Holds({name: counts for name, counts in self.by_function.items() if name.startswith(prefixes)})

    @property
    def lengths(self) -> Counter[int]:
        """All of them, whoever took the lock."""
        total: Counter[int] = Counter()
        for counts in self.by_function.values():
            total += counts
        return total

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.lengths.values())

    @property
    def longest(self) -> tuple[int, str]:
        """Instructions of the longest, and who took the lock then; TestFailure when there was none at all."""
        if not self.by_function:
            raise TestFailure(
                "zone->lock was never taken",
                "the plugin saw no hold in a step that cannot do without",
                "see LEARN in lab/bench/lockhold.py",
            )
        return max((max(counts), name) for name, counts in self.by_function.items())

    def percentile(self, percent: float) -> int:
        """The length that so many percent of all holds do not exceed; ValueError without holds."""
        wanted, seen = self.count * percent / 100, 0
        for length, count in sorted(self.lengths.items()):
            seen += count
            if seen >= wanted:
                return length
        raise ValueError("no holds")

    def __str__(self) -> str:
        length, name = self.longest
        half, most, nearly = (self.percentile(percent) for percent in (50, 90, 99))
        return (
            f"{self.count:,} holds, half of them up to {half:,} instructions, 90 % up to {most:,}, "
            f"99 % up to {nearly:,}, the longest {length:,} in {name}()"
        )


class Watch:
    """The plugin's file of a running guest."""

    def __init__(self, file: Path, table: tuple[list[int], list[str]]) -> None:
        self.file = file
        self.table = table

    def look(self) -> Seen:
        """What has been seen until now."""
        return parse(self.file.read_bytes())

    @contextmanager
    def during(self) -> Iterator[Holds]:
        """The holds while what is inside goes on; filled in when it is over."""
        found, before = Holds(), self.look()
        yield found
        found.by_function = Holds.between(before, self.look(), self.table).by_function


@contextmanager
def watched(
    options: BenchOptions, kernel: str | Path, qemu: Path, name: str, memory: str, device: str | None
) -> Iterator[tuple[Side, Watch]]:
    """Boot a guest with one CPU under the plugin; LabError when the kernel's symbols are not there."""
    system_map = Path(kernel).parent / "System.map"
    if not system_map.is_file():
        raise LabError(
            "Cannot watch zone->lock in this kernel",
            f"there is no {system_map.name} beside {kernel}",
            "use a kernel that `kz build linux` has built",
        )
    table = symbols(system_map)
    with tempfile.TemporaryDirectory(prefix="lockhold-") as folder:
        about, out = Path(folder) / "symbols", Path(folder) / "holds"
        about.write_text(ranges(table), encoding="utf-8")
        spec = spec_for(
            options.with_accel("tcg"),
            kernel,
            qemu,
            memory=memory,
            devices=[device] if device else [],
            append="nokaslr",
            extra_qemu=["-plugin", f"{build_plugin('lockhold')},symbols={about},out={out}"],
        )
        with guests([(name, spec)]) as sides:
            yield sides[0], Watch(out, table)


def fill_mb(gb: int, percent: int = SMALL_PERCENT) -> int:
    """How much of a guest's memory is used; a multiple of what fillfree takes at once."""
    return gb * 1024 * percent // 100 // 16 * 16


def entries(side: Side) -> int:
    """Blocks on the free lists of the zone and order that has most of them."""
    return max(
        int(number) for line in side.sh("cat /proc/buddyinfo") for number in line.split("zone")[1].split()[1:]
    )


def report(side: Side, watch: Watch, gb: int) -> Holds:
    """Fill, free, and let the worker report all of it; the holds of the worker."""
    side.sh(AT_ONCE)
    wanted = fill_mb(gb, FILL_PERCENT)
    full = fill(side, wanted, warm=False)
    with watch.during() as found:
        release(side)
        side.sh("wait")
        until_back(side, full, wanted * MIB * BACK_PERCENT // 100)
        settle_resident(side.guest.pid, timeout=120, what=f"the {side.name} guest", still_s=REST_S)
    side.sh(LATE)
    return found.of(REPORTING)


def program(side: Side, watch: Watch, gb: int) -> tuple[Holds, int]:
    """Use and free pages of 4 KiB with gaps, of 2 MiB and of 16 KiB; holds, and entries of the longest list."""
    side.sh(LATE)
    with watch.during() as found:
        fill(side, fill_mb(gb), more="--nothp --gaps 4", warm=False)
        side.sh(DROP)  # from the CPU's lists to those of the zone
        longest = entries(side)
        side.sh(f"alloc_once --size {MORE_MB} --mode touch_line --pages nothp > /dev/null")
        release(side)
        side.sh(f"wait; fillfree --size {fill_mb(gb)} > /dev/null")
        side.sh(f"{MIDDLE}; fillfree --size {MORE_MB} > /dev/null; {USUAL}")
    return found, longest


def flush(side: Side, watch: Watch) -> Holds:
    """Report everything with the flush parameter, which empties the CPU's lists first."""
    side.sh(SMALL)
    full = resident(side.guest.pid)
    with watch.during() as found:
        side.sh(f"echo 0 > {FLUSH}")
    if resident(side.guest.pid) >= full:
        raise TestFailure(
            f"A flush did not report anything ({side.name})",
            f"QEMU has {resident(side.guest.pid) // MIB} MB as before",
            "look at the status of the balloon",
        )
    return found


def prezero(side: Side, watch: Watch, gb: int) -> tuple[Holds, int]:
    """Zero what is free, much of it in pieces of 64 KiB; holds of kzeropaged, and entries of the longest list."""
    side.sh(PACE)
    fill(side, fill_mb(gb), more="--nothp --gaps 64", warm=False)
    side.sh(DROP)
    longest = entries(side)
    with watch.during() as found:
        zero_all(side, Cost(), look=REST_S / 2)
    release(side)
    side.sh("wait")
    return found.of(ZEROING), longest


@dataclass
class Found:
    """Holds by kernel, step and GB; entries of the longest free list by the same."""

    holds: dict[tuple[str, str, int], Holds] = field(default_factory=dict)
    entries: dict[tuple[str, str, int], int] = field(default_factory=dict)


def _reporting_guest(options: BenchOptions, images: Built, kernel: str, gb: int, found: Found) -> None:
    image = images.base if kernel == "base" else images.ours
    with watched(options, image, images.qemu, f"locks-{kernel}-{gb}", f"{gb}G", BALLOON) as (side, watch):
        found.holds[kernel, "report", gb] = report(side, watch, gb)
        found.holds[kernel, "program", gb], found.entries[kernel, "program", gb] = program(side, watch, gb)
        if kernel == "ours":
            found.holds[kernel, "flush", gb] = flush(side, watch)


def _zeroing_guest(options: BenchOptions, images: Built, gb: int, found: Found) -> None:
    # Without a balloon: what is reported is not zeroed.
    with watched(options, images.ours, images.qemu, f"locks-prezero-{gb}", f"{gb}G", None) as (side, watch):
        found.holds["ours", "prezero", gb], found.entries["ours", "prezero", gb] = prezero(side, watch, gb)


@functools.cache
def measure(options: BenchOptions, images: Built, gbs: tuple[int, ...]) -> Found:
    """Every step in guests of each size. Who asks again, as two benches do, gets the same: these are counts."""
    found = Found()
    jobs: list[Callable[[], None]] = []
    for gb in gbs:
        for kernel in ("base", "ours"):
            jobs.append(functools.partial(_reporting_guest, options, images, kernel, gb, found))
        jobs.append(functools.partial(_zeroing_guest, options, images, gb, found))
    # Two at once: a count does not care what else the machine does, its memory would for more.
    with (
        step(f"holds of zone->lock: {len(jobs)} guests of {', '.join(map(str, gbs))} GB"),
        ThreadPoolExecutor(max_workers=2) as pool,
    ):
        for job in [pool.submit(job) for job in jobs]:
            job.result()
    return found


def growth(found: Found, gbs: Sequence[int], prefix: str) -> list[Metric]:
    """The longest hold of each step in each larger guest against the smallest: smallest, larger."""
    metrics = []
    for (kernel, name), words in {
        **{("base", name): f"{WORDS[name]} (base kernel)" for name in BASE_STEPS},
        **{("ours", name): WORDS[name] for name in OURS_STEPS},
    }.items():
        small, who = found.holds[kernel, name, gbs[0]].longest
        for gb in gbs[1:]:
            large, where = found.holds[kernel, name, gb].longest
            target = None
            # What upstream does is there to compare with.
            if gb == gbs[-1] and kernel == "ours":
                times = gb / gbs[0]
                target = Target(
                    f"grows no faster than the memory: {large / small:.2f} times, of {times:.0f} times the memory",
                    large <= small * times,
                )
            suffix = "_base" if kernel == "base" else ""
            metrics.append(
                Metric.of(
                    f"{prefix}.{name}{suffix}.{gb}gb",
                    "instructions",
                    [float(small)],
                    [float(large)],
                    sentence=f"The longest hold of zone->lock when {words}: guests of {gbs[0]} GB, in {who}(), "
                    f"and of {gb} GB, in {where}().",
                    target=target,
                )
            )
    return metrics


def against_base(found: Found, gbs: Sequence[int]) -> list[Metric]:
    """Longest holds, 99th percentiles and how many there were: base against ours, for each size."""
    metrics = []
    for gb in gbs:
        anyway = max((found.holds["base", name, gb] for name in BASE_STEPS), key=lambda holds: holds.longest)
        for name in OURS_STEPS:
            ours = found.holds["ours", name, gb]
            base = found.holds.get(("base", name, gb), anyway)
            what = f"when {WORDS[name]}, in a guest of {gb} GB"
            (one, who), (two, where) = base.longest, ours.longest
            rest = "" if base is not anyway or name in BASE_STEPS else " Base does nothing of the kind: its "
            if rest:
                rest += "figure is the longest hold that it has in any step."
            metrics.append(
                Metric.of(
                    f"lockhold.{name}.{gb}gb.longest",
                    "instructions",
                    [float(one)],
                    [float(two)],
                    sentence=f"The longest hold of zone->lock {what}: in {who}() on base and in {where}() on "
                    f"ours.{rest}",
                )
            )
            if name not in BASE_STEPS:
                continue
            metrics.append(
                Metric.of(
                    f"lockhold.{name}.{gb}gb.p99",
                    "instructions",
                    [base.percentile(99)],
                    [ours.percentile(99)],
                    sentence=f"99 % of the holds of zone->lock are not longer {what}.",
                )
            )
            metrics.append(
                Metric.of(
                    f"lockhold.{name}.{gb}gb.holds",
                    "",
                    [base.count],
                    [ours.count],
                    sentence=f"Holds of zone->lock {what}.",
                )
            )
    return metrics


def notes(found: Found) -> list[str]:
    """A sentence for each step of each guest."""
    said = []
    for (kernel, name, gb), holds in sorted(found.holds.items(), key=lambda one: (one[0][2], one[0])):
        text = f"{kernel}, {gb} GB, {name}: {holds}"
        if (kernel, name, gb) in found.entries:
            text += f"; the longest free list had {found.entries[kernel, name, gb]:,} blocks"
        said.append(text + ".")
    return said


def run(options: BenchOptions) -> Result:
    """Count the instructions of holds alone; always under TCG; raises LabError when it cannot."""
    began = time.monotonic()
    images = built(options)
    gbs = sizes(available_gb())
    found = measure(options, images, gbs)
    return Result(
        name="lockhold",
        accelerator="tcg",
        versions=images.versions(),
        reproduce=reproduce("lockhold", options, "tcg"),
        metrics=against_base(found, gbs),
        job={"sizes_gb": list(gbs), "cpus": 1, "fill_percent": [FILL_PERCENT, SMALL_PERCENT]},
        host=host_facts(),
        notes=[NOTE, *notes(found)],
        seconds=elapsed(began),
    )
