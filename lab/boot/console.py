# SPDX-License-Identifier: GPL-2.0
"""What a guest's console says about the health of its kernel."""

from __future__ import annotations

import re

# Lines that mean the kernel found fault with itself.
PATTERNS = (
    r"page_zeroed: BUG",
    r"\bWARNING:",
    r"\bBUG:",
    r"\bkernel BUG at\b",
    r"\bOops\b",
    r"general protection fault",
    r"\bKASAN\b",
    r"\bKMSAN\b",
    r"\bKCSAN\b",
    r"UBSAN:",
    r"INFO: task .* blocked",
    r"INFO: trying to register non-static key",
    r"rcu.*\bstall",
    r"soft lockup",
    r"hard LOCKUP",
    r"Kernel panic",
    r"possible circular locking",
    r"possible recursive locking",
    r"possible deadlock",
    r"inconsistent lock state",
    r"lock held when returning to user space",
    r"held lock freed",
    r"bad unlock balance",
    r"invalid wait context",
    r"sleeping function called from invalid context",
    r"scheduling while atomic",
    r"suspicious RCU usage",
    r"Bad page",
    r"bad page state",
    r"list_(?:add|del) corruption",
    r"ODEBUG:",
    r"Unable to handle kernel",
    r"workqueue lockup",
)
# Lines that hold a pattern and are no fault: options that are echoed or announced.
HARMLESS = (
    r"Kernel command line:",
    r"Command line:",
    r"Unknown kernel command line parameters",
    r"stall warnings timeout",
    r"KernelAddressSanitizer initialized",
)
# Bits of /proc/sys/kernel/tainted that only a fault sets.
TAINTS = {5: "bad page", 7: "oops or BUG", 9: "warning", 14: "soft lockup"}

_FAULT = re.compile("|".join(f"(?:{p})" for p in PATTERNS))
_HARMLESS = re.compile("|".join(f"(?:{p})" for p in HARMLESS))
# The byte at the instruction pointer is in brackets.
_CODE = re.compile(r"\bCode: [0-9a-f ]*<([0-9a-f]{2})>")
_TRACE_LINES = 30
_TRACE_END = re.compile(r"---\[ end (?:trace|Kernel panic)")
_STAMP = re.compile(r"^(?:<\d+>)?\[\s*\d+\.\d+\](?:\[[^]]*\])? ?")


def violations(text: str) -> list[str]:
    """The lines of a console log that report a fault, in order."""
    return [line.rstrip() for line in text.splitlines() if _FAULT.search(line) and not _HARMLESS.search(line)]


def first_report(text: str) -> str:
    """The first fault of a console log with what the kernel said after it: registers and calls.

    At most 30 lines, so that the log of a test shows where it went wrong after the console is gone.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    start = next(
        (n for n, line in enumerate(lines) if _FAULT.search(line) and not _HARMLESS.search(line)), None
    )
    if start is None:
        return ""
    shown = lines[start : start + _TRACE_LINES]
    end = next((n for n, line in enumerate(shown) if _TRACE_END.search(line)), len(shown) - 1)
    return "\n".join(shown[: end + 1])


# What a kernel that makes no progress says of itself.
_NO_PROGRESS = re.compile(r"stall|soft lockup|hard LOCKUP|blocked for|workqueue lockup")


def is_hang(text: str) -> bool:
    """Whether a console log tells of no fault but that nothing went on."""
    return all(_NO_PROGRESS.search(line) for line in violations(text))


def timer_race(text: str) -> bool:
    """Whether the first fault is one that Linux 7.3 itself makes possible while it boots.

    mp_irqdomain_alloc() gives the timer's interrupt, which is on, another chip before the data of that chip.
    An interrupt in between finds none; emulated, and the slower the likelier, there is time for one.
    """
    faults = violations(text)
    return (
        bool(faults)
        and "BUG: kernel NULL pointer dereference" in faults[0]
        and "RIP: 0010:mask_ioapic_irq+" in first_report(text)
        and "RIP: 0010:mp_irqdomain_alloc+" in text
    )


# From the guest it cannot be: the region is no larger than what is asserted, and what is beyond is another's.
_NOT_ITS_OWN = re.compile(
    r"hw/pci/msix\.c:\d+: msix_table_mmio_\w+: Assertion `addr \+ size <= "
    r"|system/physmem\.c:\d+: iotlb_to_section: Assertion `(?:section_index|ret->mr)"
)


def stale_section(log: str) -> bool:
    """Whether QEMU, by what it said at its end, gave an access to a device that was not addressed.

    An emulated CPU remembers devices by their number in the memory map, and looks that up in the map there is
    now (``iotlb_to_section()`` of QEMU 10.0): while another CPU moves devices, as at the scan of the PCI bus,
    it may meet another one there, or none. A guest with an unpatched kernel that has one CPU turn the memory of a
    PCI device off and on, while another takes interrupts, dies of that within seconds.
    """
    return bool(_NOT_ITS_OWN.search(log))


def stale_breakpoint(text: str) -> bool:
    """Whether the first fault is a breakpoint where, by the same report, there is none.

    Linux patches code by way of breakpoints, and waits until all CPUs have seen them go, so none should be
    met later. A CPU of QEMU's can go on with what it translated before: a store of another one that had looked
    up its TLB entry before the translation marked the page as code goes unnoticed. Seen twice, with two CPUs.
    """
    faults = violations(text)
    if not faults or "Oops: int3:" not in faults[0]:
        return False
    code = _CODE.search(text, text.index(faults[0]))
    return code is not None and code[1] != "cc"


def taint_reasons(taint: int) -> list[str]:
    """What a kernel's taint value says about faults; empty for harmless bits (modules, …)."""
    return [f"kernel tainted: {reason} (bit {bit})" for bit, reason in TAINTS.items() if taint >> bit & 1]


def unstamped(line: str) -> str:
    """A console line without its time stamp."""
    return _STAMP.sub("", line)


def last_lines(text: str, count: int = 8) -> str:
    """The end of a console log, for errors; empty lines left out."""
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(nothing was printed)"
