"""Pages: a title, sentences, tables and pictures, as text for a terminal, and as HTML for a notebook or a browser.

Reports define the content of their pages; this file defines the layout. A page in a file is self-contained: it loads no
other files, and runs no scripts.
"""

from __future__ import annotations

import os
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from popxl.base.atomic_files import replace_file

LONGEST = 12
"""Maximum number of table rows on a page; the record has all."""

MOST_LINES = 400
"""Maximum number of listing lines on a page."""


class Picture(str):
    """An SVG picture as text. Notebooks display it; `save` writes a file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file, which browsers open.

        Example:
            >>> ir.memory().picture().save("memory.svg")
        """
        replace_file(Path(path), self.encode())

    def _repr_svg_(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Table:
    """Rows of cells below their headings. Columns of numbers are aligned at the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def first_rows(cls, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str | Table]:
        """Build a table from the first rows, with a count of omitted rows; empty without rows.

        Example:
            >>> Table.first_rows(["n"], [[str(n)] for n in range(20)])[1]
            'and 8 more'
        """
        all_rows = list(rows)
        remainder = [f"and {len(all_rows) - LONGEST} more"] if len(all_rows) > LONGEST else []
        return [cls(columns, all_rows[:LONGEST]), *remainder] if all_rows else []

    def _aligned_right(self) -> list[bool]:
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in self.columns)
        return [all(cell[:1].isdigit() or not cell for cell in column) for column in columns]

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
class Facts:
    """The most important values, with their names. Text pages omit them: tables below have these, too."""

    values: Sequence[tuple[str, str]]

    def html(self) -> str:
        """The facts as HTML."""
        entries = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in self.values)
        return f"<dl>{''.join(entries)}</dl>"


@dataclass(frozen=True)
class Listing:
    """A long text behind a fold, open if `is_open`. Text pages omit it.

    Beyond `MOST_LINES` lines the middle is omitted; the source object keeps everything.
    """

    title: str
    text: str
    is_open: bool = False

    def html(self) -> str:
        """The listing as HTML."""
        summary = f"<summary>{escape(self.title)}</summary>"
        lines = self.text.splitlines()
        if len(lines) > MOST_LINES:
            ends = lines[: MOST_LINES - 20], lines[-20:]
            lines = [*ends[0], f"    ... {len(lines) - MOST_LINES} more lines ...", *ends[1]]
        text = escape("\n".join(lines))
        return f'<details{" open" * self.is_open}>{summary}<pre style="overflow-x: auto">{text}</pre></details>'


@dataclass(frozen=True)
class Page:
    """A title and its content: sentences, tables, facts, listings, pictures. Text omits the last three.

    Example:
        >>> print(Page("Fruit", [Table(["kind", "count"], [["apples", "3"], ["pears", "12"]])]))
        Fruit
        <BLANKLINE>
          kind     count
          apples       3
          pears       12
    """

    title: str
    parts: Sequence[str | Table | Facts | Listing | Page]

    def __str__(self) -> str:
        printable = [content for content in self.parts if not isinstance(content, Picture | Facts | Listing)]
        return "\n\n".join([self.title, *map(_text, printable)])

    def html(self, level: int = 3) -> str:
        """The page as a piece of HTML."""
        return f"<h{level}>{escape(self.title)}</h{level}>" + "".join(
            _html(content, level + 1) for content in self.parts
        )

    def document(self) -> str:
        """Complete HTML document with one section per page, plus links to sections."""
        inner = [content for content in self.parts if isinstance(content, Page)]
        links = "".join(f'<a href="#section{i}">{escape(page.title)}</a>' for i, page in enumerate(inner))
        sections = "".join(f'<section id="section{i}">{page.html(2)}</section>' for i, page in enumerate(inner))
        above = "".join(_html(content, 2) for content in self.parts if not isinstance(content, Page))
        return (
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(self.title)}</title>\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style>\n</head>\n'
            f"<body>\n<h1>{escape(self.title)}</h1>{above}\n{f'<nav>{links}</nav>' if inner else ''}\n{sections}\n"
            "</body>\n</html>\n"
        )


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2530; --faint: #667085; --line: #e4e8ee;
  --panel: #f6f8fb; --accent: #2f6cb0; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #dfe5ec; --faint: #93a0b0; --line: #2b323b;
  --panel: #1b2027; --accent: #7db3ea; } }
body { margin: 0 auto; padding: 2rem clamp(1rem, 4vw, 2.5rem) 5rem; max-width: 62rem; color: var(--ink);
  background: var(--paper); font: 15px/1.55 system-ui, sans-serif; }
h1 { margin: 0 0 0.4rem; font-size: 1.7rem; line-height: 1.2; letter-spacing: -0.01em; }
h2 { margin: 0 0 0.7rem; padding-top: 1.6rem; font-size: 1.2rem; border-top: 1px solid var(--line); }
h3 { margin: 1.6rem 0 0.5rem; font-size: 1rem; }
h1, h2, h3, td, p, summary { overflow-wrap: break-word; }
p { margin: 0.5rem 0; max-width: 46rem; }
section { margin-top: 2.2rem; }
nav { position: sticky; top: 0; z-index: 1; display: flex; gap: 0.2rem 1.1rem; overflow-x: auto; margin: 1.4rem 0 0;
  padding: 0.6rem 0; background: var(--paper); border-bottom: 1px solid var(--line); white-space: nowrap; }
nav a { color: var(--accent); text-decoration: none; font-size: 0.9rem; }
@media (min-width: 52rem) { nav { flex-wrap: wrap; } }
nav a:hover { text-decoration: underline; }
nav ~ section { scroll-margin-top: 3rem; }
nav + section h2 { border-top: 0; padding-top: 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.6rem; margin: 1.3rem 0; }
dl div { padding: 0.6rem 0.8rem; background: var(--panel); border: 1px solid var(--line); border-radius: 8px; }
dt { color: var(--faint); font-size: 0.8rem; }
dd { margin: 0.1rem 0 0; font-size: 1.1rem; font-weight: 600; font-variant-numeric: tabular-nums; white-space: nowrap; }
table { display: block; overflow-x: auto; margin: 0.8rem 0; border-collapse: collapse; font-size: 0.88rem;
  font-variant-numeric: tabular-nums; }
th { color: var(--faint); font-weight: 500; white-space: nowrap; }
th, td { padding: 0.28rem 1.4rem 0.28rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { min-width: 3rem; max-width: 24rem; }
td[style*="right"] { white-space: nowrap; }
tr:hover td { background: var(--panel); }
details { margin: 0.35rem 0; border: 1px solid var(--line); border-radius: 8px; background: var(--panel); }
summary { padding: 0.45rem 0.9rem; cursor: pointer; font-size: 0.9rem; }
pre { margin: 0; padding: 0.7rem 0.9rem; border-top: 1px solid var(--line); font: 12.5px/1.5 ui-monospace, monospace; }
svg { width: 100%; min-width: 40rem; height: auto; }
"""


def _text(content: str | Table | Page) -> str:
    if isinstance(content, str):
        return textwrap.fill(
            content, 100, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return content.text() if isinstance(content, Table) else str(content)


def _html(content: str | Table | Facts | Listing | Page, level: int) -> str:
    if isinstance(content, Page):
        return content.html(level)
    if isinstance(content, Picture):
        return f'<div style="overflow-x: auto">{content}</div>'
    return f"<p>{escape(content)}</p>" if isinstance(content, str) else content.html()


class OnPage(ABC):
    """Base class of printable, notebook-displayable, savable reports."""

    @abstractmethod
    def page(self) -> Page:
        """The page."""

    def __str__(self) -> str:
        return str(self.page())

    def _repr_html_(self) -> str:
        return self.page().html()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, as HTML that browsers open. The file is complete: it loads nothing from elsewhere.

        Example:
            >>> ir.memory().save("memory.html")
        """
        replace_file(Path(path), self.page().document().encode())


def starred(path: str) -> str:
    """Path with stars in place of layer numbers, so that equal layers share a table row.

    Example:
        >>> starred("model.layers.3.mlp.up.weight")
        'model.layers.*.mlp.up.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def listed(names: Iterable[str], most: int) -> str:
    """List the first names in a sentence, and count the others.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    items = [*names]
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def bytes_text(count: float) -> str:
    """Format a byte count with about three digits.

    Example:
        >>> bytes_text(786432), bytes_text(12)
        ('786 kB', '12 B')
    """
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))) if count else "0 B"


def count_text(count: float) -> str:
    """Format a count with about three digits.

    Example:
        >>> count_text(46_900), count_text(12)
        ('46.9 k', '12')
    """
    if count < 999.5:
        return f"{count:.0f}"
    return _scaled(count, ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")))


def flops_text(count: float) -> str:
    """Format a number of floating point operations with about three digits.

    Example:
        >>> flops_text(46_900), flops_text(12), flops_text(0)
        ('46.9 kFLOP', '12 FLOP', '0 FLOP')
    """
    units = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1, "FLOP"))
    return _scaled(count, units) if count else "0 FLOP"


def seconds_text(seconds: float) -> str:
    """Format a duration with about three digits.

    Example:
        >>> seconds_text(0.00123), seconds_text(75.3)
        ('1.23 ms', '75.3 s')
    """
    return _scaled(seconds, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))) if seconds else "0 s"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((entry for entry in units if value >= 0.9995 * entry[0]), units[-1 if value else 0])
    number = value / size
    if number >= 99.95 or number == int(number):
        return f"{number:.0f} {unit}"
    return f"{number:.1f} {unit}" if number >= 9.995 else f"{number:.2f} {unit}"
