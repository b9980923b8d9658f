# SPDX-License-Identifier: GPL-2.0
"""docs/reference/cli.md, from the definition of the command line, as typer describes it."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

from typer import Context
from typer.cli import get_docs_for_click

from lab.core import lock
from lab.core.paths import REPO

PAGE = REPO / "docs" / "reference" / "cli.md"
HEAD = """<!-- SPDX-License-Identifier: GPL-2.0 -->
<!-- Written by `./kz reference`; a test compares. -->
"""
# Every verb has --help, most have --json; its own section stands for a verb in a list; usage shows
# the order of arguments.
LEFT_OUT = re.compile(
    r"\* `(?:-h, )?--help`: .*\n|\* `--json`: Print JSON\.\n|\*\*Commands\*\*:\n\n(?:\* "
    r".*\n)+\n|\*\*(?:Usage|Arguments|Options)\*\*:\n\n|  \[required\]"
    r"|```console\n\$ .*\[OPTIONS\](?: COMMAND \[ARGS\]\.\.\.)?\n```\n\n"
)


def verbs(command: Any, words: tuple[str, ...] = ("kz",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    if (inner := getattr(command, "commands", None)) is None:
        yield words, command
        return
    for name in inner:
        if not inner[name].hidden:
            yield from verbs(inner[name], (*words, name))


def page(top: Any) -> str:
    text = LEFT_OUT.sub("", get_docs_for_click(obj=top, ctx=Context(top), name="kz"))
    shown = [
        one for one in re.split(r"(?=^##)", text, flags=re.MULTILINE) if "`kz reference`" not in one
    ]
    seen: dict[str, str] = {}  # runs of options by the section that has them first
    for at, section in enumerate(shown):
        for run in re.findall(r"(?:^\* `--.*\n){5,}", section, re.MULTILINE):
            title = section.splitlines()[0].lstrip("# ")
            for known, first in seen.items():
                pairs = zip(known.splitlines(True), run.splitlines(True), strict=False)
                same = [
                    one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                ]
                if len(same) >= 5:
                    names = [re.findall(r"`--[\w-]+", one)[0] for one in (same[0], same[-1])]
                    shown[at] = section.replace(
                        "".join(same), f"* {'` to '.join(names)}`: as for {first}.\n"
                    )
                    break
            else:
                seen[run] = title
    text = re.sub(r"```console\n\$ (.*) \[OPTIONS\](.*)\n```", r"    \1\2", "".join(shown))
    text = re.sub(
        r"^(\* `[^`]+?) <[^>]*>`", r"\1`", text, flags=re.MULTILINE
    )  # types: the words say them
    return HEAD + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def write(top: Any) -> None:
    lock.write_if_changed(PAGE, page(top).encode())
