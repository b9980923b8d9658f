# SPDX-License-Identifier: GPL-2.0
"""Run the kernel's own unit tests.

The kernel's own parser reads their results (KTAP) from the console.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.boot import guest
from lab.boot.spec import BootSpec
from lab.core.errors import TestFailure
from lab.machine import fetch

STATES = {
    "SUCCESS": "passed",
    "SKIPPED": "skipped",
    "NO_TESTS": "skipped",
}  # all others have failed

STAMP = re.compile(r"^(?:<\d+>)?\[\s*\d+\.\d+\](?:\[[^]]*\])? ?")


@dataclass(frozen=True)
class Case:
    """One test: ``state`` is passed, failed or skipped; ``text`` is its output."""

    name: str
    state: str
    text: str = ""


@functools.cache
def _parser() -> tuple[Any, Any]:
    """tools/testing/kunit of the kernel's source: its parser, and a printer that prints nothing."""
    folder = fetch.pristine(fetch.obtain("linux")) / "tools" / "testing" / "kunit"
    sys.path.append(str(folder))
    try:
        parser, printer = (
            importlib.import_module(name) for name in ("kunit_parser", "kunit_printer")
        )
    finally:
        sys.path.remove(str(folder))
    return parser, printer.Printer(print=False)


def parse(text: str) -> list[Case]:
    """The tests of a console log; a test that never ended has failed."""
    parser, printer = _parser()
    lines = [STAMP.sub("", line) for line in text.splitlines()]
    return list(_cases(parser.parse_run_tests(lines, printer).subtests, ""))


def _cases(tests: Iterable[Any], path: str) -> Iterator[Case]:
    for test in tests:
        name = path + (test.name or "(unfinished)")
        case = Case(name, STATES.get(test.status.name, "failed"), "\n".join(test.log))
        inner = list(_cases(test.subtests, f"{name}."))
        yield from inner
        if not inner or (case.state == "failed" and all(one.state != "failed" for one in inner)):
            yield case


def run(
    arch: str,
    glob: str,
    kernel: str | Path = "debug",
    timeout: float = 240,
    mte: bool = False,
    taints: str = "",
) -> list[Case]:
    """Boot a kernel and run its built-in tests whose suite matches ``glob``.

    ``mte``: with memory tags.

    ``taints``: a parameter that asks for a test that taints the kernel.

    Raises TestFailure when there were none, and the errors of ``boot``.

    """
    append = f"kunit.enable=1 kunit.autorun=1 kunit.filter_glob={glob} {taints}".rstrip()
    # A pool of hugetlb folios grows by 1100 folios of 2 MiB.
    memory = "256M" if arch == "um" else "3G"
    spec = BootSpec(
        kernel=kernel,
        arch=arch,
        memory=memory,
        append=append,
        timeout=timeout,
        mte=mte,
        allow_warnings=bool(taints),
    )
    result = guest.boot(spec)
    cases = parse(result.console.read_text(errors="replace"))
    if not cases:
        raise TestFailure(
            f"no unit test called {glob} ran ({arch})",
            f"the console has no KTAP result (console: {result.console})",
            "check that the kernel has CONFIG_KUNIT and the tests built in",
        )
    return cases
