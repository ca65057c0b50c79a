"""Recomputation on CPUs, where XLA drops optimization barriers before it merges equal computations."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

from runtime.fake_dependency import with_fake_dependency


def available_after(value: Any, other: Any) -> Any:
    """`value` with a fake dependency on the first element of `other`, if any."""
    return all_available_after([value], [other])[0] if other.size else value


def all_available_after(values: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """`values`, unchanged, each with a fake dependency on the first elements of `others`.

    Where there are none, on the first elements of the values themselves: a computation on them is then another one.
    """
    firsts = [other[(0,) * other.ndim] != 0 for other in others if other.size]
    firsts = firsts or [value[(0,) * value.ndim] != 0 for value in values if value.size]
    return [with_fake_dependency(value, reduce(operator.or_, firsts)) if value.size else value for value in values]
