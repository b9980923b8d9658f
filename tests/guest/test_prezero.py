# SPDX-License-Identifier: GPL-2.0
"""kzeropaged.

Free memory is zeroed before anyone wants it, by the rules, and only when it is told to.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from lab.bench.session import DROP
from lab.boot.guest import BootResult, running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    BALLOON,
    CHECK,
    CHECKED,
    DELAY,
    FLUSH,
    HUGE_PAGES,
    PREZEROED,
    SETTLE,
    STALE_MEMMAP,
    STRESS_SECONDS,
    STRESS_SEED,
    ZP,
    Record,
    counters,
    expect_at_least,
    expect_at_most,
    fine,
    hunted,
    objects,
    run,
    text,
)

pytestmark = pytest.mark.boots

FILL = f"fillfree --share 80 >/dev/null; {DROP}"
NOW = f"echo 0 > {ZP}/delay_millisecs; echo 1 > {ZP}/enabled"
# Memory that was never used as well.
ALL = f"echo 0 > {ZP}/delay_millisecs; echo all > {ZP}/enabled"
KNOWN = (
    "awk '/^pgzeroed_set/ { n += $2 } /^pgzeroed_(skip|lost)/ { n -= $2 } END { print n * 4096 }' "
    "/proc/vmstat"
)
COMPACT = "echo 1 > /proc/sys/vm/compact_memory"
LOST = "awk '/^pgzeroed_lost/ { n += $2 } END { print n }' /proc/vmstat"
SKIPPED = "awk '/^pgzeroed_skip/ { n += $2 } END { print n }' /proc/vmstat"
FREE = "awk '/^MemFree/ { print $2 * 1024 }' /proc/meminfo"
COUNTERS = "grep pgzeroed_ /proc/vmstat"
ZP_REPORT_ORDER = 9
GIB_POOL = "/sys/kernel/mm/hugepages/hugepages-1048576kB"
MIB = 1 << 20
TOUCH = "alloc_once --size 192 --pages thp --verify --mode touch_all"


def values(result: BootResult) -> dict[str, int]:
    """The lines `NAME=NUMBER` of the guest's stdout."""
    found = {}
    for line in text(result).splitlines():
        name, sign, value = line.partition("=")
        if sign and value.strip().isdigit():
            found[name] = int(value)
    return found


def skips(name: str, job: str) -> str:
    """Shell that runs a job and prints `NAME=` and the pages whose zeroing was skipped."""
    return f"s=$({SKIPPED}); {job} >/dev/null; echo {name}=$(($({SKIPPED}) - s))"


MARKED = "awk '/^pgzeroed_set/ { n += $2 } END { print n }' /proc/vmstat"


def run_and_wait(job: str, size_mb: int) -> str:
    """Shell that runs a job of so much memory and waits, a minute at most, until most is zero."""
    pages = int(0.95 * (size_mb << 8))
    return (
        f"marked=$({MARKED}); {job} >/dev/null; for i in $(seq 120); do "
        f"[ $(($({MARKED}) - marked)) -ge {pages} ] && break; sleep 0.5; done"
    )


def printed(console: str, word: str) -> int:
    """The number after a word at the start of a line; a message of the kernel may follow it."""
    return int(re.findall(rf"^{word} (\d+)", console, re.MULTILINE)[0])


def test_nothing_happens_while_it_is_off() -> None:
    result = run(
        f"{FILL}; sleep 3; cat {ZP}/enabled; echo threads=$(grep -l kzeropaged /proc/*/comm | wc "
        f"-l); {COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    assert text(result).splitlines()[0] == "0"
    assert values(result) == {"threads": 0}
    assert counters(result)["pgzeroed_set_prezeroed"] == 0


@pytest.mark.parametrize("how", ["sysfs", "boot parameter"])
def test_free_memory_becomes_zero_and_is_not_zeroed_again(how: str) -> None:
    result = run(
        f"{FILL}; {ALL}; {SETTLE}; echo pages=$({PREZEROED}); echo known=$({KNOWN}); echo "
        f"free=$({FREE}); "
        + skips("huge", "alloc_once --size 256 --pages thp --verify --mode touch_all")
        + f"; {FILL}; {SETTLE}; "
        + skips("small", "alloc_once --size 256 --pages nothp --verify --mode touch_all")
        + f"; {COUNTERS}",
        devices=[],
        checked=how == "sysfs",
        append="prezero=all" if how == "boot parameter" else "",
    )
    fine(result)
    found, count = values(result), counters(result)
    expect_at_least(found["pages"] * 4096, 0.9 * found["free"])
    # What is smaller than mini_order stays dirty.
    expect_at_least(found["known"], 0.95 * found["free"])
    expect_at_most(found["known"], 1.02 * found["free"])
    expect_at_least(found["huge"], 0.99 * (256 << 8))
    expect_at_least(found["small"], 0.95 * (256 << 8))
    assert count["pgzeroed_bad"] == 0


def test_memory_on_the_lists_of_a_cpu_is_zeroed() -> None:
    """A CPU keeps huge pages that were freed on its lists, and uses them first."""
    result = run(
        f"{ALL}; {SETTLE}; fillfree --size 192 > /dev/null; {SETTLE}; {skips('huge', TOUCH)}",
        devices=[],
        checked=True,
    )
    fine(result)
    expect_at_least(values(result)["huge"], 0.99 * (192 << 8))


@pytest.mark.parametrize("pages", ["thp", "nothp"])
@pytest.mark.parametrize("devices", [[], [BALLOON]], ids=["alone", "with reports"])
def test_a_program_that_runs_again(devices: list[str], pages: str) -> None:
    """At the defaults, its memory is zero again; `kz bench prezero` measures how soon."""
    job = f"alloc_once --size 800 --pages {pages} --verify --mode touch_all"
    result = run(
        f"echo 1 > {ZP}/enabled; {run_and_wait(job, 800)}; {skips('again', job)}; {COUNTERS}",
        kernel="knownzero",
        devices=devices,
        memory="2G",
    )
    fine(result)
    expect_at_least(values(result)["again"], 0.9 * (800 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


def test_a_program_that_runs_again_beside_a_full_page_cache() -> None:
    job = "alloc_once --size 800 --pages nothp --verify --mode touch_all"
    result = run(
        # The descriptor keeps the pages of the device in the cache.
        "exec 3</dev/vda; dd if=/dev/vda of=/dev/null bs=1M count=2200 2>/dev/null; "
        f"echo cached=$(($(awk '/^Buffers/ {{ print $2 }}' /proc/meminfo))); "
        f"echo 1 > {ZP}/enabled; {run_and_wait(job, 800)}; "
        f"{skips('again', job)}; {COUNTERS}",
        kernel="knownzero",
        devices=[BALLOON, "virtio-blk-pci,drive=empty"],
        memory="2G",
        extra_qemu=["-drive", "driver=null-co,size=4G,read-zeroes=on,if=none,id=empty"],
    )
    fine(result)
    assert values(result)["cached"] > 1600 << 10
    expect_at_least(values(result)["again"], 0.8 * (800 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.parametrize("devices", [[], [BALLOON]], ids=["alone", "with reports"])
def test_files_use_dirty_memory_first(devices: list[str]) -> None:
    """300 MiB of files take at most a twentieth of 256 MiB that were zeroed: others are dirty."""
    result = run(
        # A report turns dirty memory into memory of the host, which files use last.
        f"echo 3600000 > {DELAY}; mkdir /files; mount -t tmpfs none /files -o size=90%; "
        f"echo 3600000 > {ZP}/delay_millisecs; echo 1 > {ZP}/enabled; sleep 1; "
        "alloc_once --size 1200 --pages nothp --mode touch_all >/dev/null; "
        # Any write to a knob starts a pass, which stops after a batch.
        f"before=$({PREZEROED}); echo {256 * MIB} > {ZP}/batch_size; {SETTLE}; "
        f"echo zeroed=$(($({PREZEROED}) - before)); lost=$({LOST}); "
        "dd if=/dev/zero of=/files/file bs=1M count=300 2>/dev/null; "
        f"echo lost=$(($({LOST}) - lost)); {COUNTERS}",
        kernel="knownzero",
        devices=devices,
        memory="2G",
    )
    fine(result)
    found = values(result)
    expect_at_least(found["zeroed"], 250 << 8)
    expect_at_most(found["lost"], 0.05 * found["zeroed"])


def test_isolated_cpus_keep_their_lists() -> None:
    """What CPU 1 freed stays on its lists while kzeropaged makes pass after pass."""
    held = "awk '/cpu: 1$/ { c = 1 } c && / count:/ { n += $2; c = 0 } END { print n + 0 }'"
    churn = "taskset 1 alloc_once --size 100 --pages nothp --mode touch_all >/dev/null; sleep 1"
    result = run(
        f"{NOW}; {churn}; "
        "taskset 2 alloc_once --size 16 --pages nothp --mode touch_all >/dev/null; "
        f"echo before=$({held} /proc/zoneinfo); zeroed=$({PREZEROED}); {churn}; {churn}; "
        f"echo after=$({held} /proc/zoneinfo); echo zeroed=$(($({PREZEROED}) - zeroed))",
        devices=[],
        cpus=2,
        append="isolcpus=1",
        checked=True,
    )
    fine(result)
    found = values(result)
    expect_at_least(found["zeroed"], 50 << 8)
    expect_at_least(found["before"], 256)
    expect_at_least(found["after"], 0.75 * found["before"])


@pytest.mark.parametrize("what", ["cma", "compact", "offline"])
def test_no_task_waits_for_it(what: str) -> None:
    """Beside a busy process on its CPU: other tasks take as long as without it."""
    times = f"preempt --what {what} --seconds 12"
    result = run(
        f"{times}; echo 3600000 > {ZP}/delay_millisecs; echo 1 > {ZP}/enabled; sleep 1; {times}",
        devices=[],
        cpus=2,
    )
    fine(result)
    off, on = objects(result)
    assert (off["enabled"], on["enabled"]) == ("0", "1")
    assert off["times"] >= 20 and on["times"] >= 20
    # With a mutex held during a part of each pass, the longest allocation took 4 s. A busy host
    # adds up to a second.
    expect_at_most(on["worst_us"], 1.2 * off["worst_us"] + 1_500_000)


def test_an_idle_clean_machine_is_not_woken() -> None:
    woken = (
        "awk '/^voluntary_ctxt/ { print $2 }' /proc/$(grep -l kzeropaged0 /proc/*/comm | sed "
        "'s/[^0-9]//g')/status"
    )
    result = run(
        f"echo 100 > {ZP}/delay_millisecs; echo all > {ZP}/enabled; {FILL}; {SETTLE}; "
        f"before=$({woken}); sleep 10; echo woken=$(($({woken}) - before)); "
        # And it has not fallen asleep for good.
        f"{FILL}; {SETTLE}; echo later=$(($({woken}) - before))",
        devices=[],
        checked=True,
    )
    fine(result)
    assert values(result)["woken"] <= 1
    assert values(result)["later"] > 0


def scattered(size: int, group: int, steps: list[tuple[str, int, int]], options: str = "") -> str:
    """Shell that runs guest/scatter.c and, after each step (pages, ms), what the step names."""
    lines = [
        f"mkfifo /tmp/in; scatter --size {size} --group {group} {options} </tmp/in >/tmp/out & "
        "exec 9>/tmp/in",
        "line() { while [ $(wc -l < /tmp/out) -lt $1 ]; do sleep 0.2; done; }",
        "line 1",
    ]
    for number, (after, pages, milliseconds) in enumerate(steps, start=2):
        lines += [f"echo {pages} {milliseconds} >&9", f"line {number}", after]
    return "; ".join([*lines, "exec 9>&-", "wait $!"]).replace("& ;", "&")


def test_a_freed_page_costs_a_page() -> None:
    """Single pages, freed one by one, merge with zeroed neighbours: only they are zeroed (P1)."""
    script = scattered(
        192,
        16,
        [
            (f"{SETTLE}; echo before=$({PREZEROED}); echo known=$({KNOWN})", 15, 0),
            (f"{SETTLE}; echo after=$({PREZEROED}); echo known_after=$({KNOWN})", 1, 20000),
        ],
    )
    result = run(
        # The CPU's own list is kept short, so that each page soon merges.
        f"echo 100000 > /proc/sys/vm/percpu_pagelist_high_fraction; echo 0 > {ZP}/mini_order; "
        f"echo 100 > {ZP}/delay_millisecs; echo all > {ZP}/enabled; {script}; {COUNTERS}",
        devices=[],
        memory="512M",
        checked=True,
    )
    fine(result)
    found = values(result)
    freed = (192 << 8) // 16
    zeroed = found["after"] - found["before"]
    expect_at_least(zeroed, 0.3 * freed)
    expect_at_most(zeroed, 1.5 * freed)
    assert counters(result)["pgzeroed_bad"] == 0


def test_pageblocks_keep_their_type() -> None:
    """Else unmovable memory needs new pageblocks, and there are fewer huge pages."""
    kinds = "awk '/^Number/ { n++ } n && /DMA32/ { print $5, $7 }' /proc/pagetypeinfo"
    result = run(
        f"{kinds}; echo 0 > {ZP}/delay_millisecs; echo all > {ZP}/enabled; {SETTLE}; {kinds}; "
        f"{COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    before, after = (
        [int(count) for count in line.split()] for line in text(result).splitlines()[:2]
    )
    assert sum(before) > 1 and all(new >= old for old, new in zip(before, after, strict=True)), (
        before,
        after,
    )
    expect_at_least(counters(result)["pgzeroed_set_prezeroed"], 1000)


def test_compaction_uses_blocks_that_are_partly_zero() -> None:
    """The words of a map are in pages that become tail pages of the folio that is moved there."""
    thp = "/sys/kernel/mm/transparent_hugepage/hugepages"
    script = scattered(
        256,
        16,
        [
            # All but the first page of each 64 KiB is zeroed.
            (f"{ALL}; {SETTLE}; echo 0 > {ZP}/enabled", 15, 0),
            (
                f"lost=$({LOST}); {COMPACT}; {COMPACT}; {COMPACT}; echo lost=$(($({LOST}) - lost))",
                1,
                0,
            ),
        ],
        "--large",
    )
    result = run(
        f"echo never > {thp}-2048kB/enabled; echo always > {thp}-64kB/enabled; "
        # The CPU's own list is kept short, so that each page soon merges.
        f"echo 100000 > /proc/sys/vm/percpu_pagelist_high_fraction; echo 0 > {ZP}/mini_order; "
        f"{script}; {COUNTERS}",
        devices=[],
    )
    fine(result)
    # Compaction has moved folios there.
    expect_at_least(values(result)["lost"], 1000)
    assert counters(result)["pgzeroed_bad"] == 0


def test_pools_of_huge_pages() -> None:
    """Free pages of a hugetlb pool that were in use are zeroed.

    Those that were not, only when asked.
    """
    fill = "alloc_once --size {} --pages hugetlb --verify --mode touch_all"
    pool = "echo {} > /proc/sys/vm/nr_hugepages"
    result = run(
        f"{pool.format(32)}; {NOW}; {SETTLE}; echo 0 > {ZP}/enabled; "
        f"{skips('unused', fill.format(64))}; "
        # Dirty ones that come later, and are not used, do not hide them.
        f"{FILL}; {pool.format(36)}; {NOW}; {SETTLE}; {skips('used', fill.format(64))}; "
        f"{pool.format(64)}; {ALL}; {SETTLE}; {skips('all', fill.format(128))}; {COUNTERS}",
        devices=[],
        checked=True,
    )
    fine(result)
    found, pages = values(result), 64 << 8
    assert found["unused"] < pages // 10
    expect_at_least(found["used"], pages)
    expect_at_least(found["all"], 2 * pages)
    assert counters(result)["pgzeroed_bad"] == 0


def test_a_pool_that_grows_hides_no_used_page() -> None:
    """1100 unused pages enter the pool behind a used one, which is zeroed nevertheless."""
    fill = "alloc_once --size 2 --pages hugetlb --verify --mode touch_all"
    pool = "echo {0} > /proc/sys/vm/nr_hugepages; test $(cat /proc/sys/vm/nr_hugepages) = {0}"
    result = run(
        f"echo 0 > {ZP}/delay_millisecs; {pool.format(1)}; {fill} >/dev/null; {pool.format(1101)}; "
        f"echo 1 > {ZP}/enabled; {SETTLE}; echo 0 > {ZP}/enabled; "
        f"{skips('again', fill)}; {COUNTERS}",
        devices=[],
        memory="3G",
        checked=True,
    )
    fine(result)
    expect_at_least(values(result)["again"], 512)
    assert counters(result)["pgzeroed_bad"] == 0


def gigantic(then: str, name: str) -> BootResult:
    """Use a page of 1 GiB, let kzeropaged zero a part of it, run ``then``; print `NAME=` skips."""
    hunt = "leak_hunter --kind hugetlb_1g --workers 1 --dirty 0 --seconds 1"
    return run(
        f"{hunt}; echo $((128 << 20)) > {ZP}/max_rate; {NOW}; sleep 4; echo 0 > {ZP}/enabled; "
        f"s=$({SKIPPED}); {then}; echo {name}=$(($({SKIPPED}) - s)); {COUNTERS}",
        devices=[],
        memory="3G",
        append="hugepagesz=1G hugepages=1",
        checked=True,
    )


@pytest.mark.nightly
def test_a_gigantic_page_that_is_taken_keeps_what_was_zeroed() -> None:
    """kzeropaged has zeroed some of 1 GiB: the program that takes the page zeroes the rest only."""
    result = gigantic("leak_hunter --kind hugetlb_1g --workers 1 --dirty 0 --seconds 1", "taken")
    fine(result)
    # At 128 MiB/s for four seconds; free memory of the node comes first.
    expect_at_least(values(result)["taken"], (64 << 20) >> 12)
    assert counters(result)["pgzeroed_bad"] == 0


@pytest.mark.nightly
def test_a_gigantic_page_that_is_demoted_keeps_what_was_zeroed() -> None:
    """The parts of 2 MiB that are all zero are known to be so."""
    fill = "alloc_once --size 1024 --pages hugetlb --verify --mode touch_all"
    result = gigantic(f"echo 1 > {GIB_POOL}/demote; {fill} >/dev/null", "demoted")
    fine(result)
    expect_at_least(values(result)["demoted"], (64 << 20) >> 12)
    assert counters(result)["pgzeroed_bad"] == 0


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
    )


def resident(
    script: str, *, device: list[str], memory: str = "1G", append: str = ""
) -> tuple[list[int], str]:
    """Run lines of shell in a guest; QEMU's RSS after each line `mark`, and the guest's stdout."""
    spec = BootSpec(
        kernel=CHECKED,
        memory=memory,
        devices=device,
        append=f"{CHECK} {append}",
        timeout=240.0,
        command=["sh", "-ec", "mark() { echo mark; read -r go; }\n" + script],
    )
    found, out = [], []
    with running(spec) as guest:
        for line in guest.lines:
            out.append(line)
            if line.strip() == "mark":
                time.sleep(1)
                found.append(rss(guest.pid))
                guest.send("go")
    return found, "\n".join(out)


def test_reported_memory_stays_with_the_host() -> None:
    """Pieces of reported blocks merge with pages that are freed.

    Zeroing these does not take them back (P2).
    """
    order = "/sys/module/page_reporting/parameters/page_reporting_order"
    script = scattered(
        320,
        512,
        [
            # A quarter of each 2 MiB is reported, in pieces.
            (f"echo 0 > {FLUSH}; mark", 128, 0),
            # The next quarter is freed, and merges with it; such blocks are too small to be
            # reported now.
            (
                f"echo {ZP_REPORT_ORDER} > {order}; echo 3 > /proc/sys/vm/drop_caches; {NOW}; "
                f"{SETTLE}; mark",
                128,
                0,
            ),
        ],
    )
    (before, after), out = resident(
        f"echo 3600000 > {DELAY}; echo {ZP_REPORT_ORDER} > {order}; {FILL}; echo 0 > {FLUSH}; "
        f"echo 5 > {order}; {script}; echo zeroed=$({PREZEROED}); {COUNTERS}",
        device=[BALLOON],
    )
    zeroed = next(
        int(line.partition("=")[2]) for line in out.splitlines() if line.startswith("zeroed=")
    )
    # Much of the second quarter, 80 MiB, was zeroed (larger blocks are left to reporting) and is
    # resident all the time.
    expect_at_least(zeroed * 4096, 32 * MIB)
    expect_at_most(after - before, 16 * MIB)
    assert "pgzeroed_bad 0" in out


@pytest.mark.parametrize("enabled", ["1", "all"])
def test_memory_that_was_never_used(enabled: str) -> None:
    """Without a reporter.

    The host does not have to provide memory that the guest never used (P3).
    """
    (before, after, used), out = resident(
        f"mark; echo 0 > {ZP}/delay_millisecs; echo {enabled} > {ZP}/enabled; {SETTLE}; mark; "
        f"fillfree --size 256 > /dev/null; {DROP}; {SETTLE}; {skips('skipped', TOUCH)}; mark; "
        f"{COUNTERS}",
        device=[],
    )
    if enabled == "all":
        expect_at_least(after - before, 500 * MIB)
    else:
        expect_at_most(after - before, 100 * MIB)
        assert used < 700 * MIB
    skipped = next(
        int(line.partition("=")[2]) for line in out.splitlines() if line.startswith("skipped=")
    )
    # Memory that was used is zeroed in both cases.
    expect_at_least(skipped, 0.9 * (192 << 8))
    assert "pgzeroed_bad 0" in out


FILES = (
    "for i in 1 2 3 4 5; do dd if=/dev/zero of=/files/file bs=1M count=200 2>/dev/null; sleep 0.7; "
    "rm /files/file; sleep 0.7; done"
)


def test_files_use_memory_that_the_host_backs() -> None:
    """A file of 200 MiB is written and removed five times: the first one is all that is needed."""
    (before, after), out = resident(
        "mkdir /files; mount -t tmpfs none /files -o size=90%; dd if=/dev/zero of=/files/file "
        f"bs=1M count=200 2>/dev/null; rm /files/file; mark; {NOW}; {FILES}; mark; {COUNTERS}",
        device=[],
        memory="2G",
    )
    expect_at_most(after - before, 60 * MIB)
    assert "pgzeroed_bad 0" in out


BAD = {
    "enabled": ["2", "-1", "", "all!", "maybe"],
    "mini_order": ["11", "-1", "x", "4294967296"],
    "delay_millisecs": ["-1", "4294967296", "1s", ""],
    "batch_size": ["0", "4095", "64M", "-4096", "18446744073709551616"],
    "max_rate": ["-1", "1M", "18446744073709551616"],
}
# Values written, and the values read back.
GOOD = {
    "enabled": [
        ("1", "1"),
        ("n", "0"),
        ("on", "1"),
        ("off", "0"),
        ("all", "all"),
        ("Y", "1"),
        ("0", "0"),
    ],
    "mini_order": [("0", "0"), ("10", "10"), ("4", "4")],
    "delay_millisecs": [("0", "0"), ("4294967295", "4294967295"), ("1000", "1000")],
    "batch_size": [
        ("4096", "4096"),
        ("18446744073709551615", "18446744073709551615"),
        ("67108864", "67108864"),
    ],
    "max_rate": [("1", "1"), ("18446744073709551615", "18446744073709551615"), ("0", "0")],
}


def test_good_and_bad_input() -> None:
    """A refused value changes nothing, not even the thread.

    An accepted one can be read back (P9).
    """
    bad = [
        f"if echo '{value}' 2>/dev/null > {ZP}/{name}; then echo 'accepted {name} {value}'; fi"
        for name, values in BAD.items()
        for value in values
    ]
    good = [
        f'echo {value} > {ZP}/{name}; [ "$(cat {ZP}/{name})" = {kept} ] || echo "not kept {name} '
        f'{value}"'
        for name, values in GOOD.items()
        for value, kept in values
    ]
    state = f"cat {ZP}/*; grep -l kzeropaged0 /proc/*/comm || echo no thread"
    result = run(
        f'bad() {{ {"; ".join(bad)}; }}; a=$({state}); bad; [ "$a" = "$({state})" ] || echo '
        "changed; "
        f'echo 1 > {ZP}/enabled; a=$({state}); bad; [ "$a" = "$({state})" ] || echo changed while '
        f"on; {'; '.join(good)}; ls {ZP} | wc -l",
        kernel=CHECKED,
        devices=[],
    )
    fine(result)
    assert text(result).splitlines() == ["5"]


@pytest.mark.parametrize(
    ("append", "reason"),
    [
        ("page_poison=1", "free pages are poisoned"),
        ("init_on_free=1", "free pages are zero anyway"),
        ("debug_pagealloc=on", "free pages are not mapped"),
    ],
)
def test_it_refuses_where_it_would_do_harm(append: str, reason: str) -> None:
    result = run(
        f"if echo 1 2>/dev/null > {ZP}/enabled; then exit 7; fi; cat {ZP}/enabled; fillfree "
        f"--share 50 >/dev/null; sleep 1; {PREZEROED}; alloc_once --size 64 --verify --mode "
        "touch_all >/dev/null",
        devices=[],
        append=f"{append} prezero=on",
    )
    fine(result)
    assert text(result).splitlines() == ["0", "0"]
    # Once at boot, once for the write.
    assert (
        result.console.read_text(errors="replace").count(
            f"prezero: free memory cannot be zeroed: {reason}"
        )
        == 2
    )


def test_the_rate_is_limited() -> None:
    mib = 1 << 20
    pace = f"a=$({PREZEROED}); sleep 4; b=$({PREZEROED})"
    result = run(
        f"fillfree --share 80 >/dev/null; echo {16 * mib} > {ZP}/max_rate; {NOW}; sleep 1; "
        f"{pace}; echo rate=$(((b - a) * 1024)); pid=$(grep -l kzeropaged0 /proc/*/comm | sed "
        "'s/[^0-9]//g'); grep -h policy /proc/$pid/sched; "
        # The end of a batch, which each block is now, does not get round it.
        f"echo {2 * mib} > {ZP}/batch_size; sleep 1; {pace}; echo in_batches=$(((b - a) * 1024))",
        devices=[],
        checked=True,
        cpus=2,
    )
    fine(result)
    assert re.search(r"^policy +: +5$", text(result), re.MULTILINE), "not SCHED_IDLE"
    expect_at_least(values(result)["rate"], 4 * mib)
    expect_at_most(values(result)["rate"], 18 * mib)
    expect_at_least(values(result)["in_batches"], 4 * mib)
    expect_at_most(values(result)["in_batches"], 18 * mib)


def test_each_node_has_its_thread() -> None:
    result = run(
        f"{FILL}; {ALL}; {SETTLE}; echo known=$({KNOWN}); echo free=$({FREE}); "
        "for n in 0 1; do grep -l kzeropaged$n /proc/*/comm >/dev/null; done; "
        f"alloc_once --size 256 --pages thp --verify --mode touch_all; echo 0 > {ZP}/enabled; "
        f"echo threads=$(grep -l kzeropaged /proc/*/comm | wc -l); {COUNTERS}",
        devices=[],
        checked=True,
        cpus=2,
        append="numa=fake=2",
    )
    fine(result)
    found = values(result)
    expect_at_least(found["known"], 0.95 * found["free"])
    assert found["threads"] == 0
    assert counters(result)["pgzeroed_bad"] == 0


DISTURBANCES = {
    "compaction, CPU hotplug": ("prezero", "compact", "hotplug"),
    "memory pressure": ("prezero", "pressure"),
    "huge page pool, memory blocks": ("prezero", "hugetlb", "memoryblock"),
    "reporting": ("prezero", "reporter", "flush"),
    "everything": (
        "prezero",
        "compact",
        "hotplug",
        "pressure",
        "hugetlb",
        "memoryblock",
        "reporter",
    ),
}


@pytest.mark.slow
@pytest.mark.hunt
@pytest.mark.parametrize(
    ("what", "nodes"),
    [
        pytest.param(
            what, nodes, marks=[] if (what, nodes) == ("everything", 2) else pytest.mark.nightly
        )
        for what in DISTURBANCES
        for nodes in (1, 2)
    ],
)
@pytest.mark.timeout(600 + 6 * STRESS_SECONDS)
def test_no_byte_leaks(what: str, nodes: int, record_property: Record) -> None:
    drivers = " ".join(DISTURBANCES[what])
    # Otherwise it would do most of the work.
    reporter = "honest" if "reporter" in DISTURBANCES[what] else "off"
    result = run(
        # All is zero in the beginning, so that there is something to lose.
        f"{ALL}; {SETTLE}; echo 20 > {ZP}/delay_millisecs; echo 0 > {ZP}/mini_order; "
        f"echo {reporter} > /sys/module/page_zeroed_reporter/parameters/mode; "
        "echo 200 > /sys/module/page_reporting/parameters/page_reporting_delay_ms; "
        f"stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} {drivers} > /tmp/stress & "
        f"leak_hunter --setup --seconds {STRESS_SECONDS} --seed {STRESS_SEED} --workers 2; "
        f"wait $! || true; cat /tmp/stress; echo 0 > {ZP}/enabled; {COUNTERS}",
        cpus=2,
        memory="1G",
        devices=[],
        append=f"{STALE_MEMMAP} numa=fake={nodes}",
        timeout=300.0 + 4 * STRESS_SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    expect_at_least(min(stress["steps"].values()), 1)
    assert hunter["total_pages"] > 0, hunter["skipped"]
    expect_at_least(counters(result)["pgzeroed_set_prezeroed"], 1)


def test_out_of_memory() -> None:
    """It gives way: programs get all there is, and it goes on when they are gone."""
    result = run(
        f"{HUGE_PAGES}; {NOW}; echo 1 > /proc/sys/vm/overcommit_memory; for i in 1 2 3; do ( echo "
        "1000 > /proc/self/oom_score_adj; exec alloc_once --size 4096 --pages nothp --mode "
        f"touch_all ) 2>/dev/null || echo killed; done; {SETTLE}; "
        f"{skips('skipped', 'alloc_once --size 256 --pages thp --verify --mode touch_all')}; "
        f"{COUNTERS}",
        devices=[],
        checked=True,
        memory="512M",
        allow_warnings=True,
    )
    assert result.exit_code == 0
    console = result.console.read_text(errors="replace")
    assert "page_zeroed: BUG" not in console
    assert text(result).count("killed") == 3
    assert console.count("Out of memory: Killed process") == 3
    expect_at_least(values(result)["skipped"], 0.9 * (256 << 8))
    assert counters(result)["pgzeroed_bad"] == 0


SWAP_MB = 1024
RESUME_SECONDS = 480
# After the resume the host is not connected to the virtio ports: from there on, the serial console.
RESUME = f"""
mkswap /dev/vda >/dev/null; swapon /dev/vda
{FILL}; {ALL}; {SETTLE}
before=$({PREZEROED})
echo 0 > {ZP}/mini_order
fillfree --share 30 > /dev/null
echo test_resume > /sys/power/disk
echo disk > /sys/power/state
exec > /dev/ttyS0 2>&1
echo "before $before"
{SETTLE}
echo "again $((($({PREZEROED}) - before) * 4096)) free $({FREE})"
alloc_once --size 128 --pages thp --verify --mode touch_all
alloc_once --size 128 --pages nothp --verify --mode touch_all
leak_hunter --seconds 3
{FILL}; {SETTLE}
echo "known $({KNOWN}) free $({FREE})"
{skips("skipped", "alloc_once --size 256 --pages thp --verify --mode touch_all")}
{COUNTERS}
echo resume-test-done
"""


@pytest.mark.parametrize("cpus", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_it_is_frozen_and_resumes(tmp_path: Path, cpus: int) -> None:
    disk = tmp_path / "swap.img"
    with disk.open("wb") as image:
        image.truncate(SWAP_MB << 20)
    spec = BootSpec(
        kernel=CHECKED,
        memory="1G",
        cpus=cpus,
        devices=["virtio-blk-pci,drive=swap"],
        extra_qemu=["-drive", f"file={disk},if=none,id=swap,format=raw,cache=unsafe"],
        append=f"{CHECK} resume=/dev/vda",
        timeout=float(RESUME_SECONDS),
        command=[
            "sh",
            "-c",
            f"set -e; trap 'echo resume-test-failed > /dev/ttyS0' EXIT\n{RESUME}trap - EXIT",
        ],
    )
    deadline = time.monotonic() + RESUME_SECONDS
    # Leaving the block judges the console: an oracle report fails the test.
    with running(spec) as guest:
        told = ""
        while "resume-test-done" not in told:
            time.sleep(0.5)
            told = guest.console.read_text(errors="replace")
            assert "resume-test-failed" not in told, told[-3000:]
            assert time.monotonic() < deadline, (
                f"not done after {RESUME_SECONDS} s:\n{told[-3000:]}"
            )
    lines = [line.strip() for line in told.splitlines()]
    counted = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    assert "PM: hibernation: hibernation exit" in told
    assert printed(told, "before") > 0
    assert int(counted["pgzeroed_bad"]) == 0
    # What was free and zero then is not known to be so now, so that it begins anew by itself.
    again = next(line.split() for line in lines if line.startswith("again "))
    expect_at_least(int(again[1]), 0.8 * int(again[3]))
    known = next(line.split() for line in lines if line.startswith("known "))
    # Not the area for contiguous allocations, 16 MB, and little else.
    expect_at_least(int(known[1]), 0.95 * int(known[3]))
    # Which of the free memory a job gets is another matter, after what the hunter did to it.
    skipped = next(int(line.partition("=")[2]) for line in lines if line.startswith("skipped="))
    expect_at_least(skipped, 0.75 * (256 << 8))


# Where the host's end of the virtio ports is after it came back is another matter: the serial
# console.
SUSPEND = f"""
exec > /dev/ttyS0 2>&1
{FILL}; echo {16 << 20} > {ZP}/max_rate; {ALL}
sleep 1
echo "before $(($({PREZEROED}) * 4096))"
echo mem > /sys/power/state
echo "after $(($({PREZEROED}) * 4096))"
echo 0 > {ZP}/max_rate; {SETTLE}
echo "end $({KNOWN}) free $({FREE})"
{skips("skipped", "alloc_once --size 256 --pages thp --verify --mode touch_all")}
{COUNTERS}
echo suspend-test-done
"""


def test_it_is_suspended_and_goes_on() -> None:
    """Suspend to RAM in the middle of its work: memory is kept, and so is what is known of it."""
    spec = BootSpec(
        kernel="debug",
        memory="1G",
        cpus=2,
        timeout=240.0,
        command=["sh", "-c", f"set -e; trap 'echo suspend-test-failed' EXIT\n{SUSPEND}trap - EXIT"],
    )
    slept = False
    deadline = time.monotonic() + 240
    with running(spec) as guest:
        told = ""
        while "suspend-test-done" not in told:
            time.sleep(0.5)
            told = guest.console.read_text(errors="replace")
            assert "suspend-test-failed" not in told, told[-3000:]
            assert time.monotonic() < deadline, f"not done:\n{told[-3000:]}"
            if not slept and guest.qmp("query-status")["status"] == "suspended":
                slept = True
                guest.qmp("system_wakeup")
    assert slept and "PM: suspend exit" in told
    lines = [line.strip() for line in told.splitlines()]
    counted = dict(line.split() for line in lines if line.startswith("pgzeroed_"))
    before, after = printed(told, "before"), printed(told, "after")
    # It was at work, and had not finished.
    assert 0 < before <= after < 512 << 20
    end = next(line.split() for line in lines if line.startswith("end "))
    expect_at_least(int(end[1]), 0.9 * int(end[3]))
    skipped = next(int(line.partition("=")[2]) for line in lines if line.startswith("skipped="))
    expect_at_least(skipped, 0.9 * (256 << 8))
    assert int(counted["pgzeroed_bad"]) == 0
