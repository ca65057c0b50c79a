"""Tables of Markdown whose rows take minutes each: printed as soon as they are known, and kept in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def line(cells: Iterable[str]) -> str:
    """A line of a table of Markdown."""
    return f"| {' | '.join(cells)} |"


class Table:
    """A table. Rows that its file has are printed from there.

    Args:
        head: what is above the rows.
        into: the file, to which each row is appended when it is known; it may not exist yet. None: no file.
    """

    def __init__(self, head: str, into: Path | None = None) -> None:
        self._into = into
        if into is not None and not into.exists():
            into.write_text(f"{head}\n")
        self._kept = into.read_text().splitlines() if into is not None else []
        print(head, flush=True)

    def add(self, about: Sequence[str], made: Callable[[], Sequence[str]]) -> None:
        """Add a row.

        Args:
            about: the first cells, which no other row has.
            made: makes the other cells. It is called if the file does not have the row.
        """
        begin = line(about).removesuffix("|")
        kept = next((row for row in self._kept if row.startswith(begin + "|")), None)
        if kept is not None:
            print(kept, flush=True)
            return
        row = line([*about, *made()])
        print(row, flush=True)
        if self._into is not None:
            with self._into.open("a") as file:
                print(row, file=file)
