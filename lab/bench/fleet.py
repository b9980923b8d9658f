# SPDX-License-Identifier: GPL-2.0
"""Six guests with bursts of memory on one host.

The memory they take from it over time, by policy.
"""

import itertools
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lab.bench import init_on_alloc
from lab.bench.init_on_alloc import EACH_PAGE
from lab.bench.jobs import BASE_COUNTS, zeroed_bytes
from lab.bench.kzeropaged import DIRTY, ON, PREZEROED
from lab.bench.repeat import Values
from lab.bench.runner import Run
from lab.bench.session import DELAY, PAGE, USUAL, Side, Wanted, cpu_ns
from lab.boot import balloon, console
from lab.core.errors import TestFailure
from lab.core.progress import step

GUESTS, MEMORY, SEED, SECONDS, SETTLE_S = 6, "1G", 20, 60, 12
SIZES_MB, HOLD_MS, REST_MS = (64, 256), (1000, 4000), (1000, 6000)
REPORTS = balloon.device(free_page_reporting="on")


class Policy(NamedTuple):
    """How memory returns to the host; ``command`` runs in each guest before."""

    words: str
    kernel: str
    device: str
    command: str = "true"


POLICIES = {
    "none": Policy("base, no reports", "base", balloon.device()),
    "upstream": Policy("base, reports after 2000 ms", "base", REPORTS, USUAL),
    "late": Policy("ours, reports after 2000 ms", "ours", REPORTS, USUAL),
    "early": Policy("ours, reports after 250 ms", "ours", REPORTS, f"echo 250 > {DELAY}"),
    "kzeropaged": Policy("ours, 2000 ms, with kzeropaged", "ours", REPORTS, f"{USUAL}; {ON}"),
}
KINDS = (
    "memory_time",
    "burst",
    "burst_p99",
    "zeroed",
    "prezeroed",
    "cpu",
)


def trace(guest: int) -> list[str]:
    """The bursts of a guest as START:SIZE:HOLD, in ms, MB and ms; the same for each policy."""
    dice, at, found = random.Random(SEED * 1000 + guest), 0, []
    while (at := at + dice.randint(*REST_MS)) < SECONDS * 1000:
        size, hold = dice.randrange(SIZES_MB[0], SIZES_MB[1] + 1, 16), dice.randint(*HOLD_MS)
        found.append(f"{at}:{size}:{hold}")
        at += hold
    return found


def pss(pid: int) -> float:
    """GiB of the host's memory that a process takes, shared pages in part; 0 when it has ended."""
    with suppress(OSError):
        for kib in re.findall(r"(?m)^Pss: +(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text()):
            return int(kib) / 2**20
    return 0.0


def bursts(side: Side, number: int, each_page: bool) -> dict[str, list[float]]:
    """Run the trace in a guest; its figures by kind. TestFailure with the console's last lines.

    ``each_page``: the guest zeroes each page that it allocates.
    """
    before, cpu = side.vmstat() if each_page else {}, cpu_ns(side.guest.pid)
    try:
        answer = side.json("burst", *trace(number))
    except TestFailure as why:
        last = console.last_lines(side.guest.console.read_text(errors="replace"))
        about = f"{why.why}\nits console ends with:\n{last}"
        raise type(why)(why.what, about, why.fix) from None
    spent = cpu_ns(side.guest.pid) - cpu
    if each_page:
        zeroed = init_on_alloc.zeroed(side, before, side.vmstat())
    else:
        zeroed = zeroed_bytes(answer, side.kernel)
    return {
        "burst": [ns / 1e6 for ns in answer["burst_ns"]],
        "zeroed": [zeroed],
        "prezeroed": [float((answer["vmstat"][PREZEROED] or 0) * PAGE)],
        "cpu": [spent / 1e9],
    }


def play(sides: Sequence[Side], name: str, found: Values, each_page: bool = False) -> list[float]:
    """Run all traces at once; the GiB of each second until all have ended.

    The first failure ends it.
    """
    gib: list[float] = []
    pool, began = ThreadPoolExecutor(max_workers=len(sides)), time.monotonic()
    jobs = [pool.submit(bursts, side, number, each_page) for number, side in enumerate(sides)]
    pool.shutdown(wait=False)  # a thread ends with its guest
    while len(gib) < SECONDS or not all(job.done() for job in jobs):
        gib.append(sum(pss(side.guest.pid) for side in sides))
        left = began + len(gib) - time.monotonic()
        for job in wait(jobs, max(0.0, left), FIRST_EXCEPTION).done:
            job.result()
        time.sleep(max(0.0, began + len(gib) - time.monotonic()))
    for job in jobs:
        for kind, values in job.result().items():
            found[name, kind] += values
    found[name, "memory_time"] = [sum(gib)]
    found[name, "burst_p99"] = [
        statistics.quantiles(found[name, "burst"], n=100, method="inclusive")[-1]
    ]
    return gib


def over_time(run: Run, name: str, found: Values) -> list[float]:
    """Add the figures of a policy; its GiB in each second."""
    policy = POLICIES[name]
    spec = run.spec(policy.kernel, memory=MEMORY, devices=[policy.device], timeout=400.0)
    wanted = [
        Wanted(f"{policy.kernel}-{name}-{number}", spec, policy.kernel) for number in range(GUESTS)
    ]
    with run.guests(wanted) as sides, step(f"{policy.words}: {GUESTS} guests, {SECONDS} s"):
        for side in sides:
            side.sh(f"{policy.command}; {DIRTY}")  # as in a guest that has run for a while
        time.sleep(SETTLE_S)
        return play(sides, name, found, run.debian)


AGAINST = "upstream"  # the policy that the others are compared with: it gives memory back, too


def figures(run: Run, found: Values) -> None:
    """Each policy against base with reports."""
    others = [name for name in POLICIES if name != AGAINST]
    for name, kind in itertools.product(others, KINDS):
        if any(found[name, kind]):
            values = found[AGAINST, kind], found[name, kind]
            run.add(f"fleet.{{policy}}.{kind}", values, {"policy": name})


def measure(run: Run) -> None:
    found, run.sides = Values(), [POLICIES[AGAINST].words, "the policy named"]
    run.job = {"guests": GUESTS, "memory": MEMORY, "cpus": 1, "seconds": SECONDS, "seed": SEED}
    run.job |= {f"trace_{number}": " ".join(trace(number)) for number in range(GUESTS)}
    for name, policy in POLICIES.items():
        run.series[policy.words] = over_time(run, name, found)
    figures(run, found)
    run.note(
        f"{GUESTS} guests of {MEMORY} run the same traces (START:SIZE:HOLD in ms, MB and ms) for "
        f"{SECONDS} s under each policy. Each guest first uses most of its memory once; "
        f"{SETTLE_S} s later the traces start. A burst is a mapping, with huge pages allowed, "
        "with a byte written to each 4 KiB.",
        "Host memory is the sum of the PSS of all QEMUs, with an emulator's translated code. CPU "
        f"time includes the host's work for a guest. Of {len(found['none', 'burst'])} bursts, the "
        "99th percentile is nearly the longest.",
        EACH_PAGE if run.debian else BASE_COUNTS,
        "Instructions are not counted: -icount gives each guest its own clock, so bursts of "
        "different guests would not meet.",
    )
