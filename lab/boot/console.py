# SPDX-License-Identifier: GPL-2.0
"""The faults that a guest's console reports."""

import re

# Lines in which the kernel reports a fault of its own.
_FAULT = re.compile(
    r"page_zeroed: BUG|\bWARNING:|\bBUG:|\bkernel BUG at\b|\bOops\b|general protection "
    r"fault|Kernel panic"
    r"|\bKASAN\b|\bKMSAN\b|\bKCSAN\b|UBSAN:|ODEBUG:|INFO: task .* blocked|INFO: trying to register "
    r"non-static key"
    r"|rcu.*\bstall|soft lockup|hard LOCKUP|workqueue lockup|possible (?:circular "
    r"locking|recursive locking|deadlock)"
    r"|inconsistent lock state|lock held when returning to user space|held lock freed|bad unlock "
    r"balance"
    r"|invalid wait context|sleeping function called from invalid context|scheduling while atomic"
    r"|suspicious RCU usage|[Bb]ad page|list_(?:add|del) corruption|Unable to handle kernel"
)
# Options that the kernel echoes or announces: harmless although a pattern matches.
_HARMLESS = re.compile(
    r"Kernel command line:|Command line:|Unknown kernel command line parameters|stall warnings "
    r"timeout"
    r"|KernelAddressSanitizer initialized"
)
# Bits of /proc/sys/kernel/tainted that only a fault sets.
TAINTS = {5: "bad page", 7: "oops or BUG", 9: "warning", 14: "soft lockup"}

# The byte at the instruction pointer is in brackets.
_CODE = re.compile(r"\bCode: [0-9a-f ]*<([0-9a-f]{2})>")
_TRACE_LINES = 30
_TRACE_END = re.compile(r"---\[ end (?:trace|Kernel panic)")


def violations(text: str) -> list[str]:
    return [
        line.rstrip()
        for line in text.splitlines()
        if _FAULT.search(line) and not _HARMLESS.search(line)
    ]


def first_report(text: str) -> str:
    """The first fault of a console log with its registers and calls, in 30 lines at most."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    faults = (
        n for n, line in enumerate(lines) if _FAULT.search(line) and not _HARMLESS.search(line)
    )
    if (start := next(faults, None)) is None:
        return ""
    shown = lines[start : start + _TRACE_LINES]
    end = next((n for n, line in enumerate(shown) if _TRACE_END.search(line)), len(shown) - 1)
    return "\n".join(shown[: end + 1])


# Reports of a kernel that makes no progress.
_NO_PROGRESS = re.compile(r"stall|soft lockup|hard LOCKUP|blocked for|workqueue lockup")


def is_hang(text: str) -> bool:
    """Whether a console log reports a lack of progress at most."""
    return all(_NO_PROGRESS.search(line) for line in violations(text))


def timer_race(text: str) -> bool:
    """Whether the first fault is a known race of Linux 7.3 at boot.

    mp_irqdomain_alloc() gives the enabled timer interrupt another chip before the data of that
    chip. An interrupt in between finds no data; slow emulation leaves time for one.
    """
    faults = violations(text)
    return (
        bool(faults)
        and "BUG: kernel NULL pointer dereference" in faults[0]
        and "RIP: 0010:mask_ioapic_irq+" in first_report(text)
        and "RIP: 0010:mp_irqdomain_alloc+" in text
    )


# A guest cannot cause it: the region is no larger than the asserted bound.
_NOT_ITS_OWN = re.compile(
    r"hw/pci/msix\.c:\d+: msix_table_mmio_\w+: Assertion `addr \+ size <= "
    r"|system/physmem\.c:\d+: iotlb_to_section: Assertion `(?:section_index|ret->mr)"
)


def stale_section(log: str) -> bool:
    """Whether QEMU's last message shows an access that reached the wrong device.

    An emulated CPU keeps the number of a device in the memory map, and looks it up in the current
    map (``iotlb_to_section()`` of QEMU 10.0). While another CPU moves devices, as at the scan of
    the PCI bus, the number may mean another device, or none.
    """
    return bool(_NOT_ITS_OWN.search(log))


_NO_PORT = re.compile(r"^init: no channel kz\.\w+: No such device or address", re.MULTILINE)


def no_port(text: str) -> bool:
    """Whether the guest's first program ended it because the lab's port never appeared.

    QEMU announces its ports in messages of the device. A lost one, see ``stale_section``, leaves
    the driver without ports. A kernel without the driver gets another message.
    """
    return bool(_NO_PORT.search(text))


def stale_breakpoint(text: str) -> bool:
    """Whether the first fault is a breakpoint at an address that, by the same report, has none.

    Linux patches code through breakpoints, and waits until all CPUs have seen their removal. An
    emulated CPU can still run its old translation: QEMU misses the store of another CPU that had
    looked up its TLB entry before the translation marked the page as code.
    """
    faults = violations(text)
    if not faults or "Oops: int3:" not in faults[0]:
        return False
    code = _CODE.search(text, text.index(faults[0]))
    return code is not None and code[1] != "cc"


def taint_reasons(taint: int) -> list[str]:
    """The faults in a kernel's taint value; empty for harmless bits (modules, …)."""
    return [
        f"kernel tainted: {reason} (bit {bit})"
        for bit, reason in TAINTS.items()
        if taint >> bit & 1
    ]


def last_lines(text: str, count: int = 8) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(nothing was printed)"
