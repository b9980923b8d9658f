# SPDX-License-Identifier: GPL-2.0
"""Options and arguments that several verbs have."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from lab.core.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

Parts = typer.Option(
    "--parts",
    metavar="NAME,…",
    help="Only these parts of the series and the parts they stand on (default: all).",
)


def one_of(kind: str, names: Sequence[str], help_text: str = "") -> Any:
    """An argument with one of these names; an unknown one is an error."""

    def check(given: str) -> str:
        if given not in names:
            near = difflib.get_close_matches(given, names) or list(names)
            raise UsageError(f"Bad {kind}: {given}", f"no {kind} has this name", f"use {', '.join(near)}")
        return given

    return typer.Argument(help=help_text or f"{', '.join(names[:-1])} or {names[-1]}.", callback=check)


Name = Annotated[str, one_of("series", ("linux", "qemu"))]
