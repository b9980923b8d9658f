# SPDX-License-Identifier: GPL-2.0
"""Faults in the guest's kernel and memory.

Data stays intact, known-zero pages are zero, and the next operation works.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.boot.guest import BootResult
from lab.build.linux import build_linux
from tests.guest.guests import (
    BALLOON,
    DELAY,
    DIRTY,
    KZEROPAGED,
    REPORT,
    STALE_MEMMAP,
    STRESS_SECONDS,
    ZP,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    objects,
    run,
    text,
)
from tests.guest.test_hazards import POISON, USE_ALL
from tests.guest.test_prezero import ALL as ZERO_ALL

pytestmark = [
    pytest.mark.boots,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.matrix,
    pytest.mark.timeout(3600),
]

# A file, and the memory of a process; both are compared at the end.
KEEP = (
    "dd if=/dev/urandom of=/kept bs=1M count=16 2>/dev/null; sha256sum /kept > /sums; held=$(seq "
    "50000)"
)
INTACT = 'sha256sum -cs /sums; test "$(echo "$held" | md5sum)" = "$(seq 50000 | md5sum)"'
COUNTS = "grep pgzeroed_ /proc/vmstat"


def count(faults: dict[str, int], record: Record, least: int) -> None:
    """Record how many faults a guest has survived."""
    total = sum(faults.values())
    print(f"{total} faults: {faults}")
    assert total >= least, faults
    record("faults", total)


def numbers(result: BootResult, word: str) -> dict[str, int]:
    """The lines ``WORD NAME NUMBER`` of a guest."""
    found = re.findall(rf"^{word} (.+) (\d+)$", text(result), re.MULTILINE)
    return {name: int(number) for name, number in found}


# ``times`` is the number of faults that are left. fail-nth makes the Nth allocation or copy of a
# task fail.
MOST = 1000000
INJECT = f"""
kinds="fail_page_alloc failslab fail_usercopy"
cd /sys/kernel/debug
for kind in $kinds; do
    echo {MOST} > $kind/times; echo 0 > $kind/verbose
    for file in $kind/ignore-gfp-*; do [ ! -e $file ] || echo N > $file; done
done
echo 0 > fail_page_alloc/min-order; cd /
left() {{
    left=0
    for kind in $kinds; do read n < /sys/kernel/debug/$kind/times; left=$((left + n)); done
}}
each() {{
    nth=0; before=; eval "$3"; left
    until [ $left = "$before" ]; do
        nth=$((nth + 1)); before=$left
        (echo $nth > /proc/self/fail-nth; eval "$2") > /dev/null 2>&1 < /dev/null || :
        eval "$3"; left
    done
    echo each $1 $((nth - 1))
}}
driver=/sys/bus/virtio/drivers/virtio_balloon; device=$(cd $driver; basename virtio*[0-9])
for block in $(ls -dr /sys/devices/system/memory/memory*/state); do
    ! echo offline > $block 2>/dev/null || break
done
echo online > $block
"""
# An operation of the shell, and the command that undoes it. The last attempt succeeds.
EACH = {
    "file": ("exec dd if=/dev/zero of=/zeros bs=64k count=2", "rm -f /zeros"),
    "pool": ("echo 8 > /proc/sys/vm/nr_hugepages", "echo 0 > /proc/sys/vm/nr_hugepages"),
    "kzeropaged": (f"echo 1 > {ZP}/enabled", f"echo 0 > {ZP}/enabled"),
    "online": ("echo online > $block", "grep -q offline $block || echo offline > $block"),
    "offline": ("echo offline > $block", "grep -q online $block || echo online > $block"),
    "bind": (
        "echo $device > $driver/bind",
        "[ ! -e $driver/$device ] || echo $device > $driver/unbind",
    ),
    "unbind": (
        "echo $device > $driver/unbind",
        "[ -e $driver/$device ] || echo $device > $driver/bind",
    ),
    "flush": (REPORT, "fillfree --size 16 > /dev/null"),
}


def faulty(script: str, tmp_path: Path, cpus: int = 1) -> BootResult:
    """Run a script on the kernel that injects faults, with a disk that must stay as it is."""
    disk = tmp_path / "disk"
    disk.write_bytes(bytes(16 << 20))
    keep = f"{KEEP}; cat /kept > /dev/vda; sha256sum /dev/vda >> /sums"
    result = run(
        f"{INJECT}{keep}; {script}; for kind in $kinds; do read n < "
        f"/sys/kernel/debug/$kind/times; echo injected $kind $(({MOST} - n)); done; {DIRTY}; "
        f"{REPORT}; {USE_ALL}; {INTACT}; {COUNTS}",
        kernel=build_linux("debug", "x86_64", "faults"),
        devices=[BALLOON, "virtio-blk-pci,drive=disk"],
        extra_qemu=["-drive", f"file={disk},if=none,id=disk,format=raw,cache=unsafe"],
        append=STALE_MEMMAP,
        cpus=cpus,
        memory="1G",
        timeout=3000.0,
        allow_warnings=True,
    )
    # register_irq_proc() of 7.3.4 ignores a lack of memory; unregister_irq_proc() then warns of
    # absent files.
    wrong = [
        line
        for line in result.violations
        if not re.search("fs/proc/generic.c|tainted: warning", line)
    ]
    assert not wrong and result.exit_code == 0, (
        f"{wrong[:8]}, exit code {result.exit_code} ({result.console})"
    )
    assert counters(result)["pgzeroed_bad"] == 0
    expect_at_least(objects(result)[-1]["vmstat"]["pgzeroed_skip"], 0.5 * (512 << 8))
    return result


def test_each_allocation_fails_once(tmp_path: Path, record_property: Record) -> None:
    """Each allocation and each copy of an operation fails once, one in each attempt."""
    result = faulty(
        "; ".join(f"each {name} '{do}' '{undo}'" for name, (do, undo) in EACH.items()), tmp_path
    )
    faults = numbers(result, "each")
    assert faults.keys() == EACH.keys() and all(faults.values()), faults
    assert sum(faults.values()) == sum(numbers(result, "injected").values())
    count(faults, record_property, 100)


# These programs may fail for lack of memory, and never because memory has the wrong content.
VICTIMS = (
    "alloc_once --size 32 --pages thp --verify --mode touch_all",
    "alloc_once --size 32 --pages nothp --verify --mode touch_all",
    "alloc_once --size 16 --pages shmem --verify --mode touch_all",
    "refpage_bench --method refpage --check --map 4194304 --touch 4194304 --loops 4",
    "dd if=/dev/zero of=/zeros bs=1M count=4",
)
WORKERS = "kthreadd|kworker*|kzeropaged*|kcompactd*|khugepaged|kswapd*"
STORMS = {
    "workers and victims": "for kind in $kinds; do echo Y > $kind/task-filter; echo 2 > "
    "$kind/probability; done",
    "large blocks": "echo 3 > fail_page_alloc/min-order; echo 30 > fail_page_alloc/probability",
}


@pytest.mark.parametrize("storm", STORMS)
def test_allocations_fail_at_random(storm: str, tmp_path: Path, record_property: Record) -> None:
    """A hunter reads memory meanwhile; only its allocations of large blocks may fail."""
    jobs = " ".join(f"'echo 1 > /proc/self/make-it-fail; exec {victim}'" for victim in VICTIMS)
    script = f"""
echo 100 > {DELAY}; {KZEROPAGED}
for file in /proc/[0-9]*/comm; do
    case $(cat $file 2>/dev/null) in {WORKERS}) echo 1 > ${{file%comm}}make-it-fail;; esac
done
leak_hunter --setup --seconds {STRESS_SECONDS} --workers 1 > /hunt & hunter=$!
cd /sys/kernel/debug; {STORMS[storm]}; cd /
while [ -e /proc/$hunter/exe ]; do
    for job in {jobs}; do
        code=0; sh -c "$job" > /output 2>&1 || code=$?; rm -f /zeros; echo ended $code
        ! grep -E 'not 0|not zero|the pattern' /output
    done
    echo 1 > /proc/sys/vm/compact_memory; flush > /dev/null
done
for kind in $kinds; do echo 0 > /sys/kernel/debug/$kind/probability; done
wait $hunter; cat /hunt"""
    result = faulty(script, tmp_path, cpus=2)
    assert not re.search("not 0|not zero|the pattern", text(result)), text(result)
    hunted(result, record_property)
    ended = text(result).split("\nended ")
    print(
        "programs:", len(ended) - 1, "of which fine:", sum(one.startswith("0") for one in ended[1:])
    )
    count(numbers(result, "injected"), record_property, 50)


def test_memory_hotplug_fails(tmp_path: Path, record_property: Record) -> None:
    """A notifier refuses to bring a memory block online, then offline.

    The next attempt succeeds.
    """
    error = "/sys/kernel/debug/notifier-error-inject/memory/actions/MEM_GOING"
    script = f"""
refused() {{
    echo -12 > {error}_$1/error
    if echo $2 > $block 2>/dev/null; then echo "$block: $2 in spite of the error"; exit 1; fi
    faults=$((faults + 1)); echo 0 > {error}_$1/error
}}
faults=0
for round in 1 2 3 4 5 6 7 8 9 10; do
    fillfree --share 60 > /dev/null; flush > /dev/null
    for block in /sys/devices/system/memory/memory[2-9]*/state; do
        timeout -s INT 20 sh -c "echo offline > $block" 2>/dev/null || continue
        refused ONLINE online; echo online > $block; flush > /dev/null; refused OFFLINE offline
    done
    alloc_once --size 256 --verify --mode touch_all
done
echo refused all $faults"""
    count(numbers(faulty(script, tmp_path), "refused"), record_property, 40)


def flags(pattern: str, place: int) -> str:
    """Shell.

    Up to 12 page frames whose flags match (kernel-page-flags.h), each at a place in its 4 MiB.
    """
    found = f"NR > 8192 && /{pattern}/ && (NR - 1) % 1024 == {place} && n++ < 12"
    return f"$(od -An -v -tx8 -w8 /proc/kpageflags | awk '{found} {{ print NR - 1 }}')"


BUDDY, NONE, POOL, ANON = "[4-7c-f]..$", "^ 0*$", "[2367abef][89a-f]...$", "[13579bdf][89a-f]..$"
BLOCKS = f"{flags(BUDDY, 0)} {flags(BUDDY, 333)}"
HOLD = (
    "mkfifo /end; fillfree --size 64 --hold < /end > /filled & exec 3> /end; until [ -s /filled ]; "
    "do sleep 0.1; done"
)
# Commands that bring pages into a state, and the page frames of some.
STATES = {
    "reported": (f"{DIRTY}; {REPORT}", BLOCKS),
    "pre-zeroed": (ZERO_ALL, BLOCKS),
    "pool": (f"{DIRTY}; {REPORT}; echo 64 > /proc/sys/vm/nr_hugepages", flags(POOL, 512)),
    "mapped": (f"{DIRTY}; {REPORT}; {HOLD}", flags(ANON, 512)),
}
CORRUPTED = "sed -n 's/^HardwareCorrupted: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo"
# Programs get memory without the bad pages. Pages that come back are zeroed before use.
BAD = (
    f'bad=; for pfn in $pages; do ! echo $pfn > {POISON}/corrupt-pfn || bad="$bad $pfn"; done '
    "2>/dev/null; set -- $bad"
)
BACK = (
    f"{USE_ALL}; {DIRTY}; {USE_ALL}; for pfn in $bad; do echo $pfn > {POISON}/unpoison-pfn; done; "
    f"{USE_ALL}; {INTACT}"
)


@pytest.mark.parametrize("state", STATES)
def test_a_page_goes_bad(state: str, record_property: Record) -> None:
    before, pages = STATES[state]
    result = run(
        f'{KEEP}; {before}; pages="{pages}"; {BAD}; echo bad all $#; echo corrupted all '
        f"$({CORRUPTED}); [ ! -e /end ] || {{ echo >&3; wait; }}; echo 0 > "
        f"/proc/sys/vm/nr_hugepages; {BACK}; {COUNTS}",
        devices=[] if state == "pre-zeroed" else [BALLOON],
        timeout=1500.0,
    )
    fine(result)
    assert counters(result)["pgzeroed_bad"] == 0
    bad = numbers(result, "bad")
    assert numbers(result, "corrupted")["all"] >= 4 * bad["all"]
    count(bad, record_property, 4)
