# SPDX-License-Identifier: GPL-2.0
"""Runs with ``--accel pvm``: the state of the machine, and the proof that guests are native."""

import json
import os
from collections.abc import Sequence
from typing import Any

from lab.bench.session import Side
from lab.build import programs as guest
from lab.core import run as runner
from lab.core.errors import LabError
from lab.core.paths import REPO
from lab.core.progress import step

PROGRAM = "native_costs"
SOURCE = REPO / "guest" / f"{PROGRAM}.c"
MOST_LOAD = 1.5
TRIES = 5
SLOWER = 1.2  # times the host's time; emulated, both take a hundred times as long
NATIVE = {"loop_ns": "1e9 additions", "clear_ns": "clearing 1 GiB"}
TRAPS = {
    "fault_ns": "a first write to a 4 KiB page",
    "syscall_ns": "a system call",
    "pte_ns": "a change of a page-table entry",
    "exit_ns": "an exit to the hypervisor (CPUID)",
}
PLAIN = "host memory in 4 KiB pages"
PLAIN_NOTE = (
    "The host's pool had no huge pages for all guests: where a guest touches memory that its host "
    f"has to find, times vary and are too long. Such figures were measured on: {PLAIN}."
)


def need_quiet() -> None:
    """LabError on a machine that has other work; to be called before anything is built."""
    if (load := os.getloadavg()[0]) > MOST_LOAD:
        why = f"the load is {load:.1f}, more than {MOST_LOAD}: other programs would be in the times"
        raise LabError("Cannot measure natively", why, "end other programs, or wait a minute")


def costs(text: str) -> dict[str, float]:
    found: dict[str, float] = json.loads(text)
    return found


def check(run: Any, sides: Sequence[Side]) -> None:
    """Add what a ``Run`` needs to be read: guest against host, and the costs of traps.

    LabError if the guest is slower than its host at what needs no hypervisor, TRIES times: another
    machine on the same CPU slows one of them down now and then.
    """
    program = guest.build_program(SOURCE)
    with step("native speed and costs of traps, in a guest and on the host"):
        what, fix = f"{PROGRAM} fails on this machine", "run it by hand"
        for _ in range(TRIES):
            host = costs(runner.output([program], what, fix))
            inside: dict[str, Any] = sides[0].json(PROGRAM)
            slower = [name for name in NATIVE if inside[name] > host[name] * SLOWER]
            if not slower:
                break
    if slower:
        name = slower[0]
        why = f"{NATIVE[name]}: {_time(inside[name])}, and {_time(host[name])} on the host"
        fix = "end other programs; else the guest is emulated: read its console log"
        raise LabError("The guest does not run natively", why, fix)
    for name, words in (NATIVE | TRAPS).items():
        run.facts[words] = f"{_time(inside[name])}, on the host {_time(host[name])}"
    figures = "; ".join(f"{words} {run.facts[words]}" for words in (NATIVE | TRAPS).values())
    how = "Measured natively under kvm_pvm, where traps are dearer than on hardware"
    run.note(f"{how}: {figures}.")
    mark(run, sides)


def mark(run: Any, sides: Sequence[Side]) -> None:
    """Mark the figures that follow, unless the pool has the memory of all guests."""
    plain = not all(side.guest.huge_pages for side in sides)
    run.marks = f", {PLAIN}" if plain else ""
    if plain:
        run.note(PLAIN_NOTE)


def _time(ns: float) -> str:
    for least, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= least:
            return f"{ns / least:.2f} {unit}"
    return f"{ns:.0f} ns"
