# SPDX-License-Identifier: GPL-2.0
"""The verbs ``kz tree`` and ``kz series save``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.core.options import Json, Name

app = typer.Typer()
series_app = typer.Typer(no_args_is_help=True, help="Save, export and check the series of linux or qemu.")
app.add_typer(series_app, name="series")


@app.command()
def tree(
    name: Name,
    path: Annotated[Path | None, typer.Option(help="Where (default: in the cache).")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Take the series even if the tree has work that is not saved.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make or update a git tree with the series as commits; the last line of stdout is its path.

    The unpatched source has the tag base. Work there with git (rebase -i base), then
    write it back with kz series save. A commit's patch number is in its note:
    git notes --ref=knownzero add -f -m 0101 COMMIT.
    """
    from lab.series import tree as trees

    made = trees.make(name, path, force)
    print(json.dumps({"path": str(made)}) if as_json else made)


@series_app.command("save")
def series_save(
    name: Name,
    path: Annotated[Path | None, typer.Option(help="The git tree (default: the one of kz tree).")] = None,
    as_json: Json = False,
) -> None:
    """Write a tree's commits back into new/ and patches/; a tree as it was made changes nothing."""
    from lab.series import series, tree

    changed = tree.save(series.get(name), (path or tree.default_path(name)).absolute())
    if as_json:
        print(json.dumps({"changed": changed}))
    else:
        print("\n".join(f"{name}/{item}" for item in changed) if changed else "nothing changed")
