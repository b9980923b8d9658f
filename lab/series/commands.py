# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz tree``, ``kz series save`` and ``kz series rebase``."""

import json
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from lab.core.options import Json, Name, Parts

app = typer.Typer()
HELP = "Save, check, rebase and export the parts of linux or qemu."
series_app = typer.Typer(no_args_is_help=True, help=HELP)
app.add_typer(series_app, name="series")


@app.command()
def tree(
    name: Name,
    path: Annotated[Path | None, Option(help="Where (default: in the cache).")] = None,
    chosen: Annotated[str, Parts] = "",
    force: Annotated[bool, Option("--force", help="Replace commits that are not saved.")] = False,
    as_json: Json = False,
) -> None:
    """Make or update a git tree with the series as commits; its path is the last line.

    Tag base is the unpatched source, branch part/NAME the last commit of a part. Work there with
    git (git rebase -i base carries the branches along), then write it back with kz series save.
    """
    from lab.series import parts
    from lab.series import tree as trees

    made = trees.make(name, path, force, parts.split(chosen))
    print(json.dumps({"path": str(made)}) if as_json else made)


@series_app.command("save")
def series_save(
    name: Name,
    path: Annotated[Path | None, Option(help="The git tree (default: that of kz tree).")] = None,
    as_json: Json = False,
) -> None:
    """Write a tree's commits back into parts/NAME."""
    from lab.series import parts, tree

    changed = tree.save(parts.get(name), (path or tree.default_path(name)).absolute())
    if as_json:
        print(json.dumps({"changed": changed}))
    else:
        print("\n".join(f"{name}/{item}" for item in changed) if changed else "nothing changed")


@series_app.command("rebase")
def series_rebase(
    name: Name,
    source: Annotated[str, Argument(help="newest, 7.3.y, 7.4-rc1, a source tree or a tarball.")],
    path: Annotated[Path, Option(help="The new tree.")],
    chosen: Annotated[str, Parts] = "",
) -> None:
    """Make a git tree of another source and apply the parts with git am -3; stops at a conflict."""
    from lab.series import against, parts, tree

    print(tree.rebase(name, against.as_source(name, source), path.absolute(), parts.split(chosen)))
