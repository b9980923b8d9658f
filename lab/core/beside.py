# SPDX-License-Identifier: GPL-2.0
"""Builds and downloads side by side, each in a process of its own."""

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lab.core.errors import LabError


class Tasks:
    """Tasks that run."""

    def __init__(self) -> None:
        self._running: dict[Any, BaseProcess] = {}  # by the end of a pipe, which gets the result

    def start(self, tasks: Mapping[str, Callable[[], object]]) -> None:
        fork = multiprocessing.get_context("fork")
        for name, task in tasks.items():
            ours, theirs = fork.Pipe(duplex=False)
            self._running[ours] = fork.Process(target=_do, args=(task, theirs), name=name)
            self._running[ours].start()
            theirs.close()

    def wait(self) -> None:
        """Wait for all of them; the first error is raised."""
        while self._running:
            ready: Any = wait(list(self._running))[0]
            process = self._running.pop(ready)
            try:
                error = ready.recv()
            except EOFError:
                process.join()
                why = f"its process ended with {process.exitcode}"
                error = LabError(f"{process.name} fails", why, "run it again")
            process.join()
            if error:
                raise error

    def end(self) -> None:
        """End what still runs, with the compilers that it has started."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join()


@contextlib.contextmanager
def running() -> Iterator[Tasks]:
    """Tasks that are started inside, and are done afterwards, or ended if one fails."""
    tasks = Tasks()
    try:
        yield tasks
        tasks.wait()
    finally:
        tasks.end()


def _do(task: Callable[[], object], result: Connection) -> None:
    """Send the error of a task, or None; SIGTERM ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        task()
        result.send(None)
    except Exception as error:
        result.send(error)
