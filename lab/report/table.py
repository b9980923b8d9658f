# SPDX-License-Identifier: GPL-2.0
"""A table of figures: in Markdown, for a terminal, in a page."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

TOGETHER = "\N{NO-BREAK SPACE}"


class Table(NamedTuple):
    """Heads and rows of cells; the columns ``right`` are figures, set to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()

    def markdown(self) -> str:
        """A line for each row, without the empty cells at its end."""
        marks = ["---:" if at in self.right else "---" for at in range(len(self.heads))]
        lines = [_escaped(self.heads), marks, *map(_escaped, self.rows)]
        return "".join("|".join(line).rstrip("|") + "\n" for line in lines)

    def text(self) -> Iterator[str]:
        """Lines with columns of one width, without the marks of code."""
        lines = [[cell.replace("`", "") for cell in line] for line in (self.heads, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = zip(line, widths, strict=True)
            shown = (
                cell.rjust(width) if at in self.right else cell.ljust(width)
                for at, (cell, width) in enumerate(cells)
            )
            yield "  ".join(shown).rstrip()

    def html(self) -> Markup:
        """Rows of a table in HTML; a figure and its unit stay on one line."""
        lines = [_row("th", self.heads)]
        for row in self.rows:
            shown = [
                cell.replace(" ", TOGETHER) if at in self.right else cell
                for at, cell in enumerate(row)
            ]
            lines.append(_row("td", shown))
        return Markup("\n").join(lines)


def _escaped(cells: Sequence[str]) -> list[str]:
    return [cell.replace("|", "\\|") for cell in cells]


def _row(tag: str, cells: Sequence[str]) -> Markup:
    made = "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
    return Markup(f"<tr>{made}</tr>")
