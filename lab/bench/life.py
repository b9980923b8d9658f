# SPDX-License-Identifier: GPL-2.0
"""A guest's life in phases: boot, programs, idle, park, save to a file, restore, burst.

All settings are the defaults of the kernel and of the devices, except init_on_alloc, which is 0 and
1. Each life is a guest of its own; the columns take turns.
"""

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench import init_on_alloc
from lab.bench.fleet import pss
from lab.bench.host import BACK_PERCENT, take_back, until_back
from lab.bench.jobs import BASE_COUNTS, SPARE, zeroed_bytes
from lab.bench.kzeropaged import PREZEROED
from lab.bench.repeat import Values, turns
from lab.bench.runner import Run
from lab.bench.session import (
    MIB,
    PAGE,
    STILL_FIXED_S,
    Side,
    cpu_ns,
    held_host,
    raise_priority,
    resident,
    settle_resident,
    warm_host,
)
from lab.boot import balloon, resolve
from lab.boot.guest import Guest, running
from lab.boot.spec import BootSpec
from lab.core import paths
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.patches.parts import split

LIVES = 3  # of each column, at most: one takes half a minute under emulation
AGAIN_S = 2.0
ENDED_S = 4.0  # in which a host that is a guest reports the memory of a guest that has ended
WARM_MB = 512  # of the host's memory, before a boot and a restore
PASSES_S = 180.0  # in which page reporting has to give back what a guest has freed
LEFT_MB = 192  # of free memory, for a guest whose balloon takes the rest: at 135 it takes no more
LOOK_S = 0.002
GIVE_UP_S = 120.0
# Free pages in the lists of a CPU, which nr_free_pages leaves out.
IN_LISTS = "awk '$1 == \"count:\" { n += $2 } END { print n + 0 }' /proc/zoneinfo"
NO_REPORTS = balloon.device()
REPORTS = balloon.device(free_page_reporting="on")

PHASES = (
    *("boot", "first", "again", "later", "idle", "park"),
    *("save_cached", "save", "restore", "restored", "burst"),
)
# The phases that come before in a life of one phase, and only there.
SAVED = ("park", "save")
NEEDS: dict[str, tuple[str, ...]] = {
    "again": ("first",),
    "later": ("first", "again"),
    "save_cached": ("park",),
    "save": ("park",),
    "restore": SAVED,
    "restored": (*SAVED, "restore"),
    "burst": (*SAVED, "restore", "restored"),
}
INITS = (0, 1)
KINDS = ("zeroed", "time", "host", "file", "of_used", "prezeroed", "cpu")
SUMS = ("zeroed", "time")  # also of the whole life
WHOLE = "whole"
NOTES = (
    "A life is a guest of its own; the columns take turns. Settings are the defaults, except "
    "init_on_alloc, and the balloon's free-page-reporting, which base alone has off. kzeropaged: "
    "prezero=on on the command line. The program writes to each byte of its huge pages; the second "
    "run follows at once, the third after 2 s. A restored guest rests for 4 s before its first "
    "program, and for 2 s before the burst. Before a phase, the lab allocates as much memory as "
    "the phase needs, and frees it when the phase begins: if the host is a guest, its free memory "
    "may be reported.",
    "Park: the guest fills memory and frees it. The time ends when the host has "
    f"{BACK_PERCENT} % of it. Base inflates its balloon, and deflates it afterwards. Base with "
    "reports waits for the passes of page reporting, every 2000 ms. Ours gets balloon-report-now.",
    "Save: QEMU stops the guest and migrates it to a file; file size is what the file system has "
    "allocated. Used memory is the guest's memory without its free pages. First with the page "
    "cache, then after drop_caches and another park of all free memory. The restored guest is a "
    "new QEMU with -incoming; its time ends when the guest's shell answers.",
    "Host memory is the PSS of QEMU at the end of a phase, translated code included. Bytes zeroed "
    "with init_on_alloc=1: ours counts them, base zeroes each page that it allocates. Bytes that "
    "kzeropaged zeroes are counted apart. Time of the whole life: the sum of its phases, without "
    "rests.",
    "Not measured: instructions, since -icount gives a guest a clock of its own, which does not "
    "wait for the host; and bytes that the host zeroes: its kernel is not ours.",
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a life in MB, and how long it idles."""

    memory_mb: int = 4096
    program_mb: int = 1024
    cache_mb: int = 300
    park_mb: int = 3072
    burst_mb: int = 2048
    # Page reporting makes a pass every 2 s, and the last one about 9 s after a program of 1 GiB.
    idle_s: float = 12.0


def inflate(side: Side, size: int) -> None:
    """Take ``size`` bytes by the balloon, as hosts do today."""
    balloon.fill(side.guest, size)


def deflate(side: Side) -> None:
    balloon.fill(side.guest, 0)


def wait_for_passes(side: Side, size: int) -> None:
    """Wait until page reporting has given back most of what was just freed."""
    until_back(side, resident(side.guest.pid), size * BACK_PERCENT // 100, PASSES_S)


def report_now(side: Side, size: int) -> None:
    """Have all free memory reported by balloon-report-now."""
    del size
    balloon.report_now(side.guest)


class Column(NamedTuple):
    """A kind of guest, and how its host takes free memory back at once."""

    kernel: str
    device: str
    park: Callable[[Side, int], None]
    append: str = ""
    after_park: Callable[[Side], None] = lambda side: None


BASE = "base"
COLUMNS = {
    BASE: Column("base", NO_REPORTS, inflate, after_park=deflate),
    "reports": Column("base", REPORTS, wait_for_passes),
    "ours": Column("ours", REPORTS, report_now),
    "kzeropaged": Column("ours", REPORTS, report_now, "prezero=on"),
}


def phases(only: str) -> list[str]:
    """The phases to run for --only, with those that they need, in order; all without it."""
    chosen = set(split(only) or PHASES)
    chosen = chosen.union(*(NEEDS.get(name, ()) for name in chosen))
    return [one for one in PHASES if one in chosen]


def disk(folder: Path, size_mb: int) -> Path:
    """A file of bytes that are not zero, which guests read into their page cache."""
    target, piece = folder / "disk", os.urandom(MIB)
    with target.open("wb") as file:
        for _ in range(size_mb):
            file.write(piece)
    return target


def spec(run: Run, column: str, init: int, sizes: Sizes, image: Path) -> BootSpec:
    """The boot of a life's guest."""
    about = COLUMNS[column]
    drive = f"file={str(image).replace(',', ',,')},if=none,id=pages,format=raw,readonly=on"
    more: dict[str, Any] = {"memory": f"{sizes.memory_mb}M", "label": f"{column}-init{init}"}
    more["append"] = f"init_on_alloc={init} {about.append}".strip()
    more["devices"] = [about.device, "virtio-blk-pci,drive=pages"]
    return run.spec(about.kernel, extra_qemu=["-drive", drive], **more)


def write_state(guest: Guest, file: Path) -> None:
    """Write the state of a stopped guest to a file."""
    guest.qmp("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
    guest.qmp("migrate", uri=f"file:{file}")
    _migrated(guest)


def _migrated(guest: Guest) -> None:
    """Wait for the end of a migration; TestFailure when it fails."""
    deadline = time.monotonic() + GIVE_UP_S
    while (found := guest.qmp("query-migrate")).get("status") != "completed":
        if found.get("status") in ("failed", "cancelled") or time.monotonic() > deadline:
            why, fix = f"query-migrate returns {found}", "read the log of QEMU; free disk space"
            raise TestFailure("A guest cannot be saved or restored", why, fix)
        time.sleep(LOOK_S)


@dataclass
class Life:
    """A guest that lives; ``found``: its figures by phase and kind."""

    run: Run
    column: str
    init: int
    sizes: Sizes
    folder: Path
    image: Path
    found: dict[tuple[str, str], float] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)
    cached: bool = False

    @property
    def about(self) -> Column:
        return COLUMNS[self.column]

    @property
    def file(self) -> Path:
        return self.folder / "saved"

    def note(self, phase: str, **named: float) -> None:
        """Note figures of a phase, and the host memory at its end."""
        named["host"] = pss(self.side.guest.pid) * 2**30
        self.found |= {(phase, kind): float(value) for kind, value in named.items()}

    def _enter(self, wanted: BootSpec) -> None:
        guest = self.stack.enter_context(running(wanted, self.run.keep))
        self.run.ran_on(guest)
        raise_priority(guest.pid)
        self.side = Side(self.column, guest, kernel=self.about.kernel)

    def _leave(self) -> None:
        """End the guest; what it has done counts for the whole life."""
        before = self.found.get((WHOLE, "cpu"), 0.0)
        self.found[WHOLE, "cpu"] = before + cpu_ns(self.side.guest.pid) / 1e9
        self.stack.close()

    def boot(self) -> None:
        wanted = spec(self.run, self.column, self.init, self.sizes, self.image)
        resolve.images(wanted)  # finds them, so that the boot does not
        warm_host(WARM_MB * MIB)
        began = time.monotonic()
        self._enter(wanted)
        self.side.sh("true")
        self.note("boot", time=(time.monotonic() - began) * 1e3)

    def _program(self, phase: str, argv: Sequence[str]) -> dict[str, Any]:
        """Run a program that prints JSON; notes all but its time."""
        before = self.side.vmstat()
        answer = self.side.json(*argv)
        after = self.side.vmstat()
        zeroed = (
            float(init_on_alloc.zeroed(self.side, before, after))
            if self.init
            else zeroed_bytes(answer, self.side.kernel)
        )
        self.note(phase, zeroed=zeroed)
        return answer

    def _allocate(self, phase: str) -> None:
        size = str(self.sizes.program_mb)
        argv = ["alloc_once", "--size", size, "--mode", "touch_all", "--pages", "thp"]
        self.found[phase, "time"] = self._program(phase, argv)["wall_ns"] / 1e6

    def first(self) -> None:
        # Also for the next phase, which comes at once.
        warm_host(2 * self.sizes.program_mb * MIB + SPARE)
        self._allocate("first")

    def again(self) -> None:
        self._allocate("again")

    def _rest(self, seconds: float, size_mb: int) -> None:
        """Rest, and hold the host's memory for the next phase until it begins."""
        began = time.monotonic()
        with held_host(size_mb * MIB + SPARE):
            time.sleep(max(0.0, began + seconds - time.monotonic()))

    def later(self) -> None:
        self._rest(AGAIN_S, self.sizes.program_mb)
        self._allocate("later")

    def _fill_cache(self) -> None:
        """Read a disk into the page cache, which an open descriptor keeps."""
        if not self.cached:
            self.side.sh("exec 3</dev/vda; dd if=/dev/vda of=/dev/null bs=1M 2>/dev/null")
            self.cached = True

    def idle(self) -> None:
        self._fill_cache()
        time.sleep(self.sizes.idle_s)
        self.note("idle")

    def park(self) -> None:
        self._fill_cache()
        size = self.sizes.park_mb * MIB
        self.side.sh(f"fillfree --size {self.sizes.park_mb} > /dev/null")
        self.note("park", time=take_back(self.side, lambda: self.about.park(self.side, size), size))
        self.about.after_park(self.side)

    def _free(self) -> int:
        """Bytes of free memory in the guest."""
        return (self.side.vmstat()["nr_free_pages"] + self.side.number(IN_LISTS)) * PAGE

    def _save(self, phase: str) -> None:
        used = self.sizes.memory_mb * MIB - self._free()
        self.side.guest.qmp("stop")
        began = time.monotonic()
        write_state(self.side.guest, self.file)
        taken, size = time.monotonic() - began, self.file.stat().st_blocks * 512
        self.note(phase, time=taken * 1e3, file=size, of_used=size / used * 100)

    def save_cached(self) -> None:
        self._save("save_cached")
        self.side.guest.qmp("cont")
        self.file.unlink()

    def save(self) -> None:
        """Drop the page cache, have the host take all free memory, and save."""
        self.side.sh("exec 3<&-; echo 3 > /proc/sys/vm/drop_caches")
        left = self._free() // MIB - LEFT_MB
        self.about.park(self.side, (left if self.column == BASE else self.sizes.cache_mb) * MIB)
        settle_resident(
            self.side.guest.pid, timeout=PASSES_S, what=self.column, still_s=STILL_FIXED_S
        )
        self.about.after_park(self.side)
        self._save("save")

    def restore(self) -> None:
        before = self.side.guest.spec
        self._leave()
        extra = [*before.extra_qemu, "-incoming", "defer", "-S"]
        warm_host(WARM_MB * MIB)
        self._enter(replace(before, extra_qemu=extra, label=f"{before.label}-restored"))
        began = time.monotonic()
        self.side.guest.qmp("migrate-incoming", uri=f"file:{self.file}")
        _migrated(self.side.guest)
        self.side.guest.qmp("cont")
        self.side.sh("true")
        self.note("restore", time=(time.monotonic() - began) * 1e3)

    def restored(self) -> None:
        self._rest(ENDED_S, self.sizes.program_mb)
        self._allocate("restored")

    def burst(self) -> None:
        self._rest(AGAIN_S, self.sizes.burst_mb)
        answer = self._program("burst", ["burst", f"0:{self.sizes.burst_mb}:0"])
        self.found["burst", "time"] = answer["burst_ns"][0] / 1e6

    @property
    def steps(self) -> dict[str, Callable[[], None]]:
        """What each phase after the boot does."""
        return {
            "first": self.first,
            "again": self.again,
            "later": self.later,
            "idle": self.idle,
            "park": self.park,
            "save_cached": self.save_cached,
            "save": self.save,
            "restore": self.restore,
            "restored": self.restored,
            "burst": self.burst,
        }

    def play(self, names: Iterable[str]) -> dict[tuple[str, str], float]:
        """Go through phases; their figures, with those of the whole life."""
        with self.stack:
            self.boot()
            for name in names:
                if name != "boot":
                    self.steps[name]()
            self.found[WHOLE, "prezeroed"] = self.side.vmstat().get(PREZEROED, 0) * PAGE
            self._leave()
        for kind in SUMS:
            of = [value for (_, one), value in self.found.items() if one == kind]
            self.found[WHOLE, kind] = sum(of)
        return self.found


def figures(run: Run, found: Values, sizes: Sizes) -> None:
    """Each column against base with the same init_on_alloc."""
    sizes_mb = {"burst": sizes.burst_mb}
    others = [name for name in COLUMNS if name != BASE]
    for init, side, phase in itertools.product(INITS, others, (*PHASES, WHOLE)):
        of = {"init": init, "side": side, "phase": phase}
        of["size_mb"] = sizes_mb.get(phase, sizes.program_mb)
        for kind in KINDS:
            values = found[BASE, init, phase, kind], found[side, init, phase, kind]
            if all(values):
                run.add(f"life.init{{init}}.{{side}}.{{phase}}.{kind}", values, of)


def measure(run: Run, sizes: Sizes = Sizes()) -> None:
    run.sides = ("base", "the column named")
    names, lives = phases(run.options.only), min(run.pairs, LIVES)
    shown = split(run.options.only) or (*PHASES, WHOLE)
    run.job = {"cpus": 1, "lives": lives, "phases": ", ".join(shown), **asdict(sizes)}
    found, columns = Values(), [*itertools.product(COLUMNS, INITS)]
    with tempfile.TemporaryDirectory(prefix="life-", dir=paths.sub("work")) as name:
        folder = Path(name)
        image = disk(folder, sizes.cache_mb)
        with step(f"{lives} lives of each of {len(columns)} guests, by turns"):
            for (column, init), _ in turns(columns, lives, warm_ups=0):
                life = Life(run, column, init, sizes, folder, image)
                for (phase, kind), value in life.play(names).items():
                    if phase in shown:
                        found[column, init, phase, kind].append(value)
    figures(run, found, sizes)
    run.note(*NOTES, BASE_COUNTS)
