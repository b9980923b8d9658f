# SPDX-License-Identifier: GPL-2.0
"""The verb ``kz test``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.core import lock
from lab.core.errors import UsageError
from lab.core.options import Several, writable_file
from lab.testing.night import NAMES

app = typer.Typer()


@app.command()
def test(
    pytest_options: Annotated[
        Several, Argument(metavar="[-- PYTEST...]", help="For pytest.")
    ] = None,
    select: Annotated[
        str, Option(metavar="EXPR", help="Only tests whose name matches (pytest -k).")
    ] = "",
    junit: Annotated[
        Path | None, Option(metavar="FILE", help="Write the results as JUnit XML.")
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Only tests without guests and builds.")] = False,
    nightly: Annotated[
        bool, Option("--nightly", help="All tests and benches; see out/night.")
    ] = False,
    stage: Annotated[
        Several,
        Option(metavar="NAME", help=f"Only this stage of a night; repeatable: {', '.join(NAMES)}."),
    ] = None,
) -> None:
    """Skipped tests are listed with reasons.

    A night also runs every bench and builds both series after each patch. It goes on with a
    stopped night of the same code.
    """
    from lab.testing import night, suite

    for option, wrong in (("--quick", quick), ("--junit", junit)):
        if nightly and wrong:
            raise UsageError(
                f"Bad {option}", "each stage of a night is a run of its own", "leave it out"
            )
    if stage and not nightly:
        raise UsageError("Bad --stage", "it belongs to a night", "add --nightly")
    if nightly:
        with lock.locked(f"night-{night.root()}"):
            raise typer.Exit(night.main(stage or [], select, pytest_options or []))
    if junit:
        writable_file("--junit", junit)
    raise typer.Exit(suite.run_tests(select, junit, quick, pytest_options or []))
