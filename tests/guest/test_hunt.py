# SPDX-License-Identifier: GPL-2.0
"""The leak hunter on the oracle kernel, while memory management is disturbed in every way."""

from __future__ import annotations

import contextlib
import random
import time
from typing import Any

import pytest

from lab.boot.guest import BootResult, boot, running
from lab.boot.spec import BootSpec
from tests.guest.guests import (
    DELAY,
    KERNEL,
    KZEROPAGED,
    STALE_MEMMAP,
    STRESS_SECONDS,
    STRESS_SEED,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    objects,
    run,
)

pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.hunt]


DISTURBANCES = {
    "compaction, CPU hotplug": ("compact", "hotplug", "flush"),
    "memory pressure": ("pressure", "flush"),
    "huge page pool, memory blocks": ("hugetlb", "memoryblock", "flush"),
    "single pages": ("softoffline", "compact", "flush"),
    "everything": (
        "compact",
        "hotplug",
        "pressure",
        "hugetlb",
        "memoryblock",
        "softoffline",
        "flush",
    ),
}
OFTEN = ("huge page pool, memory blocks", "everything")
# Every kernel of the lab offers these; a hunter that skipped one of them did not do its work.
MUST_RUN = {
    "anon_4k",
    "thp",
    "mthp_64k",
    "brk",
    "stack",
    "fork_cow",
    "dontneed",
    "mremap",
    "page_tables",
    "shmem_write",
    "shmem_fallocate",
    "shmem_mmap",
    "file_tail",
    "hugetlb_surplus",
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=[] if what in OFTEN else pytest.mark.nightly)
        for what in DISTURBANCES
    ],
)
@pytest.mark.timeout(700 + 6 * STRESS_SECONDS)
def test_no_byte_leaks(what: str, record_property: Record) -> None:
    drivers = " ".join(DISTURBANCES[what])
    result = run(
        f"echo 200 > {DELAY}; stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} {drivers} > "
        f"/tmp/stress & leak_hunter --setup --whole-round --seconds {STRESS_SECONDS} --seed "
        f"{STRESS_SEED} --workers 2; wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat",
        cpus=2,
        memory="1G",
        append=STALE_MEMMAP if "memoryblock" in drivers else "",
        timeout=480.0 + 4 * STRESS_SECONDS,
    )
    fine(result)
    hunter = hunted(result, record_property)
    stress = next(found for found in objects(result) if "steps" in found)
    assert all(stress["steps"].values()), stress
    # Stopped by time, a rare kind may not have had its turn; one that failed would be a lie.
    tried = {name for name, why in hunter["skipped"].items() if "turn did not come" not in why}
    assert not MUST_RUN & tried, hunter["skipped"]
    expect_at_least(len(hunter["checked_pages"]), 10)
    expect_at_least(hunter["vmstat"]["pgzeroed_skip"], 10_000)


# Of what the guest reports or puts into the balloon, it leaves a third as it is, and says so.
RELUCTANT = "daemon,stats-interval=0,device-init-on-inflate=on,inhibit-one-in=3"


def squeezed(spec: BootSpec, most: int) -> tuple[BootResult, dict[str, Any]]:
    """Run a guest while its balloon has up to ``most`` MiB; also the last status of the device."""
    sizes = random.Random(STRESS_SEED)
    status: dict[str, Any] = {}
    with running(spec) as guest:
        assert guest.daemon is not None
        # It ends with the guest.
        with contextlib.suppress(OSError, ValueError):
            while guest.process.poll() is None:
                guest.daemon.ask(command="target", bytes=sizes.randrange(0, most) << 20)
                time.sleep(sizes.uniform(0.1, 2))
                status = guest.daemon.status()
        return guest.wait(), status


@pytest.mark.timeout(700 + 6 * STRESS_SECONDS)
def test_a_device_that_refuses_at_random(record_property: Record) -> None:
    """Reports beside a balloon that takes and gives back; what the answer is no for, is dirty."""
    script = (
        f"echo 50 > {DELAY}; stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} compact flush "
        f"> /tmp/stress & leak_hunter --setup --whole-round --seconds {STRESS_SECONDS} --seed "
        f"{STRESS_SEED} --workers 2; wait $!; cat /tmp/stress; grep pgzeroed_ /proc/vmstat"
    )
    spec = BootSpec(
        kernel=KERNEL,
        devices=[RELUCTANT],
        cpus=2,
        memory="1G",
        timeout=480.0 + 4 * STRESS_SECONDS,
        command=["sh", "-ec", script],
    )
    result, status = squeezed(spec, 320)
    fine(result)
    hunter = hunted(result, record_property)
    expect_at_least(len(hunter["checked_pages"]), 10)
    expect_at_least(status["inflated"], 1 << 20)
    # Of blocks as of pages in the balloon.
    expect_at_least(status["skipped"]["inhibited"], status["discarded"] / 10)
    expect_at_least(status["proven_zero"], status["discarded"] / 10)
    found = counters(result)
    for name in ("pgzeroed_set_reported", "pgzeroed_set_freed", "pgzeroed_skip"):
        expect_at_least(found[name], 1000)


# In User-Mode Linux: the source of zeros, with what is needed for it, and what disturbs it.
NATIVE = {
    "kzeropaged": (KZEROPAGED, "prezero pressure compact", "", None),
    "reporter": (
        f"echo 50 > {DELAY}; {KZEROPAGED}",
        "compact flush",
        "page_zeroed_reporter.mode=partial",
        None,
    ),
    "balloon": (f"echo 50 > {DELAY}", "compact flush", "", RELUCTANT),
}


@pytest.mark.nightly
@pytest.mark.timeout(700 + 6 * STRESS_SECONDS)
@pytest.mark.parametrize("source", NATIVE)
def test_no_byte_leaks_in_user_mode_linux(source: str, record_property: Record) -> None:
    before, drivers, append, device = NATIVE[source]
    # Its transport is down when it shuts down: let the pages out before.
    after = "echo virtio0 > /sys/bus/virtio/drivers/virtio_balloon/unbind" if device else "true"
    script = (
        f"{before}; stress --seconds {STRESS_SECONDS} --seed {STRESS_SEED} {drivers} > "
        f"/tmp/stress & leak_hunter --setup --seconds {STRESS_SECONDS} --seed {STRESS_SEED} "
        f"--workers 2; wait $!; cat /tmp/stress; {after}; grep pgzeroed_ /proc/vmstat"
    )
    spec = BootSpec(
        kernel="debug",
        arch="um",
        devices=[device] if device else [],
        memory="256M" if device else "128M",
        append=append,
        timeout=300.0 + 4 * STRESS_SECONDS,
        command=["sh", "-ec", script],
    )
    result = squeezed(spec, 128)[0] if device else boot(spec)
    fine(result)
    hunter = hunted(result, record_property)
    expect_at_least(len(hunter["checked_pages"]), 5)
    expect_at_least(counters(result)["pgzeroed_skip"], 1000)
