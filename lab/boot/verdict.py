# SPDX-License-Identifier: GPL-2.0
"""The verdict on a guest that has ended: its own fault, the emulator's, or none."""

import re
from dataclasses import dataclass
from pathlib import Path

from lab.boot import console
from lab.boot.spec import BootSpec
from lab.core.errors import MACHINE, USAGE, LabError, TestFailure

# QEMU names the option that it refuses. -accel, and lack of memory, are the machine's fault.
_REFUSED = re.compile(r"^[^\n:]+: -(?!accel\b)[a-z][\w-]*[ :]", re.MULTILINE)
_NO_ROOM = re.compile(r"Cannot allocate memory|No space left|Permission denied")


class EmulatorFault(TestFailure):
    """A mistake of the emulator ended the guest's kernel."""


class NeverCameUp(TestFailure):
    """An emulated guest ended before it was ready, by a hang or by one of the known races (see
    ``forgiven``).
    """


@dataclass(frozen=True)
class Ending:
    """The state in which a guest ended. ``code``: of its command, None if it never reported."""

    spec: BootSpec
    accel: str
    text: str  # of the console
    console: Path
    vmm_log: Path
    taint: int = 0
    code: int | None = None
    ready: bool = False
    late: bool = False
    returncode: int | None = None  # of QEMU

    def log(self) -> str:
        return self.vmm_log.read_text(errors="replace").strip()

    def faults(self) -> list[str]:
        return console.violations(self.text) + console.taint_reasons(self.taint)

    def shown(self) -> str:
        """The report for a person: the first fault in full, and where the console log is."""
        return f"{_shown(self.text, self.faults())}\n(console: {self.console})"

    def forgiven(self) -> bool:
        """Whether a known race of Linux or of the emulator ended it, and no other fault."""
        if console.timer_race(self.text):
            return True
        return (
            self.spec.cpus > 1
            and not console.violations(self.text)
            and (console.stale_section(self.log()) or console.no_port(self.text))
        )

    def emulator_fault(self) -> EmulatorFault | None:
        if self.accel != "tcg" or self.spec.cpus < 2 or not console.stale_breakpoint(self.text):
            return None
        why = f"its kernel met a breakpoint that had been removed (console: {self.console})"
        fix = "run it again; if it comes back, the emulator is not the cause"
        return EmulatorFault("an emulated CPU ran code that had been replaced", why, fix)

    def fault(self) -> TestFailure | None:
        """The fault that the console shows, unless warnings are allowed."""
        if self.spec.allow_warnings or not self.faults():
            return None
        ended = "" if self.code is None else f" (its command ended with {self.code})"
        fix = "read the console log; --allow-warnings lets such a run pass"
        what = f"the guest's kernel reported a fault{ended}"
        return self.emulator_fault() or TestFailure(what, self.shown(), fix)

    def failure(self) -> LabError:
        if fault := self.emulator_fault():
            return fault
        early = self.accel == "tcg" and not self.ready
        hung = self.late and console.is_hang(self.text)
        kind = NeverCameUp if early and (self.forgiven() or hung) else TestFailure
        if self.late:
            what = f"the guest did not finish within {self.spec.timeout:g} s"
            state = "was running its command" if self.ready else "had not reached user space"
            why = f"it {state}; its console ends with:\n{self.shown()}"
            return kind(what, why, "look at the console log, or give it longer with --timeout")
        log = self.log()
        if not self.text.strip() and self.returncode:
            why = f"{console.last_lines(log)}\n(exit code {self.returncode}, log: {self.vmm_log})"
            fix = "check the devices and options; `kz doctor` shows the state of the machine"
            code = USAGE if _REFUSED.search(log) and not _NO_ROOM.search(log) else MACHINE
            return LabError("the guest did not start", why, fix, code)
        what = f"the guest died before its command reported (QEMU's exit code {self.returncode})"
        why = self.shown() + (f"\n{console.last_lines(log)}" if log else "")
        return kind(what, why, "look at the console log")


def _shown(text: str, found: list[str]) -> str:
    """The faults of a console, the first one in full; its last lines if there are none."""
    if not found:
        return console.last_lines(text)
    first = console.first_report(text)
    more = [line for line in found if line not in first]
    left = [f"… and {len(more) - 12} more"] if len(more) > 12 else []
    return "\n".join(part for part in (first, *more[:12], *left) if part)
