"""`line_changing`: the source line that changes an object, for messages, found by inspection of functions."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterable, Iterator
from itertools import product
from types import CodeType

from popxl.extend.source import SourceLocation


def line_changing(codes: Iterable[CodeType], text: str, is_rebound: bool = False) -> str:
    """Source line of these functions that changes an object with this display name; "" if none does.

    Args:
        text: the user's name for it.
        is_rebound: whether it is another object now, rather than a changed one.
    """
    names = re.sub(r"\[[^]]*\]", "", text).split(".")
    codes = sorted(codes, key=lambda code: code.co_name == "__init__")  # which only sets initial values
    ways = (_stores, _overwrites, _mentions) if is_rebound else (_overwrites, _stores, _mentions)
    for name, changes, code in product(reversed(names), ways, codes):
        for line in changes(code, name):
            return str(SourceLocation.of((code, line)))
    return ""


_CHANGING = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "next", "pop", "popitem",
     "popleft", "remove", "reverse", "setdefault", "sort", "subtract", "update")
)  # fmt: skip


def _stores(code: CodeType, name: str) -> Iterator[int]:
    """Source lines that assign a variable or attribute of this name."""
    for instruction in _instructions(code):
        is_stored = instruction.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF")
        if is_stored and instruction.argval == name:
            yield _line(instruction)


def _overwrites(code: CodeType, name: str) -> Iterator[int]:
    """Source lines that may mutate an object of this name: by index assignment, or by a known mutating method."""
    by_line: dict[int, list[dis.Instruction]] = {}
    for instruction in _instructions(code):
        by_line.setdefault(_line(instruction), []).append(instruction)
    for line, instructions in by_line.items():
        named = [each.argval for each in instructions if each.opname.startswith("LOAD_")]
        does = any(each.opname in ("STORE_SUBSCR", "STORE_SLICE") for each in instructions) or any(
            isinstance(each, str) and (each in _CHANGING or each.endswith("_") and not each.startswith("_"))
            for each in named
        )
        if does and name in named:
            yield line


def _mentions(code: CodeType, name: str) -> Iterator[int]:
    """Source lines mentioning a name, as in `setattr(self, "name", 1)`."""
    return (_line(instruction) for instruction in _instructions(code) if instruction.argval == name)


def _instructions(code: CodeType) -> Iterator[dis.Instruction]:
    yield from dis.get_instructions(code)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _instructions(each)


def _line(instruction: dis.Instruction) -> int:
    return (instruction.positions and instruction.positions.lineno) or 0
