# SPDX-License-Identifier: GPL-2.0
"""Options and arguments that several verbs have."""

import difflib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from lab.core.errors import UsageError, full_disk

Several = list[str] | None

OlderLinux = Annotated[
    str, Option("--linux", help="Another Linux in linux/base.toml (6.12), with linux/lts.")
]


def one_of(kind: str, names: Sequence[str], help_text: str = "") -> Any:
    """An argument with one of these names; an unknown one is an error."""

    def check(given: str) -> str:
        if given not in names:
            near = difflib.get_close_matches(given, names) or list(names)
            raise UsageError(
                f"Bad {kind}: {given}", f"no {kind} has this name", f"use {', '.join(near)}"
            )
        return given

    return Argument(help=help_text or f"{', '.join(names[:-1])} or {names[-1]}.", callback=check)


def writable_folder(option: str, folder: Path) -> Path:
    """``folder``; UsageError, which names ``option``, when it cannot be made or written to.

    Makes nothing.
    """
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    fix = "name a folder that you may write, or a new one"
    if not nearest.is_dir():
        raise UsageError(f"Bad {option}: {folder}", f"{nearest} is no folder", fix)
    try:
        tempfile.TemporaryFile(
            dir=nearest
        ).close()  # root may write everywhere, except where it cannot: /proc
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise full_disk(f"Bad {option}: {folder}", f"{nearest}: {error.strerror}") from None
        raise UsageError(
            f"Bad {option}: {folder}", f"{nearest} cannot be written to", fix
        ) from None
    return folder


def writable_file(option: str, file: Path) -> Path:
    """``file``; UsageError, which names ``option``, when it cannot be written. Makes nothing."""
    if file.is_dir():
        raise UsageError(f"Bad {option}: {file}", "it is a folder", "name a file")
    if file.exists() and not os.access(file, os.W_OK):
        raise UsageError(f"Bad {option}: {file}", "it cannot be written to", "name another file")
    try:
        writable_folder(option, file.parent)
    except UsageError as error:
        raise UsageError(
            f"Bad {option}: {file}", error.why, "name a file that you may write"
        ) from None
    return file


Name = Annotated[str, one_of("series", ("linux", "qemu"))]
