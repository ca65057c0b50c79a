"""Keys in which numbers are told apart that Python takes for equal."""

from __future__ import annotations

from typing import Any

import numpy as np


def told_apart(value: Any) -> Any:
    """A value as a key: 1, 1.0 and True are three, and 0.0 and -0.0 are two, also in tuples.

    Example:
        >>> {1: "int", 1.0: "float"}
        {1: 'float'}
        >>> told_apart((1, 0.0)) == told_apart((1.0, 0.0)), told_apart(0.0) == told_apart(-0.0)
        (False, False)
        >>> told_apart(("axis", 1)) == told_apart(("axis", 1))
        True
    """
    for kind in (tuple, frozenset):
        if isinstance(value, kind):
            return type(value), kind(map(told_apart, value))
    if isinstance(value, int | float | complex | np.number):
        return type(value), repr(value)
    return value
