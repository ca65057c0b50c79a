"""Names derived from other names."""

from __future__ import annotations

import re
from functools import partial
from typing import Any


def camel(name: str) -> str:
    """`"logical_not"`, `"logical-not"` → `"LogicalNot"`. Capitals inside of a word stay."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", name))


def snake(name: str) -> str:
    """`"LogicalNot"` → `"logical_not"`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def identifier(text: str) -> str:
    """`"linear_subgraph(0)"` → `"linear_subgraph_0"`."""
    return re.sub(r"\W+", "_", text).strip("_")


def name_of(fn: Any) -> str:
    """Name of a callable: of a partial application, that of its function; of an object without a name, its type's."""
    while isinstance(fn, partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
