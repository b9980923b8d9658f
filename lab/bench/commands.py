# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz demo``, ``kz bench`` and ``kz publish``."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.bench import demo as demos
from lab.bench import native
from lab.bench.plan import KERNEL, NOT_EMULATED, BenchOptions, Images, Plan, build
from lab.bench.plan import plan as make_plan
from lab.bench.runner import measure
from lab.bench.table import BENCHES
from lab.core import paths
from lab.core.errors import TestFailure, UsageError
from lab.core.options import one_of, writable_file, writable_folder
from lab.core.progress import note
from lab.machine import fetch
from lab.report import archive
from lab.report.results import FILE_NAME, Result

app = typer.Typer()


Pairs = Annotated[int, Option(min=1, max=1000, help="Pairs of repetitions, by turns.")]
Accel = Annotated[str, Option(help="auto, kvm, pvm or tcg.")]


def output_folder(given: Path | None, name: str) -> Path:
    """The folder of a run: ``given``, or a new one named by the time.

    UsageError for one that cannot be written.
    """
    if given is None:
        parent, stamp = paths.out() / name, time.strftime("%Y%m%d-%H%M%S")
        return parent / (f"{stamp}-{os.getpid()}" if (parent / stamp).exists() else stamp)
    return writable_folder("--output", given)


def show(result: Result, folder: Path) -> None:
    from lab.report import page
    from lab.report import publish as publishing

    print("\n".join(publishing.table(result).text()))
    reason = result.host.get("accelerator", "")
    ran_on = f"{result.ran_on} ({reason})" if reason else result.ran_on
    print(f"Measured on {ran_on}. Targets met: {page.verdict(result)}.")
    for line in result.missed():
        print(line)
    print(f"Again: {result.reproduce}")
    print(folder)


def run_one(plan: Plan, folder: Path, prepare: Callable[[Plan], Images] | None = None) -> Result:
    """Measure a plan and write result.json, the report, and the files of the guests.

    ``prepare``: instead of ``build``.
    """
    from lab.report import evidence
    from lab.report.page import write_report

    images = (prepare or build)(plan)
    with evidence.collecting() as found:
        result = measure(plan, images, found.take)
        found.publish(folder)
        result.save(folder)
        write_report([result], folder)
    note(f"wrote {folder / FILE_NAME} and {folder / 'report.html'}")
    return result


def check_targets(result: Result, folder: Path) -> None:
    """TestFailure that names each missed target of a result; ``folder`` has its report."""
    if missed := result.missed():
        why = "\n".join(missed)
        fix = f"see {folder / 'report.html'}; on a busy machine, measure again with more --pairs"
        what = "targets or floors are" if len(missed) > 1 else "target or floor is"
        raise TestFailure(f"{len(missed)} {what} not met", why, fix)


@app.command("demo")
def demo(
    pairs: Pairs = demos.PAIRS,
    accel: Accel = "auto",
    output: Annotated[Path | None, Option(help="Folder (default: out/demo/TIME).")] = None,
) -> None:
    """Run a stock QEMU, the daemon and a kernel with the series; print a table.

    Without: the same guest with a device that does not offer feature bit 6.
    """
    if accel == "pvm":
        native.need_quiet()
    plan = make_plan(demos.DEMO, BenchOptions(pairs=pairs, accel=accel), ("demo",))
    folder = output_folder(output, "demo")
    result = run_one(plan, folder, demos.build)
    from lab.report import summary

    print("\n".join(summary.lines(result)))
    print(f"Report: {folder / 'report.html'}")
    print(summary.next_step(result))


@app.command("bench")
def bench(
    name: Annotated[
        str,
        one_of(
            "bench",
            [*BENCHES],
            "; ".join(f"{b.name}: {b.sentence}" for b in BENCHES.values()) + ".",
        ),
    ],
    pairs: Pairs = 10,
    size_mb: Annotated[
        int, Option("--size", min=2, max=65536, help="MiB the job allocates.")
    ] = 256,
    memory: Annotated[str, Option(help="Memory of each guest, such as 2G.")] = "2G",
    accel: Accel = "auto",
    ours: Annotated[str, Option(help="The kernel measured: a variant or image.")] = "knownzero",
    only: Annotated[str, Option(metavar="NAME,…", help="programs, life: only these parts.")] = "",
    defaults: Annotated[
        str, Option(help="kernel; thp, page-fault, fleet, programs: or debian (init_on_alloc=1).")
    ] = KERNEL,
    linux: Annotated[
        str, Option(metavar="6.12", help="thp, order0: another Linux, see linux/base.toml.")
    ] = "",
    output: Annotated[Path | None, Option(help="Folder (default: out/NAME/TIME).")] = None,
    strict: Annotated[
        bool, Option("--strict", help="Exit with 1 when a target is missed.")
    ] = False,
) -> None:
    options = BenchOptions(
        pairs=pairs,
        size_mb=size_mb,
        memory=memory,
        accel=accel,
        ours=ours,
        only=only,
        defaults=defaults,
        linux=linux,
    )
    plan = make_plan(BENCHES[name], options)
    if linux:
        fetch.use("linux", linux)
    if accel == "pvm":
        native.need_quiet()
    folder = output_folder(output, name)
    result = run_one(plan, folder)
    show(result, folder)
    if strict:
        check_targets(result, folder)


@app.command("publish")
def publish(
    run: Annotated[
        Path, Argument(help="A folder under out/, also that of a night's benches, or an archive.")
    ],
) -> None:
    """A run that is incomplete or has another format is refused; a missed target is published."""
    from lab.report import publish as publishing

    with archive.opened(run) as place:
        wanted = BENCHES if place == run else [n for n in archive.BENCHES if (place / n).is_dir()]
        for folder in publishing.publish(place, list(wanted)):
            print(folder)


@app.command("evidence")
def evidence(
    with_accel: Annotated[str, Option("--accel", help="kvm, or pvm.")] = "kvm",
    pairs: Pairs = 10,
    output: Annotated[Path, Option(help="The archive to write.", metavar="FILE")] = Path(
        "knownzero-evidence.tar.gz"
    ),
) -> None:
    """The archive has the figures, the models of CPU and kernel, and the commit."""
    if with_accel not in NOT_EMULATED:
        why = "the figures are of interest where no emulator makes them"
        raise UsageError(f"Bad --accel: {with_accel}", why, f"use {' or '.join(NOT_EMULATED)}")
    writable_file("--output", output)
    options = BenchOptions(accel=with_accel, pairs=pairs)
    names = archive.BENCHES
    plans = [make_plan(BENCHES[name], options) for name in names]
    native.need_quiet()
    folder = output_folder(None, "evidence")
    for number, plan in enumerate(plans, 1):
        note(f"{number} of {len(plans)}: {plan.bench.name}")
        run_one(plan, folder / plan.bench.name)
    archive.pack(folder, names, output)
    print(output)
