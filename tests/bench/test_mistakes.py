# SPDX-License-Identifier: GPL-2.0
"""Deliberate mistakes in what all benches measure with: each one is found by a check of this file.

The checks run the code of the lab on processes of this machine. A mistake is a change of its
source, made in memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.bench import jobs, repeat, session
from lab.bench.plan import BenchOptions, Images
from lab.bench.runner import Run
from lab.bench.table import BENCHES

MIB = 1 << 20
SIZE_MB = 8
IDLE = "import time; time.sleep(3600)"
# A thread that has used a second of CPU time, and has ended.
THREAD = """
import os, threading, time
def use():
    while time.thread_time() < 1.0: pass
one = threading.Thread(target=use)
one.start()
while len(os.listdir("/proc/self/task")) > 1: time.sleep(0.01)
print("ended", flush=True)
time.sleep(3600)
"""
ANSWER = (
    '{"task_clock_ns": 5000000, "wall_ns": 6000000, "bytes": 8388608, "minor_faults": 6, '
    '"pages": "thp", "vmstat": {"thp_fault_alloc": 4, "pgzeroed_cleared": 2, '
    '"pgzeroed_skip": 2048, "pgzeroed_bad": 0}}'
)


class Shell:
    """A guest's shell that notes its commands; its process is one of this machine."""

    def __init__(self, pid: int, log: list[str], name: str) -> None:
        self.pid = pid
        self.log = log
        self.name = name
        self.waiting: list[str] = []
        self.daemon = None

    def send(self, line: str) -> None:
        self.log.append(f"{self.name}: {line}")
        if line.startswith("test -e"):
            self.waiting.append("yes")
        if line.startswith("alloc_once"):
            self.waiting.append(ANSWER)
        self.waiting.append("@done 0")

    @property
    def lines(self) -> Iterator[str]:
        while self.waiting:
            yield self.waiting.pop(0)


@contextmanager
def process(program: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", program], **more) as child:
        try:
            yield child
        finally:
            child.kill()


def two_sides(pid: int, log: list[str]) -> list[Any]:
    sides = []
    for name in ("base", "ours"):
        guest: Any = Shell(pid, log, name)
        sides.append(session.Side(name, guest))
    return sides


def measured(log: list[str]) -> Any:
    """A job of two turns and a warm-up, on an idle process of this machine."""
    options = BenchOptions(pairs=2, size_mb=SIZE_MB)
    run = Run(BENCHES["thp"], options, Images(Path("qemu"), {}))
    with process(IDLE) as child:
        sides = two_sides(child.pid, log)
        for side in sides:
            side.prepare()
        job = jobs.Job("thp.{mode}", "populate", "thp", {"mode": "x"})
        return jobs.allocate(run, sides, job)


def check_priority() -> None:
    """The VMM runs above ordinary programs."""
    with process(IDLE) as child:
        for side in two_sides(child.pid, []):
            side.prepare()
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == session.PRIORITY


def check_host_is_warm() -> None:
    """The host's memory for the job is touched before each job: here, so many pages are faulted.

    The kernel gives them as huge pages or one by one.
    """
    before = resource.getrusage(resource.RUSAGE_SELF)
    session.warm_host(64 * MIB)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_minflt - before.ru_minflt >= 64 // 2
    assert after.ru_maxrss * 1024 >= 64 * MIB
    before = after
    measured([])
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before.ru_minflt
    # Two sides, a warm-up and two turns, each with the job's memory and 64 MiB.
    assert faults >= 6 * (SIZE_MB + 64) // 2


def between_jobs(log: list[str]) -> list[list[str]]:
    """The commands of the guests before each turn of jobs."""
    found: list[list[str]] = [[]]
    for line in log:
        if ": alloc_once" in line:
            if found[-1]:
                found.append([])
        else:
            found[-1].append(line)
    return found[:-1]


def check_reported_and_dropped() -> None:
    """Before each turn both guests drop caches, drain the lists of the CPU, report all memory."""
    log: list[str] = []
    measured(log)
    turns = between_jobs(log)
    assert len(turns) == 3
    for commands in turns:
        for name in ("base", "ours"):
            own = [line.removeprefix(f"{name}: ") for line in commands if line.startswith(name)]
            dropped = [at for at, line in enumerate(own) if "3 > /proc/sys/vm/drop_caches" in line]
            drained = [at for at, line in enumerate(own) if f"100000 > {session.LISTS}" in line]
            flushed = [at for at, line in enumerate(own) if line.endswith(f"> {session.FLUSH}")]
            assert dropped and drained and flushed, (name, own)
            assert max(dropped[-1], drained[-1]) < flushed[-1]


def check_threads_that_have_ended() -> None:
    """CPU time has that of threads that have ended, as those of a migration."""
    with process(THREAD, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"ended\n"
        assert session.cpu_ns(child.pid) >= 1e9


def check_figures() -> None:
    """Figures of a job are those that it printed: none of the warm-up, in milliseconds."""
    found = measured([])
    for name in ("base", "ours"):
        assert found[name, "task_clock"] == [5.0, 5.0]
        assert found[name, "guest_zeroed_bytes"] == [8192.0, 8192.0]
        assert found[name, "skipped_percent"] == [100.0, 100.0]
    both: list[Any] = ["base", "ours"]
    order = [side for side, counts in repeat.turns(both, 4) if counts]
    # By turns: neither side is always the first.
    assert order[0::2].count("base") == order[0::2].count("ours") == 2


CHECKS = (
    check_priority,
    check_host_is_warm,
    check_reported_and_dropped,
    check_threads_that_have_ended,
    check_figures,
)
# A mistake: its words, the module, the source as it is and as it would be, the check that finds it.
Mistake = tuple[str, ModuleType, str, str, Callable[[], None]]
MISTAKES: list[Mistake] = [
    (
        "the host is not warm",
        jobs,
        "        warm_host(size_mb * MIB + SPARE if warm is None else warm)\n",
        "",
        check_host_is_warm,
    ),
    (
        "the host's memory is mapped, not touched",
        session,
        "            area.madvise(POPULATE_WRITE)\n",
        "            pass\n",
        check_host_is_warm,
    ),
    (
        "the priority is not raised",
        session,
        "            raise_priority(pid)\n",
        "            pass\n",
        check_priority,
    ),
    (
        "memory is not reported",
        session,
        '            self.sh(f"echo 0 > {FLUSH}")\n',
        "            pass\n",
        check_reported_and_dropped,
    ),
    (
        "one guest only is settled",
        session,
        "    for side in sides:\n        side.free_and_report()\n",
        "    for side in sides[:1]:\n        side.free_and_report()\n",
        check_reported_and_dropped,
    ),
    (
        "caches are not dropped",
        session,
        'f"echo 3 > /proc/sys/vm/drop_caches; echo 100000',
        'f"echo 100000',
        check_reported_and_dropped,
    ),
    (
        "the lists of the CPU are not drained",
        session,
        "echo 100000 > {LISTS}; ",
        "",
        check_reported_and_dropped,
    ),
    (
        "threads that have ended are left out",
        session,
        "    return time.clock_gettime_ns(~pid << 3 | CPUCLOCK_SCHED)\n",
        "    tasks = Path(f'/proc/{pid}/task').iterdir()\n"
        "    return sum(int((task / 'schedstat').read_text().split()[0]) for task in tasks)\n",
        check_threads_that_have_ended,
    ),
    (
        "the warm-up counts",
        repeat,
        "            if counts:\n                found.note",
        "            if True:\n                found.note",
        check_figures,
    ),
    (
        "bytes are pages",
        jobs,
        "        return float(cleared * PAGE)\n",
        "        return float(cleared)\n",
        check_figures,
    ),
    (
        "base is always the first",
        repeat,
        "    return order if turn // len(things) % 2 == 0 else order[::-1]\n",
        "    return [*things]\n",
        check_figures,
    ),
]


@contextmanager
def made(module: ModuleType, right: str, wrong: str) -> Iterator[None]:
    """The modules of the benches with a mistake in one of them."""
    file = Path(str(module.__file__))
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{file.name} has not one: {right}"
    modules = (session, repeat, jobs)  # in the order in which they import each other
    before = [dict(one.__dict__) for one in modules]
    try:
        for one in modules:
            text = Path(str(one.__file__)).read_text(encoding="utf-8")
            text = text.replace(right, wrong) if one is module else text
            exec(compile(text, str(one.__file__), "exec"), one.__dict__)
        yield
    finally:
        for one, old in zip(modules, before, strict=True):
            one.__dict__.clear()
            one.__dict__.update(old)


@pytest.mark.parametrize("check", CHECKS, ids=lambda one: one.__name__)
def test_without_a_mistake(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one[0])
def test_a_mistake_is_found(mistake: Mistake) -> None:
    _, module, right, wrong, check = mistake
    with made(module, right, wrong), pytest.raises(AssertionError):
        check()
