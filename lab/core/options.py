# SPDX-License-Identifier: GPL-2.0
"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

Parts = typer.Option(
    "--parts",
    metavar="NAME,…",
    help="Only these parts of the series and the parts they stand on (default: all).",
)
