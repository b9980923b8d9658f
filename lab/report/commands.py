# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz report`` and ``kz compare``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from lab.report.compare import Comparison

app = typer.Typer()


@app.command("report")
def report(
    runs: Annotated[list[Path], Argument(help="Folders under out/, or their result.json.")],
) -> None:
    """The page is in the folder of the run; of several runs, in a new folder under out/report."""
    from lab.core import paths
    from lab.report.page import write_report
    from lab.report.results import results_of

    results = [result for run in runs for result in results_of(run).values()]
    folder = runs[0] if runs[0].is_dir() else runs[0].parent
    if len(runs) > 1:
        folder = paths.out() / "report" / time.strftime("%Y%m%d-%H%M%S")
    print(write_report(results, folder))


@app.command("compare")
def compare(
    first: Annotated[
        Path, Argument(help="A run's folder, its result.json, or an archive of `kz evidence`.")
    ],
    second: Annotated[
        Path | None,
        Argument(help="The run to compare it with. For an archive: none, the published ones."),
    ] = None,
    force: Annotated[bool, Option("--force", help="Compare unlike runs.")] = False,
) -> None:
    """The results of an archive are those of another machine: each is set beside the published run
    that has the same figures, and what is unlike is named.
    """
    from lab.core.errors import UsageError
    from lab.report import archive
    from lab.report import compare as comparing
    from lab.report.publish import FOLDER
    from lab.report.results import results_of

    with archive.opened(first) as place:
        if place == first:
            if second is None:
                fix = f"kz compare {first} RUN"
                raise UsageError("Cannot compare", "only one run is named", fix)
            pairs = {str(first): comparing.compare(first, second, force=force)}
        else:
            if second is not None:
                why = "each result of an archive is set beside the published run of its bench"
                raise UsageError(f"Cannot compare {first} with {second}", why, "leave out the run")
            pairs = {
                run.name: comparing.compare(
                    comparing.published_beside(run, FOLDER), run, force=True
                )
                for run in results_of(place)
            }
    for name, one in pairs.items():
        _print(f"{name} and {second}" if second else f"published, and {name} of {first}", one)


def _print(title: str, found: "Comparison") -> None:
    from lab.report.compare import CAPTION, table

    print("\n".join([title, *table(found).text(), CAPTION]))
    for words, differs in (
        ("Unlike, and compared all the same", found.reasons),
        ("Not the same", found.versions),
        ("Only in the first", found.only_first),
        ("Only in the second", found.only_second),
    ):
        if differs:
            print(f"{words}: {'; '.join(differs)}")
