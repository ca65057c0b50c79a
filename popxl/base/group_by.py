"""`group_by`: items by a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Lists of items with equal keys, in order of the first item of each.

    Example:
        >>> group_by([3, 1, 4, 1, 5], lambda n: n % 2)
        {1: [3, 1, 1, 5], 0: [4]}
    """
    found: dict[K, list[T]] = {}
    for each in items:
        found.setdefault(key(each), []).append(each)
    return found
