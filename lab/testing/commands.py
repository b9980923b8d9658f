# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz test`` and ``kz night``."""

import re
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.core import errors, lock
from lab.core.errors import UsageError
from lab.core.options import Several, writable_file
from lab.testing.night import NAMES

app = typer.Typer()
night_app = typer.Typer(no_args_is_help=True, help="Nights of several machines.")
app.add_typer(night_app, name="night")


def _seconds(budget: str) -> float:
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", budget)
    hours, minutes, seconds = (int(text or 0) for text in found.groups()) if found else (0, 0, 0)
    total = 3600 * hours + 60 * minutes + seconds
    if budget and not total:
        raise UsageError(
            f"Bad --budget: {budget}", "it is not a duration", "write it as 2h, 90m or 1h30m"
        )
    return total


def _shard(text: str) -> str:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if text and not (found and 1 <= int(found[1]) <= int(found[2])):
        raise UsageError(
            f"Bad --shard: {text}", "it is not K/N with K from 1 to N", "write it as 1/4"
        )
    return text


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
    budget: Annotated[str, Option(metavar="TIME", help="Stop a night after this time (2h).")] = "",
    shard: Annotated[str, Option(metavar="K/N", help="Only part K of N of a night.")] = "",
    report: Annotated[bool, Option("--report", help="Only print the last night's report.")] = False,
) -> None:
    """Build what the tests need, and run all except the nightly ones.

    Skipped tests are listed with reasons.

    A night also runs every bench and builds both series after each patch. It resumes a stopped
    night.
    """
    from lab.testing import night, night_run, suite

    for option, wrong in (("--quick", quick), ("--junit", junit)):
        if nightly and wrong:
            raise UsageError(
                f"Bad {option}", "each stage of a night is a run of its own", "leave it out"
            )
    for option, given in (
        ("--stage", stage),
        ("--budget", budget),
        ("--shard", shard),
        ("--report", report),
    ):
        if given and not nightly:
            raise UsageError(f"Bad {option}", "it belongs to a night", "add --nightly")
    if report:
        if (last := next(night.all_nights(), None)) is None:
            raise UsageError(
                "Bad --report", f"{night.root()} has no night", "run kz test --nightly first"
            )
        print(night.text(last))
        raise typer.Exit(last.exit_code())
    if nightly:
        settings = pytest_options or [], _seconds(budget), _shard(shard)
        with lock.locked(f"night-{night.root()}"):
            raise typer.Exit(night_run.main(stage or [], select, *settings))
    if junit:
        writable_file("--junit", junit)
    raise typer.Exit(suite.run_tests(select, junit, quick, pytest_options or []))


@night_app.command("merge")
def merge(
    folders: Annotated[
        list[Path], Argument(metavar="DIR...", help="Folders of out/night, one a shard.")
    ],
) -> None:
    """Merge the shards that several machines ran (kz test --nightly --shard K/N)."""
    from lab.testing import night

    merged = night.merge(folders)
    print(night.text(merged))
    raise typer.Exit(merged.exit_code() or errors.OK)
