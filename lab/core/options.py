# SPDX-License-Identifier: GPL-2.0
"""Options and arguments that several verbs have."""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from typer import Argument, Option

from lab.core.errors import UsageError

Several = list[str] | None
Json = Annotated[bool, Option("--json", help="Print JSON.")]

Parts = Option("--parts", metavar="NAME,…", help="Only these parts and what they need.")


def one_of(kind: str, names: Sequence[str], help_text: str = "") -> Any:
    """An argument with one of these names; an unknown one is an error."""

    def check(given: str) -> str:
        if given not in names:
            near = difflib.get_close_matches(given, names) or list(names)
            raise UsageError(f"Bad {kind}: {given}", f"no {kind} has this name", f"use {', '.join(near)}")
        return given

    return Argument(help=help_text or f"{', '.join(names[:-1])} or {names[-1]}.", callback=check)


Name = Annotated[str, one_of("series", ("linux", "qemu"))]


def unpacked(verb: Callable[..., None]) -> Callable[..., None]:
    """Make an option of each field of a verb's parameter that is a dataclass."""
    own = inspect.signature(verb)
    whole = next(one for one in own.parameters.values() if dataclasses.is_dataclass(one.annotation))
    fields = {
        one.name: whole.replace(name=one.name, annotation=one.type, default=one.default)
        for one in dataclasses.fields(whole.annotation)
    }

    @functools.wraps(verb)
    def call(**given: Any) -> None:
        verb(**{whole.name: whole.annotation(**{name: given.pop(name) for name in fields})}, **given)

    rest = [one for one in own.parameters.values() if one is not whole]
    firsts = [one for one in rest if one.default is one.empty]
    others = [one for one in rest if one.default is not one.empty]
    parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in (*firsts, *fields.values(), *others)]
    call.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    return call
