# SPDX-License-Identifier: GPL-2.0
"""What the tests that boot guests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from lab.boot.guest import BootResult, boot
from lab.boot.spec import BootSpec
from lab.build import daemon

# pytest's record_property
Record = Callable[[str, object], None]
# The kernel that checks itself, or one that is being worked on.
KERNEL = os.environ.get("KNOWNZERO_TEST_KERNEL", "debug")
# What ships, with its own check turned on: it reads each block that it does not zero as the debug
# kernel does, and takes half the time. The debug kernel is for tests of the check itself, of its
# options (page_poison, debug_pagealloc, kexec, memory errors), and for one hunt of each kind. At
# night everything runs on it.
CHECKED = (
    KERNEL
    if os.environ.get("KNOWNZERO_NIGHTLY")
    else os.environ.get("KNOWNZERO_TEST_KERNEL", "knownzero")
)
CHECK = "page_zeroed.verify=1"
BALLOON = "virtio-balloon-pci,free-page-reporting=on"
# How long each leak hunt takes: a minute in all by day, hours by night.
STRESS_SECONDS = int(os.environ.get("KNOWNZERO_STRESS_SECONDS", "20"))
STRESS_SEED = int(os.environ.get("KNOWNZERO_STRESS_SEED", "1"))
# The same device as a process of its own.
VHOST_USER = "daemon,stats-interval=0"
BOTH_DEVICES = [pytest.param(BALLOON, id="in QEMU"), pytest.param(VHOST_USER, id="vhost-user")]
# test_vhost_user has the short of it; everything with either device takes as long again.
BOTH_AT_NIGHT = [
    BOTH_DEVICES[0],
    pytest.param(VHOST_USER, id="vhost-user", marks=pytest.mark.nightly),
]
DELAY = "/sys/module/page_reporting/parameters/page_reporting_delay_ms"
FLUSH = "/sys/kernel/mm/page_reporting/flush"
ZP = "/sys/kernel/mm/zero_page"
# kzeropaged zeroes what programs wait for from then on.
KZEROPAGED = f"echo 1 > {ZP}/enabled"
# Free memory made dirty, then reported at once: what comes next has to be zero all the same.
DIRTY = "fillfree --share 70 >/dev/null; echo 3 > /proc/sys/vm/drop_caches"
REPORT = f"echo 0 > {FLUSH}"


def lying_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vhost-user devices take the option lie: a build of the daemon for tests."""
    program = daemon.build_lying()
    monkeypatch.setattr(daemon, "build", lambda _profile: program)


def most_by_day(names: Iterable[str]) -> list[Any]:
    """Parameters of a test; those for the other device wait for the night."""
    return [
        pytest.param(name, marks=pytest.mark.nightly) if name.endswith("vhost-user") else name
        for name in names
    ]


# With less than 512 MB (a guest of 512M has that) Linux leaves huge pages off, whatever its command
# line says.
HUGE_PAGES = (
    "cd /sys/kernel/mm/transparent_hugepage; echo always > enabled; echo madvise > defrag; cd - "
    ">/dev/null"
)

# Compaction does not hold off whoever takes memory offline, and goes on reading the struct pages of
# a block that has gone (isolate_migratepages_block() of 7.3.4, with the feature or without). They
# remain as they were, so that does no harm, unless they are poisoned, which only debug kernels do.
STALE_MEMMAP = "vm_debug=-"


class OutOfLuck(AssertionError):
    """An amount that chance has a part in is not as expected, which may happen ``often``.

    That is a share of all attempts. Such a test, and no other, is repeated until the share is met
    or cannot be (``pytest_runtest_call`` in tests/conftest.py): by default one failure wants four
    attempts that pass, and a second failure is final.

    Never for what must always hold: that no page is taken for zero which is not, above all.

    """

    def __init__(self, why: str, often: float = 0.2) -> None:
        super().__init__(why)
        self.often = often


def expect_at_least(found: float, least: float, often: float = 0.2) -> None:
    """OutOfLuck when ``found`` is less."""
    if found < least:
        raise OutOfLuck(f"{found} is less than {least}", often)


def expect_at_most(found: float, most: float, often: float = 0.2) -> None:
    """OutOfLuck when ``found`` is more."""
    if found > most:
        raise OutOfLuck(f"{found} is more than {most}", often)


# Commands: print how many pages kzeropaged has zeroed; wait until it has been idle for two seconds.
# While it has work and no idle CPU, it zeroes nothing and wakes up many times a second.
PREZEROED = "sed -n 's/^pgzeroed_set_prezeroed //p' /proc/vmstat"
WOKEN = (
    "cat /proc/[0-9]*/status 2>/dev/null | awk '/^Name:/ { ours = /kzeropaged/ } "
    "ours && /^voluntary/ { n += $2 } END { print n + 0 }'"
)
SETTLE = (
    f'b=-1; for i in $(seq 100); do n="$({PREZEROED}) $({WOKEN})"; '
    'if [ "$n" = "$b" ]; then break; fi; b=$n; sleep 2; done; [ "$n" = "$b" ]'
)


def run(
    script: str,
    *,
    kernel: str | Path = KERNEL,
    checked: bool = False,
    devices: list[str] | None = None,
    cpus: int = 1,
    memory: str = "768M",
    append: str = "",
    timeout: float = 240.0,
    allow_warnings: bool = False,
    **more: Any,
) -> BootResult:
    """Run a shell script in a fresh guest; every failing command in it ends it.

    ``checked``: see CHECKED.
    """
    if checked:
        kernel, append = CHECKED, f"{CHECK} {append}".strip()
    spec = BootSpec(
        kernel=kernel,
        devices=[BALLOON] if devices is None else devices,
        cpus=cpus,
        memory=memory,
        append=append,
        timeout=timeout,
        allow_warnings=allow_warnings,
        command=["sh", "-ec", script],
        **more,
    )
    return boot(spec)


def text(result: BootResult) -> str:
    """The guest's stdout."""
    out = result.stdout
    return out if isinstance(out, str) else out.decode(errors="replace")


def objects(result: BootResult) -> list[dict[str, Any]]:
    """The JSON lines of the guest's stdout, in order."""
    return [json.loads(line) for line in text(result).splitlines() if line.startswith("{")]


def counters(result: BootResult) -> dict[str, int]:
    """The pgzeroed_ lines (`grep pgzeroed_ /proc/vmstat`) that the guest printed last."""
    found = {}
    for line in text(result).splitlines():
        if line.startswith("pgzeroed_"):
            name, value = line.split()
            found[name] = int(value)
    return found


def fine(result: BootResult) -> None:
    """Nothing went wrong: exit code 0 and a silent console."""
    assert not result.violations, f"{result.violations[:8]} (console: {result.console})"
    assert result.exit_code == 0, (
        f"exit code {result.exit_code} (console: {result.console})\n{text(result)[-2000:]}"
    )


def hunted(result: BootResult, record: Record) -> dict[str, Any]:
    """What the leak hunter says, which must not be of a leak.

    Of several hunts in a guest, the first.

    The guest printed its counters last. How much was read goes into the report of the tests: on the
    oracle kernel every page whose zeroing is skipped is read, whoever gets it.
    """
    hunts = [found for found in objects(result) if "checked_pages" in found]
    found = counters(result)
    assert hunts, text(result)[-2000:]
    assert [hunt["violations"] for hunt in hunts] == [0] * len(hunts)
    assert found["pgzeroed_bad"] == 0
    pages = sum(hunt["total_pages"] for hunt in hunts)
    skips = found.get("pgzeroed_skip", 0)
    record("hunted_ms", sum(hunt["elapsed_ms"] for hunt in hunts))
    record("pages_hunted", pages)
    record("skips_checked", skips)
    print(f"the hunter read {pages} pages; {skips} pages were not zeroed, and checked")
    return hunts[0]
