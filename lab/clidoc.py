# SPDX-License-Identifier: GPL-2.0
"""docs/reference/cli.md, from the definition of the command line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from lab.core import lock
from lab.core.paths import REPO

PAGE = REPO / "docs" / "reference" / "cli.md"
HEAD = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `./kz reference`; a test compares. -->
# kz

"""


# What stands for the value of an option.
WORDS = {int: "N", float: "N", Path: "PATH"}


def verbs(command: Any, words: tuple[str, ...] = ("kz",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every verb that does something, with its words."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name in inner:
        if inner[name].hidden:
            continue
        yield from verbs(inner[name], (*words, name))


def page(top: Any) -> str:
    """The text of the page."""
    parts = [HEAD, _plain(top.help), "\n\n", _plain(top.epilog), "\n"]
    for words, command in sorted(verbs(top)):
        parts.append(f"\n## {' '.join(words)}\n\n{_plain(command.help)}\n\n    {_usage(words, command)}\n")
        rows = [row for parameter in command.params if (row := _row(parameter))]
        if rows:
            parts.append("\n| | default | |\n|---|---|---|\n" + "".join(rows))
    return "".join(parts)


def _plain(text: str | None) -> str:
    return inspect.cleandoc(text or "")


def _inner(kind: Any) -> Any:
    """The type of one value: of ``list[X]`` and ``X | None``, X."""
    inner = [one for one in get_args(kind) if one is not type(None)]
    return _inner(inner[0]) if inner else kind


def _argument(parameter: Any) -> str:
    name: str = parameter.metavar or parameter.name.upper() + ("..." if parameter.nargs == -1 else "")
    return name


def _usage(words: tuple[str, ...], command: Any) -> str:
    arguments = [_argument(p) for p in command.params if p.param_type_name == "argument"]
    options = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in command.params) else []
    return " ".join([*words, *options, *arguments])


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{_argument(parameter)}`"
        default = ""
    else:
        kind = parameter.type_descriptor.annotation
        flag = kind is bool
        value = "" if flag else f" {parameter.metavar or WORDS.get(_inner(kind), 'TEXT')}"
        name = f"`{parameter.opts[0]}{value}`"
        shown = parameter.default
        default = "" if flag or shown in (None, "") or callable(shown) else f"`{shown}`"
    text = re.sub(r"\s+", " ", _plain(getattr(parameter, "help", ""))).replace("|", "\\|")
    return f"| {name.replace('|', '')} | {default} | {text} |\n"


def write(top: Any) -> None:
    """Write the page anew, if it has changed."""
    lock.write_if_changed(PAGE, page(top).encode())
