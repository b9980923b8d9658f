# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz test`` and ``kz night``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lab.core import errors
from lab.core.errors import UsageError
from lab.testing.night import NAMES

app = typer.Typer()
night_app = typer.Typer(no_args_is_help=True, help="Nights of several machines.")
app.add_typer(night_app, name="night")


def _seconds(budget: str) -> float:
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", budget)
    total = (
        sum(int(text or 0) * unit for text, unit in zip(found.groups(), (3600, 60, 1), strict=True))
        if found
        else 0
    )
    if budget and not total:
        raise UsageError(f"Bad --budget: {budget}", "it is not a duration", "write it as 2h, 90m or 1h30m")
    return total


def _shard(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if text and not (found and 1 <= int(found[1]) <= int(found[2])):
        raise UsageError(f"Bad --shard: {text}", "it is not K/N with K from 1 to N", "write it as 1/4")
    return text


@app.command()
def test(
    pytest_options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PYTEST...]", help="More options for pytest, or tests.")
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
            "--nightly", help="Everything that takes hours; a stopped night goes on. See out/night."
        ),
    ] = False,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help=f"With --nightly: only this stage. Repeatable. One of {', '.join(NAMES)}."
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="With --nightly: stop after this time (2h), least checked stages first."
        ),
    ] = "",
    shard: Annotated[
        str, typer.Option(metavar="K/N", help="With --nightly: only the K-th of N parts; see kz night merge.")
    ] = "",
    report: Annotated[
        bool,
        typer.Option("--report", help="With --nightly: print the report of the last night, and run nothing."),
    ] = False,
) -> None:
    """Run every test but those that take long; builds what they need first. Skipped tests are listed with reasons.

    A night has all tests, with half an hour for each leak hunt, every bench, and both series built after
    each patch. A stage that fails does not stop the others, and the report is written anew after each.
    """
    from lab.testing import night, night_report, night_run, suite

    for option, wrong in (("--quick", quick), ("--junit", junit)):
        if nightly and wrong:
            raise UsageError(f"Bad {option}", "each stage of a night is a run of its own", "leave it out")
    for option, given in (("--stage", stage), ("--budget", budget), ("--shard", shard), ("--report", report)):
        if given and not nightly:
            raise UsageError(f"Bad {option}", "it belongs to a night", "add --nightly")
    if report:
        last = next(night.all_nights(), None)
        if last is None:
            raise UsageError("Bad --report", f"{night.root()} has no night", "run kz test --nightly first")
        print(night_report.text(last))
        raise typer.Exit(last.exit_code())
    if nightly:
        code = night_run.main(stage or [], select, pytest_options or [], _seconds(budget), _shard(shard))
        raise typer.Exit(code)
    raise typer.Exit(suite.run_tests(select, junit, quick, pytest_options or []))


@night_app.command("merge")
def merge(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders under out/night of each shard's machine.")
    ],
) -> None:
    """Make one night of the shards that several machines ran (kz test --nightly --shard K/N)."""
    from lab.testing import night, night_report

    merged = night.merge(folders)
    night_report.write(merged)
    print(night_report.text(merged))
    raise typer.Exit(merged.exit_code() or errors.OK)
