"""Keys that distinguish numbers that Python considers equal."""

from __future__ import annotations

from typing import Any

import numpy as np


def exact_key(value: Any) -> Any:
    """A dictionary key that keeps 1, 1.0 and True distinct, likewise 0.0 and -0.0, also inside tuples.

    Example:
        >>> {1: "int", 1.0: "float"}
        {1: 'float'}
        >>> exact_key((1, 0.0)) == exact_key((1.0, 0.0)), exact_key(0.0) == exact_key(-0.0)
        (False, False)
        >>> exact_key(("axis", 1)) == exact_key(("axis", 1))
        True
    """
    if isinstance(value, tuple):
        return type(value), tuple(map(exact_key, value))
    if isinstance(value, _NUMBERS):
        return type(value), repr(value)
    return (type(value), frozenset(map(exact_key, value))) if isinstance(value, frozenset) else value


_NUMBERS = (int, float, complex, np.number)
