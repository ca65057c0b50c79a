"""Tables that are made row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.targets.tables import Table


def test_a_table_that_was_interrupted_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = tmp_path / "table.md"
    head = "| way | cost |\n|---|---|"

    def interrupted() -> list[str]:
        raise KeyboardInterrupt

    first = Table(head, into)
    first.add(["scan, checkpoint"], lambda: ["3"])
    with pytest.raises(KeyboardInterrupt):
        first.add(["scan"], interrupted)
    capsys.readouterr()
    again = Table(head, into)
    again.add(["scan, checkpoint"], interrupted)
    again.add(["scan"], lambda: ["5"])
    expected = f"{head}\n| scan, checkpoint | 3 |\n| scan | 5 |\n"
    assert into.read_text() == capsys.readouterr().out == expected


def test_a_page_keeps_a_table_amid_its_text(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    head = "| way | cost |\n|---|---|"
    page.write_text(f"Before.\n\n{head}\n| scan | 5 |\n\nAfter.\n")
    Table(head, page).add(["loop"], lambda: ["7"])
    assert page.read_text() == f"Before.\n\n{head}\n| scan | 5 |\n| loop | 7 |\n\nAfter.\n"
