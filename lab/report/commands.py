# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz report`` and ``kz compare``."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.core.options import Json, writable_folder

app = typer.Typer()


@app.command("report")
def report(
    runs: Annotated[list[Path], Argument(help="Folders under out/, or their result.json.")],
    output: Annotated[
        Path | None, Option("--output", help="Folder (default: the run's own).")
    ] = None,
) -> None:
    """Write report.html and report.md for one run, or one page for several."""
    from lab.core import paths
    from lab.core.errors import LabError
    from lab.report.page import write_reports
    from lab.report.results import results_of

    if output is not None:
        writable_folder("--output", output)
    results = [result for run in runs for result in results_of(run).values()]
    if output is None:
        first = runs[0] if runs[0].is_dir() else runs[0].parent
        output = (
            first if len(runs) == 1 else paths.out() / "report" / time.strftime("%Y%m%d-%H%M%S")
        )
    try:
        for path in write_reports(results, output):
            print(path)
    except OSError as error:
        why, fix = f"{output}: {error.strerror}", "name another folder with --output"
        raise LabError("Cannot write the report", why, fix) from error


@app.command("compare")
def compare(
    first: Annotated[Path, Argument(help="A run's folder, or its result.json.")],
    second: Annotated[Path, Argument(help="The run to compare it with.")],
    force: Annotated[bool, Option("--force", help="Compare unlike runs.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs metric by metric; refuses unlike ones."""
    from rich.console import Console
    from rich.markdown import Markdown

    from lab.report import compare as comparing

    found = comparing.compare(first, second, force=force)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    # Wide enough for whole names where no terminal limits it.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(Markdown(f"{first} and {second}\n\n{comparing.table(found)}"))
    for words, differs in (
        ("Unlike, and compared all the same", found.reasons),
        ("Not the same", found.versions),
        ("Only in the first", found.only_first),
        ("Only in the second", found.only_second),
    ):
        if differs:
            console.print(f"{words}: {'; '.join(differs)}", markup=False, soft_wrap=True)
