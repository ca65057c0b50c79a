"""Recomputation on CPUs, where XLA drops optimization barriers before it merges equal computations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from runtime.fake_dependency import computed_after


def available_together(values: Sequence[Any], others: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """`values`, each with a fake dependency on the first elements of `others`; and `others`.

    Without others, the values depend on their own first elements, which still keeps XLA from merging the computations.
    """
    waited_for = others if any(other.size for other in others) else values
    return [_after(value, waited_for) for value in values], others


@jax.custom_jvp
def _after(value: Any, others: Sequence[Any]) -> Any:
    return computed_after(value, others)


@_after.defjvp
def _tangent_after(values: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    """The dependency works on bits, which have no derivative."""
    return _after(*values), tangents[0]
