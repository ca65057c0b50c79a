"""Tables of Markdown whose rows take minutes each: printed as soon as they are known, and kept in a file or a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from pathlib import Path


def line(cells: Iterable[str]) -> str:
    """A line of a table of Markdown."""
    return f"| {' | '.join(cells)} |"


class Table:
    """A table. Rows that its file has are printed from there.

    Args:
        head: what is above the rows.
        into: the file, to which each row is added when it is known; it may not exist yet. It may be a page with other
            text, in which the head says where the table is. None: no file.
    """

    def __init__(self, head: str, into: Path | None = None) -> None:
        self._head, self._into = f"{head}\n", into
        if into is not None:
            text = into.read_text() if into.exists() else ""
            if self._head not in text:
                into.write_text(text + self._head)
        print(head, flush=True)

    def add(self, about: Sequence[str], made: Callable[[], Sequence[str]]) -> None:
        """Add a row.

        Args:
            about: the first cells, which no other row has.
            made: makes the other cells. It is called if the file does not have the row.
        """
        begin = line(about).removesuffix("|")
        kept = next((row for row in self._rows() if row.startswith(begin + "|")), None)
        if kept is not None:
            print(kept.removesuffix("\n"), flush=True)
            return
        row = line([*about, *made()])
        print(row, flush=True)
        if self._into is not None:
            before, head, after = self._into.read_text().partition(self._head)
            rows = "".join(self._rows())
            self._into.write_text("".join([before, head, rows, f"{row}\n", after.removeprefix(rows)]))

    def _rows(self) -> list[str]:
        """The rows in the file, with their ends of lines."""
        text = self._into.read_text() if self._into is not None else ""
        return [*takewhile(lambda row: row.startswith("|"), text.partition(self._head)[2].splitlines(keepends=True))]
