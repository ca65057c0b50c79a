"""Pages: a title, sentences, tables and pictures, as text for a terminal and as HTML for a notebook.

What reports something says what is on its page; how that looks is said here, once.
"""

from __future__ import annotations

import os
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

__all__ = ["OnPage", "Page", "Picture", "Table", "bytes_text", "seconds_text"]


class Picture(str):
    """A picture as the text of an SVG. Notebooks show it; `save` writes it to a file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, which browsers open.

        Example:
            >>> ir.memory().picture().save("memory.svg")
        """
        Path(path).write_text(self, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Table:
    """Rows of cells below their headings. Columns of numbers are aligned at the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def _aligned_right(self) -> list[bool]:
        return [all(cell[:1].isdigit() or not cell for cell in column) for column in zip(*self.rows, strict=True)]

    def text(self) -> str:
        """The table as lines."""
        right = self._aligned_right()
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(cells, widths, right, strict=True)
            )
            return ("  " + "   ".join(padded)).rstrip()

        return "\n".join(map(line, (self.columns, *self.rows)))

    def html(self) -> str:
        """The table as HTML."""
        styles = ["text-align: right" if is_right else "text-align: left" for is_right in self._aligned_right()]

        def line(cells: Sequence[str], tag: str) -> str:
            styled = zip(cells, styles, strict=True)
            return "".join(
                ["<tr>", *(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in styled), "</tr>"]
            )

        return f"<table>{line(self.columns, 'th')}{''.join(line(row, 'td') for row in self.rows)}</table>"


@dataclass(frozen=True)
class Page:
    """A title and what is below it: sentences, tables, pictures. Text leaves pictures out.

    Example:
        >>> print(Page("Fruit", [Table(["kind", "count"], [["apples", "3"], ["pears", "12"]])]))
        Fruit
        <BLANKLINE>
          kind     count
          apples       3
          pears       12
    """

    title: str
    parts: Sequence[str | Table | Page]

    def __str__(self) -> str:
        return "\n\n".join([self.title, *(_text(part) for part in self.parts if not isinstance(part, Picture))])

    def html(self, level: int = 3) -> str:
        """The page as a piece of HTML."""
        return f"<h{level}>{escape(self.title)}</h{level}>" + "".join(_html(part, level + 1) for part in self.parts)


def _text(part: str | Table | Page) -> str:
    if isinstance(part, str):
        return textwrap.fill(part, 100, initial_indent="  ", subsequent_indent="  ")
    return part.text() if isinstance(part, Table) else str(part)


def _html(part: str | Table | Page, level: int) -> str:
    if isinstance(part, Page):
        return part.html(level)
    if isinstance(part, Table):
        return part.html()
    return part if isinstance(part, Picture) else f"<p>{escape(part)}</p>"


class OnPage(ABC):
    """Something that prints as a page, and is shown as one in notebooks."""

    @abstractmethod
    def page(self) -> Page:
        """The page."""

    def __str__(self) -> str:
        return str(self.page())

    def _repr_html_(self) -> str:
        return self.page().html()


def bytes_text(count: float) -> str:
    """A number of bytes, in three digits or so.

    Example:
        >>> bytes_text(786432), bytes_text(12)
        ('786 kB', '12 B')
    """
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))) if count else "0 B"


def seconds_text(seconds: float) -> str:
    """A time, in three digits or so.

    Example:
        >>> seconds_text(0.00123), seconds_text(75.3)
        ('1.23 ms', '75.3 s')
    """
    return _scaled(seconds, ((1, "s"), (1e-3, "ms"), (1e-6, "us")))


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((each for each in units if value >= 0.9995 * each[0]), units[-1 if value else 0])
    number = value / size
    if number >= 99.95 or number == int(number):
        return f"{number:.0f} {unit}"
    return f"{number:.1f} {unit}" if number >= 9.995 else f"{number:.2f} {unit}"
