# SPDX-License-Identifier: GPL-2.0
"""Memory that was in the balloon and is used again: the host has zeroed it."""

from __future__ import annotations

from lab.bench.jobs import BASE_COUNTS, allocate
from lab.bench.runner import Run
from lab.bench.session import DROP, MIB, Side
from lab.boot import balloon

# Without reporting: nothing else makes memory known to be zero.
DEVICE = balloon.device(device_init_on_inflate="on")
LEFT_MB = 448  # memory of the guest while the balloon is full
# A file takes the memory that never was in the balloon, except for this, which the kernel needs.
SPARE_MB = 80
REST = "/tmp/rest"
# The spared memory is in smaller blocks than the balloon gives back, so it would be allocated first.
FRAGMENTS = "/tmp/fragments"
KEEP_FRAGMENTS = f"dd if=/dev/zero of={FRAGMENTS} bs=1M count={SPARE_MB} 2> /dev/null"
KEEP_REST = (
    f"dd if=/dev/zero of={REST} bs=1M "
    f"count=$(($(awk '/^MemFree/ {{ print $2 }}' /proc/meminfo) / 1024 - {SPARE_MB})) 2> /dev/null"
)
REST_IN_USE = (
    f"While the balloon is full, a file takes all free memory except for {SPARE_MB} MB, so that the job uses pages that "
    f"were in the balloon. A second file takes {SPARE_MB} MB afterwards, since the smallest free blocks go first."
)
LIMIT = 1.0
OF = ", memory that was in the balloon"
KINDS = {"thp": "huge pages", "nothp": "4 KiB pages"}


def in_and_out(side: Side, counts: bool = True) -> None:
    """Make free memory dirty, put it into the balloon, and take it out again."""
    full = balloon.actual(side.guest)
    side.sh(f"rm -f {REST} {FRAGMENTS}; fillfree --share 85")
    side.sh(DROP)
    balloon.resize(side.guest, LEFT_MB * MIB)
    side.sh(KEEP_REST)
    balloon.resize(side.guest, full)
    side.sh(KEEP_FRAGMENTS)


def measure(run: Run) -> None:
    """Both kinds of pages, each time from memory that has just left the balloon."""
    run.note(BASE_COUNTS, REST_IN_USE)
    with run.pair(balloon=DEVICE) as both:
        for kind, words in KINDS.items():
            phase = allocate(
                run, both, f"deflate.{kind}", "populate", kind, prepare=in_and_out, kind=OF, words=words
            )
            if kind == "thp":
                phase.check_huge()
            phase.zeroed(LIMIT)
            phase.clock()
            phase.host()
