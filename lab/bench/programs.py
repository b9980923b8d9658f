# SPDX-License-Identifier: GPL-2.0
"""Real programs in a Debian, cold and warm.

Bytes zeroed and time.
"""

import hashlib
import itertools
import os
import tempfile
import time
from pathlib import Path

from lab.bench.kzeropaged import ON
from lab.bench.plugin import stored
from lab.bench.repeat import Values, by_turns
from lab.bench.runner import Run
from lab.bench.session import Side, Wanted, cpu_ns, settle_both
from lab.boot import nested
from lab.core import lock, paths
from lab.core.errors import TestFailure
from lab.core.paths import REPO
from lab.core.progress import step
from lab.core.run import Argv, logged
from lab.machine import apt, debs, stock, tools
from lab.patches.parts import split

PROGRAMS = REPO / "guest" / "programs"
NAMES = tuple(sorted(file.stem for file in PROGRAMS.glob("*.sh")))
MAKER = PROGRAMS.with_name("debian-disk.sh")
ROUNDS = 2  # at most, of --pairs: one takes about ten minutes
PAGES = {"thp": ("always", "huge pages"), "4k": ("never", "4 KiB pages")}
FIGURES = ("zeroed", "time")  # of a run
NATIVE_FIGURES = ("time", "cpu")  # without a plugin of the emulator
NATIVE_ROUNDS = 10
# The first needs a KVM in the guest. While Redis forks, kvm_pvm shows programs old memory after
# MADV_DONTNEED, also with base in all guests: jemalloc reports it, or a program crashes.
NOT_NATIVE = ("microvm", "redis")
KZEROPAGED, REST_S = "kzeropaged", 2.0
# The runs of a program in each guest.
RUNS = {
    "base": ("cold", "warm", "rested"),
    "ours": ("cold", "warm"),
    KZEROPAGED: ("cold", "rested"),
}
# The guest that base is compared with.
COMPARED = {"cold": "ours", "warm": "ours", "rested": KZEROPAGED}
NOTE = (
    "Before the first run of a program (cold), caches are dropped and all free memory is "
    "reported; the second (warm) follows at once. The last (rested) follows "
    f"{REST_S:.0f} s after the one before; on ours in a third guest, with kzeropaged. Reports come "
    "after 2000 ms. A program prints the same in all guests."
)
BYTES_NOTE = (
    "A TCG plugin counts the bytes that the kernel stores with `rep stos`, which clears pages on "
    "this CPU model. The work of kzeropaged is not in them."
)
CPU_NOTE = (
    "CPU time is that of QEMU: of the program, both kernels, and the hypervisor. That of a rested "
    "run begins with the rest, so it has the work of kzeropaged."
)


def disk() -> Path:
    """The file system with the programs, made when the cache lacks it.

    LabError without the packages or the space.
    """
    scripts, suite = sorted(PROGRAMS.glob("*.sh")), apt.codename()
    key = hashlib.sha256(b"".join(file.read_bytes() for file in (MAKER, *scripts))).hexdigest()[:16]
    target, log = paths.sub("disks") / f"{suite}-{key}.ext4", paths.log_file("debian-disk")
    if target.is_file():
        return target
    tools.need("debian")
    what, sources = (
        "installing the programs in a Debian",
        apt.PrivateApt(suite).root / "mirror.sources",
    )
    argv: Argv = ["sh", MAKER, debs.unpacked("mmdebstrap"), suite, sources]
    fix = (
        "install what is named there, or free some space; users other than root need ranges in "
        "/etc/subuid"
    )
    environment = {**os.environ, "PATH": stock.SBIN}
    with lock.locked("disk"):
        if target.is_file():  # made while this process waited
            return target
        with step(what, log), lock.new_file(target) as work:
            logged([*argv, work, *scripts], log, f"{what} fails", fix, env=environment)
    return target


def arguments(disk: Path, plugin: Path | None, counts: Path) -> list[str]:
    """Arguments of QEMU: the disk, and the plugin that counts into the file ``counts``."""
    image = str(disk).replace(",", ",,")
    found = ["-drive", f"if=virtio,format=raw,snapshot=on,file={image}"]
    if plugin:
        found += ["-cpu", nested.CPU, "-plugin", f"{plugin},out={counts}"]
    return found


def in_debian(script: str) -> str:
    """The command that runs a script in the Debian of the disk."""
    return f"HOME=/root chroot /debian /bin/sh -eu {script} 2>&1"


def timed(side: Side, name: str) -> tuple[dict[str, float], list[str]]:
    """Run a program once: its time in seconds, and its output."""
    began = time.monotonic()
    output = side.sh(in_debian(f"/programs/{name}.sh"))
    return {"time": time.monotonic() - began}, output


def play(side: Side, name: str, counts: Path) -> tuple[dict[str, float], list[str]]:
    """Run a program once: the values of FIGURES, and its output."""
    before = stored(counts)
    found, output = timed(side, name)
    return found | {"zeroed": stored(counts) - before}, output


def play_natively(side: Side, name: str, rest_s: float) -> tuple[dict[str, float], list[str]]:
    """Run a program once after a rest: the values of NATIVE_FIGURES, and its output."""
    before = cpu_ns(side.guest.pid)
    time.sleep(rest_s)
    found, output = timed(side, name)
    return found | {"cpu": (cpu_ns(side.guest.pid) - before) / 1e9}, output


def measure(run: Run) -> None:
    run.note(NOTE, CPU_NOTE if run.native else BYTES_NOTE)
    possible = [name for name in NAMES if not run.native or name not in NOT_NATIVE]
    names, found = split(run.options.only) or possible, Values()
    rounds = min(run.pairs, NATIVE_ROUNDS if run.native else ROUNDS)
    run.job = {
        "memory": run.options.memory,
        "cpus": 1,
        "rounds": rounds,
        "programs": ", ".join(names),
    }
    assert run.images.disk
    plugin = None if run.native else run.images.plugins["zerobytes"]
    added = [
        (PROGRAMS / "setup", "/kz/"),
        (Path(run.images.base), "/kz/kernel"),
    ]  # the kernel of the microVM
    with tempfile.TemporaryDirectory(prefix="programs-") as folder:
        counts = {name: Path(folder) / name for name in RUNS}
        specs = []
        for name, file in counts.items():
            kernel = "ours" if name == KZEROPAGED else name
            args = arguments(run.images.disk, plugin, file)
            spec = run.spec(kernel, extra_qemu=args, add=added, timeout=7200.0)
            specs.append(Wanted(name, spec, kernel))
        with run.guests(specs) as sides:
            for side in sides:
                side.sh("sh /kz/setup")
            sides[-1].sh(ON)
            for turn, (pages, name) in enumerate([*itertools.product(PAGES, names)] * rounds):
                thp = f"echo {PAGES[pages][0]} > /sys/kernel/mm/transparent_hugepage/enabled"
                for side in sides:
                    side.sh(thp)
                with step(f"{name}, {PAGES[pages][1]}"):
                    settle_both(sides)
                    outputs: dict[tuple[str, str], list[str]] = {}
                    for side in by_turns(sides, turn):
                        for phase in RUNS[side.name]:
                            rest_s = REST_S if phase == "rested" else 0.0
                            if run.native:
                                figures, lines = play_natively(side, name, rest_s)
                            else:
                                time.sleep(rest_s)
                                figures, lines = play(side, name, counts[side.name])
                            found.note(side.name, pages, name, phase, **figures)
                            outputs[side.name, phase] = lines
                compare(name, outputs)
    what_there_is = NATIVE_FIGURES if run.native else FIGURES
    for what, phase, pages, name in itertools.product(what_there_is, COMPARED, PAGES, names):
        metric = f"programs.{{program}}.{{pages}}.{{run}}.{what}"
        base, other = (found[side, pages, name, phase, what] for side in ("base", COMPARED[phase]))
        run.add(metric, (base, other), {"program": name, "pages": pages, "run": phase})


def compare(name: str, outputs: dict[tuple[str, str], list[str]]) -> None:
    """TestFailure unless each run printed what the same run printed on base."""
    for (side, phase), lines in outputs.items():
        expected = outputs["base", phase]
        if lines != expected:
            said = {"base": expected, side: lines}
            why = "\n".join(f"{one}: {line}" for one, text in said.items() for line in text)
            fix = f"repeat it: kz bench programs --only {name} --ours debug, which checks each page"
            raise TestFailure(f"{name} computes something else on our kernel", why, fix)
