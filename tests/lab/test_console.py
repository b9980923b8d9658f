# SPDX-License-Identifier: GPL-2.0
"""Every fault a kernel reports is seen, and ordinary lines are not."""

from __future__ import annotations

import pytest

from lab.boot import console

FAULTS = [
    "page_zeroed: BUG: page 0x1234 is not zero at offset 8",
    "WARNING: CPU: 0 PID: 1 at mm/page_alloc.c:123 foo+0x1/0x2",
    "WARNING: possible circular locking dependency detected",
    "WARNING: inconsistent lock state",
    "WARNING: suspicious RCU usage",
    "BUG: kernel NULL pointer dereference, address: 0000000000000000",
    "BUG: Bad page state in process foo  pfn:00100",
    "kernel BUG at mm/page_alloc.c:99!",
    "Oops: 0000 [#1] SMP",
    "Oops: general protection fault, probably for non-canonical address",
    "BUG: KASAN: use-after-free in foo",
    "BUG: KMSAN: uninit-value in foo",
    "UBSAN: array-index-out-of-bounds in mm/foo.c:1:2",
    "INFO: task kcompactd0:23 blocked for more than 120 seconds.",
    "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
    "rcu: INFO: rcu_preempt self-detected stall on CPU",
    "watchdog: BUG: soft lockup - CPU#0 stuck for 26s!",
    "Kernel panic - not syncing: Attempted to kill init!",
    "list_del corruption. prev->next should be x, but was y",
    "ODEBUG: free active (active state 0) object",
    "BUG: sleeping function called from invalid context at mm/x.c:1",
]
ORDINARY = [
    "Linux version 7.3.4 (gcc 12) #1 SMP",
    "Command line: console=ttyS0 panic=-1 foo=BUG:bar",
    "Kernel command line: console=ttyS0 test=WARNING:",
    "rcu: RCU CPU stall warnings timeout set to 60 (rcu_cpu_stall_timeout).",
    "rcu: Hierarchical RCU implementation.",
    "ok 1 debug_test",
    "debugfs: mounted",
    "virtio_balloon virtio1: free page reporting on",
]


@pytest.mark.parametrize("line", FAULTS)
@pytest.mark.parametrize("stamp", ["", "[    1.234567] ", "[   12.000001][   T31] "])
def test_faults_are_seen(line: str, stamp: str) -> None:
    assert console.violations(f"fine\n{stamp}{line}\nfine\n") == [stamp + line]


@pytest.mark.parametrize("line", ORDINARY)
def test_ordinary_lines_are_not(line: str) -> None:
    assert console.violations(f"[    0.000000] {line}\n") == []


STALE = """\
[    2.639010] clocksource: Switched to clocksource tsc
[    2.642503] Oops: int3: 0000 [#1] SMP
[    2.643586] RIP: 0010:ktime_get_update_offsets_now+0x40/0x160
[    2.652130] Code: 89 fc 53 00 <1f> 44 00 00 48 89
[    2.694797] Kernel panic - not syncing: Fatal exception in interrupt
"""


def test_a_breakpoint_that_is_not_there_is_the_emulators_fault() -> None:
    assert console.stale_breakpoint(STALE)
    assert not console.stale_breakpoint(STALE.replace("<1f>", "<cc>"))
    assert not console.stale_breakpoint(STALE.replace("int3: ", ""))
    # What came before may be the cause.
    assert not console.stale_breakpoint("WARNING: mm/page_zeroed.c:1\n" + STALE)
    assert not console.stale_breakpoint(STALE[: STALE.index("Code:")])
    assert not console.stale_breakpoint("fine\n")


# As it came from a guest that was held between the two stores.
RACE = """\
[    0.036000] BUG: kernel NULL pointer dereference, address: 0000000000000000
[    0.036000] #PF: supervisor read access in kernel mode
[    0.036000] Oops: Oops: 0000 [#1] SMP
[    0.036000] RIP: 0010:mask_ioapic_irq+0x15/0xb0
[    0.036000] Call Trace:
[    0.036000]  <IRQ>
[    0.036000]  handle_level_irq+0xf3/0x130
[    0.036000]  asm_common_interrupt+0x27/0x40
[    0.036000] RIP: 0010:mp_irqdomain_alloc+0xcd/0x290
[    0.036000] ---[ end trace 0000000000000000 ]---
[    0.036000] Kernel panic - not syncing: Fatal exception in interrupt
"""


def test_a_race_of_linux_itself_is_known() -> None:
    assert console.timer_race(RACE)
    assert not console.timer_race(RACE.replace("mask_ioapic_irq", "page_zeroed_claim"))
    assert not console.timer_race(RACE.replace("mp_irqdomain_alloc", "page_zeroed_claim"))
    assert not console.timer_race("page_zeroed: BUG: page 0x1 is not zero\n" + RACE)
    assert not console.timer_race("fine\n")


# As QEMU 10.0.13 said it.
ASSERTED = (
    "qemu-system-x86_64: ../hw/pci/msix.c:228: msix_table_mmio_write: Assertion `addr + size <= "
    "dev->msix_entries_nr * PCI_MSIX_ENTRY_SIZE' failed."
)

NO_SECTION = (
    "qemu-system-x86_64: ../system/physmem.c:2671: iotlb_to_section: Assertion `section_index < "
    "d->map.sections_nb' failed."
)


def test_an_access_that_met_another_device_is_the_emulators_fault() -> None:
    assert console.stale_section(f"warning: something\n{ASSERTED}")
    assert not console.stale_section(
        ASSERTED.replace("hw/pci/msix.c", "hw/virtio/virtio-balloon.c")
    )
    assert not console.stale_section(ASSERTED.replace("addr + size", "vector"))
    assert console.stale_section(NO_SECTION)
    assert not console.stale_section(NO_SECTION.replace("iotlb_to_section", "address_space_stl"))
    assert not console.stale_section("")


NO_PORT = "init: no channel kz.ctl: No such device or address; see the kernel log (dmesg)"


def test_a_guest_without_the_labs_ports_is_known() -> None:
    assert console.no_port(f"[    4.297949] Run /init as init process\n{NO_PORT}\n")
    # a kernel without the driver, and a command that prints the same words
    absent = "No such file or directory; boot a kernel that is built with it"
    assert not console.no_port(f"init: no channel kz.ctl: {absent}\n")
    assert not console.no_port(f"it said {NO_PORT}\n")


def test_a_hang_is_no_other_fault() -> None:
    assert console.is_hang("fine\n")
    assert console.is_hang("watchdog: BUG: soft lockup - CPU#0 stuck for 26s!\n")
    assert not console.is_hang(
        "rcu: INFO: rcu_preempt self-detected stall on CPU\npage_zeroed: BUG: not zero\n"
    )


def test_the_first_report_is_shown_whole() -> None:
    assert console.first_report(STALE).splitlines() == STALE.splitlines()[1:]
    assert console.first_report("fine\n") == ""
    end = "[    2.7] ---[ end trace 0000000000000000 ]---"
    assert console.first_report(f"{STALE}{end}\nmore\n").endswith(end)
    assert len(console.first_report(STALE + "noise\n" * 100).splitlines()) == 30


def test_modules_of_a_distribution_are_no_fault() -> None:
    assert console.taint_reasons((1 << 12) | (1 << 13)) == []
    assert len(console.taint_reasons(1 << 9 | 1 << 5)) == 2
