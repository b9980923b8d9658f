# SPDX-License-Identifier: GPL-2.0
"""The virtio text in spec/: numbered statements, and tables with the test of each."""

from __future__ import annotations

import re

import pytest

from lab.core.paths import REPO

SPEC = REPO / "spec"
TEXTS = {
    "6": SPEC / "device-init-reported.tex",
    "7": SPEC / "device-init-on-inflate.tex",
    "16": SPEC / "report-now.tex",
}
TABLE = SPEC / "implementations.md"
OURS, PUBLISHED = r"(?:DRV|DEV)\d+\.\d+", r"5\.5\.[\d.]+-\d.*"
KEYWORD = re.compile(r"\b(?:MUST|SHOULD|MAY)\b")


def uncommented(text: str) -> str:
    return re.sub(r"(?<!\\)%.*", "", text)


def sections(text: str) -> list[tuple[str, str]]:
    """Whose normative section each part of a text is: DRV, DEV, or nobody's.

    A part without a heading belongs to the section of the specification that its place names.
    """
    marks = {"driver": "DRV", "device": "DEV"}
    normative = r"^(?:% Goes into .*)?\\(driver|device)normative\{"
    other = r"^\\(?:sub)*(?:section|paragraph)\{|^% Goes into .*"
    parts = re.split(rf"(?m){normative}|{other}", text)
    return [
        (marks.get(kind or "", ""), uncommented(part))
        for kind, part in zip([None, *parts[1::2]], parts[::2], strict=True)
    ]


def statements(text: str) -> list[str]:
    return re.findall(r"\\req\{([A-Z]+\d+\.\d+)\}", uncommented(text))


def rows(statement: str = OURS) -> dict[str, list[str]]:
    """The other cells of the rows of such statements."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if re.fullmatch(statement, cells[0]):
            assert cells[0] not in found
            found[cells[0]] = cells[1:]
    return found


@pytest.mark.parametrize("bit", TEXTS)
def test_statements_are_numbered_without_a_gap(bit: str) -> None:
    numbers = statements(TEXTS[bit].read_text(encoding="utf-8"))
    for kind in ("DRV", "DEV"):
        mine = [number for number in numbers if number.startswith(kind)]
        assert mine == [f"{kind}{bit}.{n}" for n in range(1, len(mine) + 1)]
        assert mine


@pytest.mark.parametrize("bit", TEXTS)
def test_each_normative_sentence_has_a_number_of_its_section(bit: str) -> None:
    for kind, part in sections(TEXTS[bit].read_text(encoding="utf-8")):
        for piece in re.split(r"(?=\\req\{)|\n\n", part):
            number = re.match(r"\\req\{([A-Z]+)", piece)
            if number:
                # The legacy section is about the driver.
                assert number[1] == (kind or "DRV"), piece
            elif KEYWORD.search(piece):
                # The sentence that introduces a list; each item has a number.
                assert re.search(r"\\begin\{itemize\}\s*\\item\s*$", piece), piece


@pytest.mark.parametrize("bit", TEXTS)
def test_the_conformance_clauses_name_each_section(bit: str) -> None:
    text = uncommented(TEXTS[bit].read_text(encoding="utf-8"))
    for kind in ("driver", "device"):
        labels = re.findall(rf"\\{kind}normative\{{[^}}]*\}}\{{[^}}]*\}}\{{([^}}]*)\}}", text)
        assert labels
        assert re.findall(rf"\\item \\ref\{{{kind}normative:([^}}]*)\}}", text) == labels


def test_the_table_has_each_statement_once() -> None:
    wanted = [
        number for path in TEXTS.values() for number in statements(path.read_text(encoding="utf-8"))
    ]
    assert sorted(rows()) == sorted(wanted)


def defined(name: str, folder: str, pattern: str, files: str) -> bool:
    """Whether a function is defined in a source, or in a patch that brings it."""
    expression = re.compile(rf"^\+?\s*{pattern}\s+{name}\(", re.MULTILINE)
    paths = [
        path
        for path in (REPO / folder).rglob(files)
        if path.is_file() and "target" not in path.parts
    ]
    return any(
        expression.search(path.read_text(encoding="utf-8", errors="replace")) for path in paths
    )


def exists(name: str, column: int) -> bool:
    if "::" in name:
        file, _, function = name.partition("::")
        folder = "tests/guest" if (REPO / "tests/guest" / file).is_file() else "tests/hostile"
        return defined(function, folder, "def", file)
    if column == 1:
        return defined(name, "qemu", r"static void", "*")
    return defined(name, "vhost-user-balloon", "fn", "*.rs")


@pytest.mark.parametrize("number", sorted(rows() | rows(PUBLISHED)))
def test_each_named_test_exists(number: str) -> None:
    cells = (rows() | rows(PUBLISHED))[number]
    assert len(cells) in (
        (2,) if number.startswith("DRV") else (4,) if number.startswith("DEV") else (2, 4)
    )
    for column in range(1, len(cells), 2):
        names = list(re.findall(r"`([\w.:]+)`", cells[column]))
        assert names or re.match(r"no test: \w+", cells[column])
        for name in names:
            assert exists(name, column), f"{number}: {name}"


def test_a_test_that_is_not_there_is_found() -> None:
    assert not exists("test_reuse.py::test_that_nobody_wrote", 1)
    assert not exists("test_that_nobody_wrote", 1)
    assert not exists("that_nobody_wrote", 3)
