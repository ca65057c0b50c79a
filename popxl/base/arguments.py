"""Arguments of the right kind."""

from __future__ import annotations

from types import UnionType


def check_type(value: object, kinds: type | tuple[type, ...] | UnionType, what: str, expected: str) -> None:
    """Raise `TypeError` for an argument of a wrong type.

    Args:
        kinds: types that it may have.
        what: the function and the name of the argument, as the message begins.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{what} must be {expected}; got {value!r:.200} ({type(value).__name__}).")
