# SPDX-License-Identifier: GPL-2.0
"""Boots: what a fresh guest knows of its memory, what its first program gains, and the cost.

All settings of the guest are the defaults.
"""

import functools
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from lab.bench.jobs import zeroed_bytes
from lab.bench.repeat import measured
from lab.bench.runner import Run
from lab.bench.session import BALLOON, MIB, held_host, resident
from lab.boot.guest import Guest, running
from lab.boot.spec import DAEMON, BootSpec
from lab.core.errors import TestFailure

KERNELS = ("base", "ours")
OTHER_PAIRS = 6  # of each guest but the first

INIT = "Run /init as init process"
REGISTERED = "Free page reporting enabled"
REPORTED = "All free memory has been reported"
LOG = f"dmesg | grep -e '{INIT}' -e '{REGISTERED}' -e '{REPORTED}'"
UP = "@up"


@dataclass(frozen=True)
class Kind:
    """A guest; its first program maps ``program_mb`` and writes to all of it."""

    memory: str
    program_mb: int
    cpus: int = 1
    devices: tuple[str, ...] = (BALLOON,)

    @property
    def script(self) -> str:
        """Print what is known, then run the program when the host says so."""
        program = f"alloc_once --size {self.program_mb} --mode touch_all"
        return f"{LOG}; cat /proc/vmstat; echo {UP}; read word; {program}"


KINDS = {
    "2g": Kind("2G", 1024),
    "512m": Kind("512M", 256),
    "8g": Kind("8G", 1024),
    "cpus4": Kind("2G", 1024, cpus=4),
    "daemon": Kind("2G", 1024, devices=(f"{DAEMON},stats-interval=0",)),
}


def _spec(run: Run, kind: Kind, kernel: str) -> BootSpec:
    command = ["sh", "-c", kind.script]
    devices = list(kind.devices)
    return run.spec(kernel, memory=kind.memory, cpus=kind.cpus, devices=devices, command=command)


def _until(guest: Guest, mark: str) -> list[str]:
    """The guest's lines before the line ``mark``; TestFailure when it ends first."""
    found: list[str] = []
    for line in guest.lines:
        if line.rstrip("\r\n") == mark:
            return found
        found.append(line.rstrip("\r\n"))
    guest.fail_early()


def _logged(lines: Sequence[str], message: str) -> float | None:
    """When the kernel logged a message, in ms since it started; None when it did not."""
    for line in lines:
        if found := re.match(rf"\[ *([\d.]+)\] .*{message}", line):
            return float(found[1]) * 1e3
    return None


def _facts(lines: Sequence[str], kernel: str) -> dict[str, float]:
    """What a guest printed before UP: times in ms of its clock, and what it knows in percent."""
    counts = {
        name: int(value)
        for name, value in re.findall(r"^(\w+) (\d+)$", "\n".join(lines), re.MULTILINE)
    }
    init, registered = _logged(lines, INIT), _logged(lines, REGISTERED)
    reported = _logged(lines, REPORTED)
    if init is None or registered is None or (kernel == "ours") != (reported is not None):
        what = f"A guest with the kernel {kernel} did not log what is expected"
        why = "\n".join(line for line in lines if line.startswith("["))
        raise TestFailure(what, why, "boot it with `kz boot` and read its console")
    known = sum(
        value * (1 if name.startswith("pgzeroed_set") else -1)
        for name, value in counts.items()
        if re.match("pgzeroed_(set|skip|lost)", name)
    )
    return {
        "init": init,
        "pass": (reported or registered) - registered,
        "known": known / counts["nr_free_pages"] * 100,
    }


def _boot(run: Run, kind: Kind, kernel: str) -> dict[str, float]:
    """The figures of one boot."""
    held = ExitStack()
    held.enter_context(held_host(kind.program_mb * MIB))
    with held, running(_spec(run, kind, kernel), run.keep) as guest:
        run.ran_on(guest)
        found = _facts(_until(guest, UP), kernel)
        found["resident"] = float(resident(guest.pid))
        held.close()
        guest.send("program")
        answer = json.loads(next(line for line in guest.lines if line.startswith("{")))
        guest.wait()
    found["zeroed"] = zeroed_bytes(answer, kernel)
    found["program"] = answer["wall_ns"] / 1e6
    return found


def measure(run: Run) -> None:
    run.job = {"pairs": run.pairs, "other_pairs": min(run.pairs, OTHER_PAIRS)}
    run.note(
        "Each boot is a guest of its own, base and ours by turns, with all settings at their "
        "defaults. The first program starts as soon as init does, maps its memory and writes to "
        "each byte of it.",
        "Time until init runs is the kernel's: from its first message with a time to its message "
        f"'{INIT}'.",
    )
    for name, kind in KINDS.items():
        pairs = run.pairs if name == "2g" else min(run.pairs, OTHER_PAIRS)
        boot = functools.partial(_boot, run, kind)
        found = measured(f"{name}: boots of base and ours", KERNELS, boot, pairs)
        of = {"guest": name, "size_mb": kind.program_mb}
        for key in ("zeroed", "program", "known", "pass", "init", "resident"):
            run.add(f"boot.{{guest}}.{key}", found.both(key), of)
