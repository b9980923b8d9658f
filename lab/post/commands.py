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
    part: Annotated[str, typer.Argument(help="A part, e.g. zeroed; qemu/NAME for a part of QEMU.")],
    directory: Annotated[Path, typer.Argument(help="Where the mails go (made when missing).")],
    strict: Annotated[
        bool, typer.Option("--check", help="Write nothing if an identity, a figure or a check is missing.")
    ] = False,
    since: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An earlier export: the letter gets a range-diff.")
    ] = None,
    base_commit: Annotated[
        str, typer.Option(metavar="HASH", help="The commit of the base in your reader's git.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write a part as mails for git send-email, and the file recipients. Nothing is sent.

    Name, address and sign-off come from git's configuration, figures from docs/results.
    """
    from lab.core import progress
    from lab.post import export

    project, _, name = part.rpartition("/")
    made = export.export(
        project or "linux", name, directory, strict=strict, since=since, base_commit=base_commit
    )
    if as_json:
        problems = [vars(problem) for problem in made.problems]
        print(json.dumps({"files": [str(mail) for mail in made.mails], "problems": problems}))
        return
    print("\n".join(str(mail) for mail in made.mails))
    for problem in made.problems:
        progress.note(f"{problem.check}: {problem.where}: {problem.text}")


@series_app.command("check")
def series_check(
    name: Name,
    each: Annotated[
        bool,
        typer.Option(
            "--each",
            help="Also build after every patch, with the feature on and off, x86_64 and um: the code that the patches "
            "change. Takes hours; steps that passed are not built again.",
        ),
    ] = False,
    whole: Annotated[bool, typer.Option("--whole", help="With --each: build all of the kernel.")] = False,
    first: Annotated[
        str, typer.Option("--from", metavar="PART/NNNN", help="With --each: begin with this patch.")
    ] = "",
    against: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Instead, a table of the parts on another source: newest (of the machine's Debian mirror), all (its newest "
            "of each series), 7.3.y, a version, a source tree or a tarball. The exit code is 0 whatever it finds.",
        ),
    ] = "",
    sizes: Annotated[bool, typer.Option("--sizes", help="Instead, print sizes and their limits.")] = False,
    as_json: Json = False,
) -> None:
    """Check that each part applies, alone and with the others, passes checkpatch, keeps its limits and saves unchanged."""
    from lab.post import check

    if against:
        if each or whole or first:
            raise errors.UsageError(
                "Bad --against", "it builds nothing, --each does", "run one, then the other"
            )
        from lab.series import against as others

        reports = others.against(name, against)
        print(json.dumps([one.data() for one in reports]) if as_json else "\n".join(others.lines(reports)))
        return
    if sizes:
        for what, size, most in check.sizes(name):
            print(f"{size:6} of {most:6}  {what}")
        return
    if (whole or first) and not each:
        raise errors.UsageError("Bad --whole or --from", "they need --each", "add --each")
    problems = check.check(name, each, whole, first)
    if as_json:
        print(json.dumps({"name": name, "problems": [vars(p) for p in problems]}))
    else:
        for problem in problems:
            print(f"{problem.check}: {problem.where}: {problem.text}")
        print(f"{name}: {len(problems)} problems" if problems else f"{name}: all checks pass")
    raise typer.Exit(errors.FAILED if problems else errors.OK)
