# SPDX-License-Identifier: GPL-2.0
"""docs/reference/cli.md, from the definition of the command line, as typer describes it."""

import re
from typing import Any

from typer import Context
from typer.cli import get_docs_for_click

from lab.core import lock
from lab.core.paths import REPO

PAGE = REPO / "docs" / "reference" / "cli.md"
HEAD = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `./kz reference`; a test compares. -->
"""
LEFT_OUT = (
    r"^## `kz reference`(?s:.*?)(?=^##)",
    r"^\* `(?:-h, )?--help`: .*\n",
    r"^\*\*Commands\*\*:\n\n(?:\* .*\n)+\n",  # each has its own section
    r"^\*\*(?:Usage|Arguments|Options)\*\*:\n\n",
    r"^```console\n\$ .*\[OPTIONS\](?: COMMAND \[ARGS\]\.\.\.)?\n```\n\n",  # no arguments
    r"  \[required\]",
    r" <[^>`]*>(?=`:)",  # types: the words say them
)


def page(top: Any) -> str:
    text = get_docs_for_click(obj=top, ctx=Context(top), name="kz")
    for words in LEFT_OUT:
        text = re.sub(words, "", text, flags=re.MULTILINE)
    text = re.sub(r"```console\n\$ (.*) \[OPTIONS\](.*)\n```", r"    \1\2", text)
    return HEAD + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def write(top: Any) -> None:
    lock.write_if_changed(PAGE, page(top).encode())
