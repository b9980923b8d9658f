# SPDX-License-Identifier: GPL-2.0
"""User-Mode Linux and the daemon in a guest: what both kernels zero of memory that comes back."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench.both_ends import REST_S, Inner, zeroed
from lab.bench.kzeropaged import ON, PREZEROED
from lab.bench.session import DELAY, LOOP, MIB, PAGE, Side
from lab.boot import argv, initramfs, nested
from lab.boot.console import taint_reasons
from lab.boot.guest import running
from lab.boot.spec import BootSpec
from lab.build import daemon
from tests.guest.guests import CHECK, expect_at_least, expect_at_most

# Its outer kernel takes five minutes to build.
pytestmark = [pytest.mark.boots, pytest.mark.slow, pytest.mark.nightly]

FILL, USED = 320, 256  # MB
SHELL = ["sh", "-c", LOOP]
KERNEL, INITRD, DAEMON = (Path(nested.PLACE) / name for name in ("kernel", "initrd", daemon.NAME))
FRONT = Path("/run/front")
# Serial lines of User-Mode Linux: input and output of the command are FIFOs, each with another end
# that is idle.
LINES = "ssl0=null ssl1=fd:5,fd:8 ssl2=null ssl3=fd:7,fd:6"


class UserMode(Inner):
    """User-Mode Linux in the guest ``outer``, with the daemon beside it."""

    def __init__(self, outer: Side, spec: BootSpec) -> None:
        Side.__init__(self, "ours", outer.guest)
        self.outer = outer
        ends = argv.Ends(INITRD, Path("/dev/null"), {}, FRONT)
        words = argv.make(replace(spec, append=LINES), argv.Images(KERNEL, "um"), ends)
        fifos = " ".join(f"{nested.PLACE}/{name}.fifo" for name in ("5", "6", "7", "8", "console"))
        outer.sh(f"mkfifo {fifos}")
        for number in (5, 6, 7, 8):
            outer.sh(f"exec {number}<> {nested.PLACE}/{number}.fifo")
        # Both kernels write to one console, where the faults of either are found.
        console = f"{nested.PLACE}/console.fifo"
        outer.sh(f"{DAEMON} --socket-path {FRONT} --stats-interval 0 > {nested.LOG} 2>&1 &")
        outer.sh(
            f"for i in $(seq 100); do [ -S {FRONT} ] && break; sleep 0.1; done; cat {nested.LOG}; "
            f"[ -S {FRONT} ]"
        )
        outer.sh(
            f"cat {console} > /dev/console & {shlex.join(words)} > {console} 2>&1 & vmm=$!; "
            f"{nested.FUNCTION}"
        )
        # User-Mode Linux loses what is written before it opens its end.
        outer.sh('read -r line <&8; [ "$line" = up ]')
        self.find_knobs()


def test_neither_end_zeroes_memory_of_user_mode_linux(
    image: Callable[..., Path], tmp_path: Path
) -> None:
    spec = BootSpec(arch="um", memory="512M", devices=["daemon"])
    initrd, program = tmp_path / "initrd", daemon.build()
    initramfs.write(initrd, ["sh", "-c", f"echo up; {LOOP}"], "ssl in", [], [], "um")
    add = [(image("debug", "um"), str(KERNEL)), (initrd, str(INITRD)), (program, str(DAEMON))]
    add += [(library, str(library)) for library in nested.libraries(program)]
    host = BootSpec(
        image("knownzero", config="programs"),
        memory="2G",
        accel="tcg",
        command=SHELL,
        append=CHECK,
        timeout=480,
        add=add,
    )
    with running(host) as running_host:
        outer = Side("outer", running_host)
        outer.sh(ON)
        # Its memory is a file there, with huge pages as in private memory.
        outer.sh("mount -o remount,huge=always /dev/shm")
        inner = UserMode(outer, spec)
        inner.sh(f"echo 3600000 > {DELAY}; fillfree --size {FILL} > /dev/null")
        full = inner.counts()["nr_shmem"] * PAGE
        inner.free_and_report()
        expect_at_least(full - inner.settled("nr_shmem", 1.5, MIB), 0.9 * FILL * MIB)
        inner.settled(PREZEROED, REST_S)
        before = inner.counts()
        words = [
            "alloc_once",
            "--size",
            str(USED),
            "--pages",
            "nothp",
            "--verify",
            "--mode",
            "touch_all",
        ]
        answer = json.loads(inner.sh(shlex.join(words))[-1])
        more = {name: value - before[name] for name, value in inner.counts().items()}
        # The inner kernel uses memory that kzeropaged has zeroed in the outer guest.
        expect_at_least(more["nr_shmem"] * PAGE, 0.9 * USED * MIB)
        expect_at_least(more["pgzeroed_skip"] * PAGE, 0.95 * USED * MIB)
        expect_at_most(zeroed(more), 0.05 * USED * MIB)
        expect_at_least(answer["vmstat"]["pgzeroed_skip"] * PAGE, 0.85 * USED * MIB)
        for side in (inner, outer):
            assert side.vmstat()["pgzeroed_bad"] == 0
            assert taint_reasons(side.number("cat /proc/sys/kernel/tainted")) == []
