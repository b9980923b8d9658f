# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz series export`` and ``kz series check``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.core import errors
from lab.core.options import Json, Name
from lab.series.commands import series_app

app = typer.Typer()


@series_app.command("export")
def series_export(
    name: Name,
    directory: Annotated[Path, typer.Argument(help="Where the mails go (made when missing).")],
    figures: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            help="A run whose figures the cover letter gets: a folder under out/. Repeatable. Default: the newest "
            "`kz bench all`, or else `kz demo`, of this very series.",
        ),
    ] = None,
    ready: Annotated[
        bool,
        typer.Option(
            "--ready",
            help="Also run checkpatch on the mails, rehearse sending them (git send-email --dry-run), and print whom "
            "MAINTAINERS names. Takes a minute or two.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the series as mails for a list: a cover letter, and new files in the patch that first uses them.

    The letter's figures come from runs; what nobody measured is a marked gap. Nothing is sent.
    """
    from lab.core import progress
    from lab.post import export

    made = export.export(name, directory, figures or [], ready)
    if as_json:
        print(
            json.dumps(
                {
                    "files": [str(p) for p in made.mails], "runs": [str(p) for p in made.letter.runs], "gaps": made.letter.gaps,
                    "stale": made.letter.stale, "problems": [vars(p) for p in made.problems], "recipients": made.recipients,
                }
            )
        )  # fmt: skip
        return
    print("\n".join(str(p) for p in made.mails))
    if made.recipients:
        print("\nTo and Cc, as MAINTAINERS has them:\n" + "\n".join(made.recipients))
    for remark in export.remarks(made, name):
        progress.note(remark)
    for problem in made.problems:
        progress.note(f"{problem.check}: {problem.where}: {problem.text}")


@series_app.command("check")
def series_check(
    name: Name,
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Also build after every patch, with the feature on and off, x86_64 and um: what the series "
            "touches. Takes hours; what has passed is remembered.",
        ),
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --each: all of the kernel (takes a night).")
    ] = False,
    first: Annotated[
        int, typer.Option("--from", metavar="NUMBER", min=0, help="With --each: begin with this patch.")
    ] = 0,
    against: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Instead, report what becomes of each patch on another source: newest (that the machine's Debian mirror "
            "has), 7.3.y, a version such as 7.4-rc1, or a source tree or tarball. The exit code is 0 whatever it finds.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check that the series applies with no fuzz, is clean to checkpatch, and survives saving."""
    from lab.post import check

    if against:
        if each or whole or first:
            raise errors.UsageError(
                "Bad --against", "it builds nothing, so it does not go with --each", "run one, then the other"
            )
        from lab.series import against as others

        report = others.against(name, against)
        print(others.to_json(report) if as_json else "\n".join(others.lines(report)))
        return

    if (whole or first) and not each:
        raise errors.UsageError("Bad --whole or --from", "they say what --each builds", "add --each")
    problems = check.check(name, each, whole, first)
    if as_json:
        print(json.dumps({"name": name, "problems": [vars(p) for p in problems]}))
    else:
        for problem in problems:
            print(f"{problem.check}: {problem.where}: {problem.text}")
        print(f"{name}: {len(problems)} problems" if problems else f"{name}: in order")
    raise typer.Exit(errors.FAILED if problems else errors.OK)
