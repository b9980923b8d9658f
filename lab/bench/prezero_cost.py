# SPDX-License-Identifier: GPL-2.0
"""What pre-zeroing costs as a whole, beside its peers, under a load that gains nothing, and natively."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench import BenchOptions
from lab.bench.jobs import Phase, clock_metric, within, zeroed_metric
from lab.bench.kzeropaged import (
    DIRTY,
    FOLDER,
    PACE,
    SLOWDOWN_LIMIT,
    WARM_UPS,
    WORDS,
    Cost,
    allocate,
    background_metrics,
    corunner_metric,
    zero_all,
)
from lab.bench.session import DROP, MIB, Built, Pair, Side, by_turns, guests, spec_for, warm_host
from lab.boot.spec import BootSpec
from lab.build import programs as guest
from lab.build.linux import VARIANTS
from lab.core.errors import TestFailure
from lab.core.progress import step
from lab.report.results import Metric

# The other ways to have zeros, on the base kernel; both are older than this series.
PEERS = {"init_on_alloc": "init_on_alloc=1", "init_on_free": "init_on_free=1"}
PEER_TURNS = 6
PEER_SHARE = 0.5
LOAD = ("build_load", "--steps", "40", "--size", "8")
LOAD_BEYOND = 5.0
STORES_MS = 400
STORES_TURNS = 10
UM_MEMORY = "512M"
UM_MB = 256
UM_TURNS = 6
# Used, so that nothing is known of it; to write to each page would take it ten seconds.
UM_DIRTY = f"alloc_once --size 384 --pages nothp --mode populate > /dev/null; {DROP}"
DEFAULT_PACE = f"echo 1000 > {FOLDER}/delay_millisecs"


def peer_specs(options: BenchOptions, images: Built) -> list[tuple[str, BootSpec]]:
    """Base, ours, and base with each of the peers; none has a balloon."""
    rows = [("base", images.base, ""), ("ours", images.ours, "")]
    rows += [(name, images.base, append) for name, append in PEERS.items()]
    return [
        (name, spec_for(options, kernel, images.qemu, devices=[], append=append))
        for name, kernel, append in rows
    ]


def peers(sides: list[Side], size_mb: int) -> list[Metric]:
    """All memory of a job touched, each way of zeroing it: what the job takes, and what everything takes."""
    ours = next(side for side in sides if side.name == "ours")
    ours.sh(PACE)
    metrics: list[Metric] = []
    for pages, word in WORDS.items():
        job: dict[str, list[float]] = {side.name: [] for side in sides}
        whole: dict[str, list[float]] = {side.name: [] for side in sides}
        argv = ["alloc_once", "--size", str(size_mb), "--mode", "touch_all", "--pages", pages]
        with step(f"{pages}, peers: {PEER_TURNS} turns of {size_mb} MB in {len(sides)} guests"):
            for turn in range(-WARM_UPS, PEER_TURNS):
                for side in by_turns(sides, turn):
                    cost = Cost()
                    if side is ours:
                        side.sh(f"echo 0 > {FOLDER}/enabled")
                    side.sh(DIRTY)
                    if side is ours:
                        zero_all(side, cost)
                    warm_host(64 * MIB)
                    with side.host_cost() as host:
                        told = side.json(*argv)
                    if turn >= 0:
                        job[side.name].append(told["task_clock_ns"] / 1e6)
                        spent = host[0].user_s + host[0].system_s + sum(cost.cpu_s)
                        whole[side.name].append(spent * 1e3)
        for name in (*PEERS, "ours"):
            words = f"the base kernel with {PEERS[name]}" if name in PEERS else "our kernel"
            metrics += [
                Metric.of(
                    f"prezero.peers.{word}.{name}.job",
                    "ms",
                    job["base"],
                    job[name],
                    sentence=f"CPU time of a job that fills {size_mb} MB, against {words}.",
                ),
                Metric.of(
                    f"prezero.peers.{word}.{name}.whole",
                    "ms",
                    whole["base"],
                    whole[name],
                    sentence="CPU time of the VMM from the start of that job until its memory is free again, and "
                    f"of the zeroing before it, against {words}. Nobody saves CPU time by zeroing earlier or later.",
                ),
            ]
    return metrics


def load_metrics(both: Pair, pairs: int) -> list[Metric]:
    """Processes that come and go and fill all memory they get, while the thread is on as it is by default."""
    wall: dict[str, list[float]] = {"base": [], "ours": []}
    whole: dict[str, list[float]] = {"base": [], "ours": []}
    with step(f"fork, exec, fault: {pairs} pairs of {LOAD[2]} processes"):
        both.ours.sh(f"{DEFAULT_PACE}; echo 1 > {FOLDER}/enabled")
        for turn in range(-WARM_UPS, pairs):
            for side in both.sides(turn):
                with side.host_cost() as host:
                    told = side.json(*LOAD)
                if turn >= 0:
                    wall[side.name].append(told["wall_ns"] / 1e6)
                    whole[side.name].append((host[0].user_s + host[0].system_s) * 1e3)
        both.ours.sh(f"echo 0 > {FOLDER}/enabled; {PACE}")
    made = Metric.of(
        "prezero.build_load.wall",
        "ms",
        wall["base"],
        wall["ours"],
        sentence=f"{LOAD[2]} processes one after the other as in a build: each is forked, executes a program, fills "
        f"{LOAD[4]} MB, reads and writes files, and ends. Ours has pre-zeroing on, as it is by default.",
    )
    return [
        replace(made, target=within(made, 0, LOAD_BEYOND, "not slower than base beyond noise")),
        Metric.of(
            "prezero.build_load.whole",
            "ms",
            whole["base"],
            whole["ours"],
            sentence="CPU time of the VMM meanwhile, the thread's included.",
        ),
    ]


def _natively(metric: Metric) -> Metric:
    return replace(
        metric,
        name=metric.name.replace("prezero.", "prezero.um.", 1),
        sentence=f"As User-Mode Linux, which is not emulated: {metric.sentence}",
    )


def natively(options: BenchOptions, images: Built) -> tuple[list[Metric], list[str]]:
    """4 KiB pages and the co-runner in guests that are ordinary processes; nothing when kernels are files."""
    if options.base not in VARIANTS or options.ours not in VARIANTS:
        return [], ["Nothing was measured as User-Mode Linux: that needs kernels that are named by variant."]
    of_job = replace(options, size_mb=UM_MB, memory=UM_MEMORY, pairs=min(options.pairs, UM_TURNS))
    of_um: dict[str, Any] = {"arch": "um", "devices": [], "qemu": None, "accel": "auto"}
    specs = [
        (name, replace(spec_for(of_job, kernel, images.qemu), **of_um))
        for name, kernel in (("base", options.base), ("ours", options.ours))
    ]
    metrics: list[Metric] = []
    cost = Cost()
    with guests(specs) as (base, ours):
        both = Pair(base, ours, "um", images)
        ours.sh(PACE)
        for mode in ("populate", "touch_all"):
            phase: Phase = allocate(both, of_job, mode, "nothp", cost, UM_DIRTY)
            name = f"prezero.4k.{mode}"
            metrics.append(clock_metric(f"{name}.task_clock", mode, phase, None))
            metrics.append(zeroed_metric(f"{name}.guest_zeroed_bytes", mode, phase, of_job, None))
        metrics += background_metrics(cost)
        metrics.append(corunner_metric(both, UM_DIRTY))
    note = (
        f"As User-Mode Linux {UM_MB} MB of {UM_MEMORY} are filled: it has no huge pages, a page fault costs it several "
        "system calls of the host, and its memory is a file that the host keeps in its page cache. It has no counters "
        "either: task-clock is the time that passed. Compare its figures with nothing but the other column."
    )
    return [_natively(metric) for metric in metrics], [note]


def _corunner(program: Path, how: str) -> dict[str, Any]:
    argv = [str(program), "--ms", str(STORES_MS), *(["--clear", how] if how else [])]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TestFailure("The co-runner fails on this machine", done.stderr.strip(), shlex.join(argv))
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def stores() -> tuple[list[Metric], list[str]]:
    """On this machine itself: the stores that the kernel zeroes with at leisure, against the usual ones."""
    if platform.machine() != "x86_64":
        return [], ["Stores were not compared: there is one kind on this architecture."]
    program = guest.build_programs()["corunner"]
    steps: dict[str, list[float]] = {"": [], "stos": [], "movnti": []}
    rate: dict[str, list[float]] = {"stos": [], "movnti": []}
    with step(f"stores: {STORES_TURNS} turns of 3 runs of {STORES_MS} ms, natively"):
        for turn in range(-WARM_UPS, STORES_TURNS):
            for how in by_turns(list(steps), turn):
                told = _corunner(program, how)
                if turn < 0:
                    continue
                steps[how].append(told["steps"] / told["wall_ns"] * 1e9)
                if how:
                    rate[how].append(told["cleared_bytes"] / told["clear_ns"] * 1e9)
    still = Metric.of(
        "prezero.native.corunner.movnti",
        "steps/s",
        steps[""],
        steps["movnti"],
        sentence="Natively, on this machine: how fast a program goes through 1 MiB of its memory by itself, and when "
        "after each turn 2 MiB are zeroed with non-temporal stores, as kzeropaged does; their time not counted.",
    )
    words = f"at most {SLOWDOWN_LIMIT:.0f} % less beyond noise"
    return [
        Metric.of(
            "prezero.native.corunner.stos",
            "steps/s",
            steps[""],
            steps["stos"],
            sentence="The same with the stores that zero memory on demand (rep stosb).",
        ),
        replace(still, target=within(still, SLOWDOWN_LIMIT, LOAD_BEYOND, words, more_is_better=True)),
        Metric.of(
            "prezero.native.clear_rate",
            "bytes/s",
            rate["stos"],
            rate["movnti"],
            sentence="Natively: bytes zeroed in a second with rep stosb, and with non-temporal stores.",
        ),
    ], []


def measure(options: BenchOptions, images: Built) -> tuple[list[Metric], list[str]]:
    """The peers, the load and the native guests: metrics and notes."""
    unit = {"G": 1024, "M": 1}[options.memory[-1]]
    size_mb = int(int(options.memory[:-1]) * unit * PEER_SHARE) // 2 * 2
    with guests(peer_specs(options, images)) as sides:
        metrics = peers(sides, size_mb)
        metrics += load_metrics(Pair(sides[0], sides[1], sides[0].guest.accel, images), options.pairs)
    native, notes = natively(options, images)
    kinds, remarks = stores()
    return metrics + native + kinds, [
        "Peers: init_on_alloc=1 zeroes every page when it is allocated, whoever wants it; init_on_free=1 when it is "
        "freed, and not again. Their whole CPU time includes that, and ours what kzeropaged did before.",
        *notes,
        *remarks,
    ]
