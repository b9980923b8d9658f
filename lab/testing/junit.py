# SPDX-License-Identifier: GPL-2.0
"""How tests went, read from the JUnit XML that pytest writes and tests/conftest.py adds to."""

from __future__ import annotations

import enum
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lab.core.errors import LabError


class State(enum.StrEnum):
    """How a test, or what is made of tests, went. Only ``PASSED`` is good."""

    PASSED = "passed"
    FAILED = "failed"
    BROKEN = "could not run"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Case:
    """One test: ``message`` says why it did not pass, ``detail`` all that pytest printed of it.

    ``told`` are the amounts that it recorded, ``repeats`` the reasons for which it was run again, and
    ``started_again`` the guests that were.
    """

    file: str
    name: str
    state: State
    seconds: float
    message: str = ""
    detail: str = ""
    repeats: tuple[str, ...] = ()
    started_again: tuple[str, ...] = ()
    told: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """What pytest calls it."""
        return f"{self.file}::{self.name}"


def read(file: Path) -> list[Case]:
    """All tests of a file, in its order; LabError when it is missing or no such file."""
    try:
        root = ET.fromstring(file.read_bytes())
    except FileNotFoundError:
        raise LabError(
            "the tests left no results", f"there is no {file}", "read the log: they did not end by themselves"
        ) from None
    except (OSError, ET.ParseError) as error:
        raise LabError(f"cannot read {file}", str(error), "read the log, and run it again") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise LabError(f"cannot read {file}", f"<{root.tag}> is not JUnit's", "name what pytest has written")
    found: dict[tuple[str, str], list[ET.Element]] = {}
    for one in root.iter("testcase"):
        place = one.get("file") or one.get("classname", "").replace(".", "/")
        found.setdefault((place, one.get("name", "")), []).append(one)
    return [_case(place, name, elements) for (place, name), elements in found.items()]


def _properties(element: ET.Element) -> list[tuple[str, str]]:
    return [(one.get("name", ""), one.get("value", "")) for one in element.iter("property")]


def _attempt(element: ET.Element) -> int:
    numbers = [int(value) for name, value in _properties(element) if name == "attempt" and value.isdigit()]
    return max(numbers, default=1)


def _case(place: str, name: str, elements: list[ET.Element]) -> Case:
    """One test out of its attempts. What fails in its body and in its teardown is there twice."""
    last = max(_attempt(element) for element in elements)
    final = [element for element in elements if _attempt(element) == last]
    verdicts = [
        child for element in final for child in element if child.tag in ("failure", "error", "skipped")
    ]
    said = [pair for element in final for pair in _properties(element)]
    bad = [child for child in verdicts if child.tag != "skipped"]
    state = State.PASSED
    if bad:
        state = State.BROKEN if ("broken_machine", "True") in said else State.FAILED
    elif verdicts:
        state = State.SKIPPED
    return Case(
        file=place,
        name=name,
        state=state,
        seconds=sum(float(element.get("time", "0")) for element in elements),
        message="\n".join(_message(child) for child in bad or verdicts),
        detail="\n".join((child.text or "").strip() for child in bad),
        repeats=tuple(_told(element, "went_wrong") for element in elements if _attempt(element) < last),
        started_again=tuple(
            value for element in elements for key, value in _properties(element) if key == "started_again"
        ),
        # A test that was repeated tells the amounts of each attempt: the last ones count.
        told={key: int(value) for key, value in said if key != "attempt" and value.isdigit()},
    )


def _told(element: ET.Element, wanted: str) -> str:
    return "; ".join(value for name, value in _properties(element) if name == wanted) or "no reason is told"


def _message(child: ET.Element) -> str:
    text = child.get("message", "").strip() or (child.text or "").strip() or "nothing is said"
    return f"is expected to fail: {text}" if child.get("type") == "pytest.xfail" else text


def count(cases: Iterable[Case], state: State) -> int:
    """How many tests are in a state."""
    return sum(case.state is state for case in cases)
