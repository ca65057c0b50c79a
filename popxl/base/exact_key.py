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
    for kind in (tuple, frozenset):
        if isinstance(value, kind):
            return type(value), kind(map(exact_key, value))
    if isinstance(value, int | float | complex | np.number):
        return type(value), repr(value)
    return value
