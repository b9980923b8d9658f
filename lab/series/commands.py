# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz tree`` and ``kz series``."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.core import errors
from lab.core.options import Name, OlderLinux, Several

app = typer.Typer()
series_app = typer.Typer(no_args_is_help=True)
app.add_typer(series_app, name="series")
AGAINST = "Only a table of what applies to newest, all, a version, tree or tarball."
EACH = "Also build after each patch, on and off, x86_64 and um. Takes hours."


@app.command()
def tree(
    name: Name,
    path: Annotated[Path | None, Option(help="Where (default: in the cache).")] = None,
    older: OlderLinux = "",
    force: Annotated[bool, Option("--force", help="Replace commits that are not saved.")] = False,
) -> None:
    """Tag base is the unpatched source, branch part/NAME the last commit of a part. Work there with
    git (git rebase -i base carries the branches along), then write it back with kz series save.
    """
    from lab.machine import fetch
    from lab.series import tree as trees

    if older:
        fetch.use(name, older)
    print(trees.make(name, path, force))


@series_app.command("save")
def series_save(
    name: Name,
    path: Annotated[Path | None, Option(help="The git tree (default: that of kz tree).")] = None,
    older: OlderLinux = "",
) -> None:
    """Write a tree's commits back into parts/NAME."""
    from lab.machine import fetch
    from lab.patches import parts
    from lab.series import tree

    if older:
        fetch.use(name, older)
    changed = tree.save(parts.get(name), (path or tree.default_path(name)).absolute())
    print("\n".join(f"{name}/{item}" for item in changed) if changed else "nothing changed")


@series_app.command("bugs")
def series_bugs(
    names: Annotated[
        Several, Argument(metavar="NAME", help="fixes-mm, or fixes-mm/0001; by default all.")
    ] = None,
) -> None:
    """Run the reproducer of each bug that a part fixes-* fixes. It must fail without the fix, on
    the base kernel, and pass with all fixes.

    linux/bugs.toml lists the reproducers. Two kernels with the debug options are built. Where the
    reproducer is a userspace test of a later series, the fix is taken out of that series instead.
    The tables for the cover letters are printed, and written to out/bugs. Exit 1: a reproducer
    passes without the fix, or fails with it. Takes eight minutes, without the builds.
    """
    from lab.core import paths
    from lab.series import bugs

    rows = bugs.bugs(names or [])
    for part in dict.fromkeys(row.bug.part for row in rows):
        shown = bugs.written(part).relative_to(paths.REPO)
        print("\n".join([f"{part} ({shown})", *bugs.table(rows, part), ""]))
    raise typer.Exit(errors.OK if all(row.holds for row in rows) else errors.FAILED)


@series_app.command("export")
def series_export(
    part: Annotated[str, Argument(help="A part, such as zeroed; qemu/NAME for a part of QEMU.")],
    directory: Annotated[Path, Argument(help="Where the mails go.")],
    strict: Annotated[
        bool, Option("--check", help="Write nothing if anything is missing.")
    ] = False,
    since: Annotated[
        Path | None, Option(metavar="DIR", help="An earlier export, for a range-diff.")
    ] = None,
    base_commit: Annotated[str, Option(metavar="HASH", help="The base in your reader's git.")] = "",
) -> None:
    """Write a part as mails for git send-email, and the file recipients. Nothing is sent.

    Name, address and sign-off come from git's configuration, figures from docs/results.
    """
    from lab.core import progress
    from lab.series import export

    project, _, name = part.rpartition("/")
    made = export.export(
        project or "linux", name, directory, strict=strict, since=since, base_commit=base_commit
    )
    print("\n".join(str(mail) for mail in made.mails))
    for problem in made.problems:
        progress.note(f"{problem.check}: {problem.where}: {problem.text}")


@series_app.command("check")
def series_check(
    name: Name,
    each: Annotated[bool, Option("--each", help=EACH)] = False,
    against: Annotated[str, Option(metavar="SOURCE", help=AGAINST)] = "",
) -> None:
    """Check that each part applies, alone and with the others, passes checkpatch and saves
    unchanged.
    """
    from lab.series import check

    if against:
        if each:
            why, fix = "it builds nothing, --each does", "run one, then the other"
            raise errors.UsageError("Bad --against", why, fix)
        from lab.series import against as others

        print("\n".join(others.lines(others.against(name, against))))
        return
    problems = check.check(name, each)
    for problem in problems:
        print(f"{problem.check}: {problem.where}: {problem.text}")
    print(f"{name}: {len(problems)} problems" if problems else f"{name}: all checks pass")
    raise typer.Exit(errors.FAILED if problems else errors.OK)
