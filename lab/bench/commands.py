# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz demo`` and ``kz bench``."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.bench import BENCHES, Accel, BenchOptions
from lab.core import paths
from lab.core.errors import LabError, TestFailure, UsageError, from_oserror
from lab.core.options import one_of
from lab.core.progress import note
from lab.core.units import human, percent
from lab.report import evidence
from lab.report.evidence import Evidence
from lab.report.results import FILE_NAME, Result, save_error

app = typer.Typer()
Pairs = Annotated[int, typer.Option(min=1, max=1000, help="Pairs of repetitions, base and ours by turns.")]
Size = Annotated[int, typer.Option(min=2, max=65536, help="MB the job allocates.")]
Memory = Annotated[str, typer.Option(help="Memory of each guest, such as 2G.")]
AccelOption = Annotated[str, typer.Option("--accel", help="auto, kvm or tcg.")]
BaseKernel = Annotated[str, typer.Option("--base", help="The kernel to compare with: a variant or an image.")]
OursKernel = Annotated[str, typer.Option("--ours", help="The kernel measured: a variant or an image.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print result.json on stdout instead of the table.")]
Output = Annotated[
    Path | None, typer.Option("--output", help="The folder to write to (default: out/NAME/TIME).")
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict", help="Exit with 1 when a target is missed; without, the exit code does not tell."
    ),
]


def checked(pairs: int, size: int, memory: str, accel: str, base: str, ours: str) -> BenchOptions:
    """Options from the command line; UsageError when they cannot work."""
    known: dict[str, Accel] = {"auto": "auto", "kvm": "kvm", "tcg": "tcg"}
    if accel not in known:
        raise UsageError("Bad --accel", f"'{accel}' is not an accelerator", "use auto, kvm or tcg")
    match = re.fullmatch(r"(\d+)([MG])", memory)
    if not match:
        raise UsageError("Bad --memory", f"'{memory}' is not a size", "write it as QEMU does: 2G or 2048M")
    megabytes = int(match[1]) * (1024 if match[2] == "G" else 1)
    if megabytes < size + 512:
        raise UsageError(
            "The job does not fit",
            f"{size} MB in a guest of {megabytes} MB leaves less than 512 MB for the rest",
            "give the guest more with --memory, or take a smaller --size",
        )
    return BenchOptions(pairs=pairs, size_mb=size, memory=memory, accel=known[accel], base=base, ours=ours)


def output_folder(given: Path | None, name: str) -> Path:
    """Where a run goes: ``given``, or a new folder for it. UsageError, and before it is measured, for what cannot be one."""
    if given is None:
        return folder_for(name)
    nearest = next(path for path in (given.absolute(), *given.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        why = "cannot be written to" if nearest.is_dir() else "is no folder"
        raise UsageError(
            "Bad --output", f"{nearest} {why}", "name a folder of yours, or one that can be made"
        )
    return given


def folder_for(name: str) -> Path:
    """A new folder for a run, named by the time."""
    parent = paths.out() / name
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = parent / stamp
    return folder if not folder.exists() else parent / f"{stamp}-{os.getpid()}"


def table(result: Result) -> Table:
    """The comparison as a table."""
    shown = Table(
        title=f"{result.name}: {result.sides[0]} and {result.sides[1]} side by side, accelerator {result.accelerator}",
        caption="median, and in brackets the 10th to 90th percentile; p of a test of significance, of each row by itself",
        caption_justify="left",
    )
    shown.add_column("metric", overflow="fold")
    for name in result.sides:
        shown.add_column(name, justify="right")
    shown.add_column("change", justify="right")
    shown.add_column("meant to show")
    for metric in result.metrics:
        cells = [
            f"{human(side.median, metric.unit)}\n"
            f"[dim]({human(side.low, metric.unit)} … {human(side.high, metric.unit)})[/dim]"
            for side in (metric.base, metric.ours)
        ]
        target = ""
        if metric.target:
            mark, style = ("yes", "green") if metric.target.met else ("NO", "bold red")
            target = f"[{style}]{mark}[/{style}]: {escape(metric.target.text)}"
        told = f"\n[dim]{metric.significance.told()}[/dim]" if metric.significance else ""
        shown.add_row(metric.name, *cells, percent(metric.change_percent) + told, target)
    return shown


def show(result: Result, folder: Path, as_json: bool) -> None:
    """Print a result and where it is kept; the last line of stdout is the folder."""
    if as_json:
        sys.stdout.write(result.to_json())
        return
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(table(result))
    for text in result.notes:
        console.print(f"[dim]{escape(text)}[/dim]", soft_wrap=True)
    console.print(f"Again: {result.reproduce}", markup=False)
    print(folder)


def keep(result: Result, folder: Path, found: Evidence) -> None:
    """Write result.json, the reports, and what the guests left."""
    from lab.report.page import write_reports

    found.publish(folder)
    result.save(folder)
    write_reports([result], folder)
    note(f"wrote {folder / FILE_NAME} and {folder / 'report.html'}")


def check_targets(results: Sequence[Result], folder: Path) -> None:
    """TestFailure that names each target which these results miss; ``folder`` has their report."""
    missed = [
        f"{result.name}: {metric.name} is meant to show: {metric.target.text}; "
        f"{result.sides[0]} {human(metric.base.median, metric.unit)}, "
        f"{result.sides[1]} {human(metric.ours.median, metric.unit)}"
        for result in results
        for metric in result.metrics
        if metric.target and not metric.target.met
    ]
    if missed:
        raise TestFailure(
            f"{len(missed)} target{'s are' if len(missed) > 1 else ' is'} missed",
            "\n".join(missed),
            f"see {folder / 'report.html'}; on a busy machine, measure again with more --pairs",
        )


def run_all(options: BenchOptions, parent: Path, as_json: bool, strict: bool = False) -> None:
    """Every bench once, each in a folder of its own under ``parent``, and one report of all of them.

    A bench that fails leaves ``results.ERROR_NAME`` in its folder and does not stop the others; the first such
    error is raised in the end. If there is none, and ``strict``, TestFailure when a target is missed.
    """
    # thp contains some of the others: they are measured again, by themselves.
    results: list[Result] = []
    failed: list[LabError] = []
    for one in BENCHES.values():
        with evidence.collecting() as found:
            try:
                result = one.run(options)
                keep(result, parent / one.name, found)
            except (LabError, OSError) as caught:
                error = (
                    caught if isinstance(caught, LabError) else from_oserror(caught, "cannot keep the result")
                )
                note(f"{one.name}: {error.what}: {error.why}")
                with contextlib.suppress(OSError):  # the disk may be why
                    save_error(error, parent / one.name)
                failed.append(error)
                continue
        if not as_json:
            show(result, parent / one.name, as_json)
        results.append(result)
    if results:
        from lab.report.page import write_reports

        write_reports(results, parent)
        note(f"wrote {parent / 'report.html'}, all {len(results)} results on one page")
        if not as_json:
            print(parent)
    if as_json:
        print(json.dumps([json.loads(result.to_json()) for result in results], indent=2))
    if failed:
        raise failed[0]
    if strict:
        check_targets(results, parent)


@app.command("demo")
def demo(
    pairs: Pairs = 10,
    size: Size = 256,
    memory: Memory = "2G",
    accel: AccelOption = "auto",
    base: BaseKernel = "base",
    ours: OursKernel = "knownzero",
    output: Output = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Do the main job end to end: fetch, build, boot base and ours side by side, measure, report.

    A target that is missed is marked NO and does not change the exit code, unless --strict is given.
    """
    options = checked(pairs, size, memory, accel, base, ours)
    folder = output_folder(output, "demo")
    with evidence.collecting() as found:
        result = BENCHES["thp"].run(options)
        result.name = "demo"
        result.reproduce = result.reproduce.replace("./kz bench thp", "./kz demo", 1)
        keep(result, folder, found)
    show(result, folder, as_json)
    if strict:
        check_targets([result], folder)


@app.command("bench")
def bench(
    name: Annotated[
        str,
        one_of("bench", (*BENCHES, "all"), "; ".join(f"{b.name}: {b.sentence}" for b in BENCHES.values())),
    ],
    pairs: Pairs = 10,
    size: Size = 256,
    memory: Memory = "2G",
    accel: AccelOption = "auto",
    base: BaseKernel = "base",
    ours: OursKernel = "knownzero",
    output: Output = None,
    strict: Strict = False,
    as_json: AsJson = False,
) -> None:
    """Measure base and ours side by side; writes out/NAME/TIME/result.json and report.html.

    A target that is missed is marked NO and does not change the exit code, unless --strict is given.
    """
    options = checked(pairs, size, memory, accel, base, ours)
    folder = output_folder(output, name)
    if name == "all":
        run_all(options, folder, as_json, strict)
        return
    with evidence.collecting() as found:
        result = BENCHES[name].run(options)
        keep(result, folder, found)
    show(result, folder, as_json)
    if strict:
        check_targets([result], folder)
