# SPDX-License-Identifier: GPL-2.0
"""The verb ``kz test``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lab.core import errors
from lab.testing import nightly as nights

app = typer.Typer()


@app.command()
def test(
    pytest_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PYTEST...]", help="More options for pytest.")
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="EXPR", help="Run only tests whose name matches (pytest -k).")
    ] = "",
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JUnit XML.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only tests that need neither guests nor builds.")
    ] = False,
    nightly: Annotated[
        bool,
        typer.Option(
            "--nightly", help="What takes hours, with a page about it: out/nightly/TIME/summary.html."
        ),
    ] = False,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=f"With --nightly: only this stage. Repeatable. There are: {', '.join(nights.NAMES)}.",
        ),
    ] = None,
) -> None:
    """Run every test but those that take long; builds what they need first. Skipped tests are listed with reasons.

    A night has all tests, with half an hour for each leak hunt, every bench, and both series built after
    each patch. A stage that fails does not stop the others, and the page is written anew after each.
    """
    if nightly:
        if quick or junit:
            raise errors.UsageError(
                "Bad --quick or --junit", "each stage of a night is a run of its own", "leave it out"
            )
        command = shlex.join(["./kz", *sys.argv[1:]])
        raise typer.Exit(nights.main(stage or [], select, pytest_options or [], command))
    if stage:
        raise errors.UsageError("Bad --stage", "it names a part of a night", "add --nightly")
    from lab.testing import suite as testing

    raise typer.Exit(testing.run_tests(select, junit, quick, pytest_options or []))
