# SPDX-License-Identifier: GPL-2.0
"""Progress on stderr: a live line on a terminal, one plain line per step elsewhere."""

import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_live = 0


@functools.cache
def _terminal() -> "Console | None":
    """The terminal; None without one, and before `kz` has made the environment, which has rich."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(stderr=True, highlight=False)


def duration(seconds: float) -> str:
    """Seconds as people read them: ``7 s``, ``3m12``, ``2h05m``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole} s" if whole < 60 else f"{whole // 60}m{whole % 60:02d}"


def note(text: str) -> None:
    if terminal := _terminal():
        from rich.markup import escape

        terminal.print(f"[dim]kz:[/dim] {escape(text)}")
    else:
        print(f"kz: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(name: str, log: Path | None = None) -> Iterator[None]:
    """Show that ``name`` is being done, how long it has taken, and where its log is."""
    global _live
    began = time.monotonic()
    where = f" (log: {log})" if log else ""
    terminal = _terminal()
    if not terminal or _live or multiprocessing.parent_process():  # others print there as well
        note(f"{name} …{where}")
        yield
        note(f"{name}: done in {duration(time.monotonic() - began)}")
        return
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    _live += 1
    try:
        with Progress(*columns, console=terminal, transient=True) as bar:
            bar.add_task(escape(name + where), total=None)
            yield
    finally:
        _live -= 1
    took = time.monotonic() - began
    if took > 3:
        note(f"{name}: done in {duration(took)}")
