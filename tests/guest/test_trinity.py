# SPDX-License-Identifier: GPL-2.0
"""The system-call fuzzer trinity on the oracle kernel, with all sources of zeros at work.

Then a leak hunt.
"""

from __future__ import annotations

import os
import re

import pytest

from tests.guest.guests import (
    BALLOON,
    STRESS_SEED,
    Record,
    counters,
    expect_at_least,
    fine,
    hunted,
    run,
    text,
)
from tests.guest.test_stress_ng import GROUP, SOURCES, with_libraries

pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.nightly, pytest.mark.hunt]

SECONDS = int(os.environ.get("KNOWNZERO_STRESS_SECONDS", "3600"))
CALLS = 10000  # of each run: after 30,000 calls trinity has filled the memory of its group
HUNT = 30
RAN = re.compile(r"Ran (\d+) syscalls\. Successes: (\d+)\s+Failures: (\d+)")
# As nobody it can end its own tasks only, and write few files. The kernel lacks 32-bit calls and
# sockets.
FUZZ = f"exec trinity -a 64 -q -l off --disable-fds=sockets -C 4 -N {CALLS}"
SCRIPT = f"""
cd /tmp; echo +memory > /sys/fs/cgroup/cgroup.subtree_control
mkdir {GROUP}; echo 384M > {GROUP}/memory.max
echo 8 > /proc/sys/vm/nr_hugepages; echo 64 > /proc/sys/vm/nr_overcommit_hugepages
echo 1 > /proc/sys/vm/unprivileged_userfaultfd; echo 1 > /proc/sys/kernel/shm_rmid_forced
{SOURCES}
seed={STRESS_SEED}; end=$(($(date +%s) + {SECONDS}))
while left=$((end - $(date +%s))); [ $left -gt 0 ]; do
    mkdir fuzz; chown nobody fuzz
    (sh -c 'echo $PPID > {GROUP}/cgroup.procs'; cd fuzz
    exec timeout -s INT -k 60 $left su -s /bin/sh nobody -c "{FUZZ} -s $seed") > fuzz.log 2>&1 ||
        true
    echo 1 > {GROUP}/cgroup.kill
    grep "^Ran " fuzz.log || {{ echo "seed $seed:"; tail -n 5 fuzz.log; }}
    rm -rf fuzz; seed=$((seed + 1))
done
leak_hunter --setup --seconds {HUNT} --seed {STRESS_SEED} --workers 2 --dirty 96
grep pgzeroed_ /proc/vmstat
"""


@pytest.mark.timeout(2000 + 3 * SECONDS)
def test_no_byte_leaks(record_property: Record) -> None:
    result = run(
        SCRIPT,
        cpus=2,
        memory="1G",
        devices=[BALLOON],
        add=with_libraries("trinity", "usr/bin/trinity"),
        timeout=1500.0 + 2 * SECONDS,
    )
    fine(result)
    hunted(result, record_property)
    runs = RAN.findall(text(result))
    assert runs, text(result)[-2000:]
    ran, succeeded, failed = (sum(map(int, numbers)) for numbers in zip(*runs, strict=True))
    record_property("system_calls", ran)
    print(
        f"{len(runs)} runs of trinity made {ran} system calls: {succeeded} succeeded, {failed} "
        "failed"
    )
    # Most arguments are invalid; with no valid one it tests nothing.
    expect_at_least(succeeded, SECONDS)
    expect_at_least(counters(result)["pgzeroed_skip"], 1)
