"""Recomputation on CPUs, where XLA drops optimization barriers before it merges equal computations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.fake_dependency import computed_after


def available_together(value: Any, other: Any) -> tuple[Any, Any]:
    """`value` with a fake dependency on the first element of `other`, if any; and `other`."""
    return computed_after(value, [other]), other


def all_available_after(values: Sequence[Any], others: Sequence[Any]) -> Sequence[Any]:
    """`values`, unchanged, each with a fake dependency on the first elements of `others`.

    Without others, the values depend on their own first elements, which still keeps XLA from merging the computations.
    """
    waited_for = others if any(other.size for other in others) else values
    return [computed_after(value, waited_for) for value in values]
