"""Damaged files of every kind, and changed programs: a few here; many by `damaged_files.py`, `changed_programs.py`."""

from __future__ import annotations

import pytest

from tests.popxl.changed_programs import changed
from tests.popxl.damaged_files import KINDS, damage


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "cache"])
def test_nothing_else_is_read_than_what_was_written(kind: str) -> None:
    found = damage(kind, 20)
    assert found["refused"] > 15 and found.total() == 20


def test_what_is_damaged_in_the_cache_is_compiled_anew() -> None:
    assert damage("cache", 3) == {"made anew": 3}


def test_changed_programs_are_refused_or_are_programs() -> None:
    found = changed(60)
    assert found["refused"] > 30 and found["loaded"] > 3 and found.total() == 60
