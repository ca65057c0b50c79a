"""Loss scaling, which keeps float16 gradients from underflow and overflow.

The program adapts the factor: it grows while all gradients are finite. A step with gradients that are not finite
changes nothing but the factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax.numpy as jnp

import popxl
from popxl import ops
from popxl.op import Colocated, OpKind, Overwrites
from popxl.tensor import Variable


@dataclass(frozen=True)
class DynamicLossScaling:
    """A loss scaling that the program adapts.

    Args:
        start: the factor of the first step. Powers of two round nothing.
        grow_after: number of good steps in a row after which it is doubled. It is halved after each bad one, which is
            skipped.
        smallest, largest: bounds of the factor.

    Raises:
        ValueError: for numbers that are not positive, or not in order.

    See also: `torch.amp.GradScaler`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     scale = DynamicLossScaling(start=2.0**10).init()
        >>> float(scale.value.data)
        1024.0
    """

    start: float = 2.0**15
    grow_after: int = 2000
    smallest: float = 1.0
    largest: float = 2.0**24

    def __post_init__(self) -> None:
        if not 0 < self.smallest <= self.start <= self.largest < math.inf:
            raise ValueError(f"DynamicLossScaling: expected 0 < `smallest` <= `start` <= `largest`; got {self}.")
        if self.grow_after < 1:
            raise ValueError(f"DynamicLossScaling: `grow_after` is {self.grow_after}; expected 1 step or more.")

    def init(self) -> LossScale:
        """Make its variables, in the main graph. Optimisers take what is returned as `loss_scaling`."""
        value = popxl.variable(self.start, popxl.float32, "optimizer.loss_scaling.value")
        good_steps = popxl.variable(0, popxl.float32, "optimizer.loss_scaling.good_steps")
        return LossScale(self, value, good_steps)


@dataclass(frozen=True)
class LossScale:
    """In-program loss scaling: multiply the loss gradient by `value`, then pass it to the optimizer.

    Attributes:
        settings: rules for its changes.
        value: the factor, a float32 scalar.
        good_steps: number of steps in a row with finite gradients, since it changed.
    """

    settings: DynamicLossScaling
    value: Variable
    good_steps: Variable

    def update_(self, finite: popxl.Tensor) -> None:
        """Adapt the scale in place to whether gradients were finite."""
        how = self.settings
        _scaled(
            self.value,
            self.good_steps,
            finite,
            grow_after=how.grow_after,
            smallest=float(how.smallest),
            largest=float(how.largest),
        )


def _rescaled(
    value: Any, good_steps: Any, finite: Any, *, grow_after: int, smallest: float, largest: float
) -> tuple[Any, Any]:
    grows = good_steps + 1 >= grow_after
    grown = jnp.where(grows, jnp.minimum(value * 2, largest), value)
    new = jnp.where(finite, grown, jnp.maximum(value / 2, smallest))
    return new, jnp.where(finite & ~grows, good_steps + 1, 0)


_scaled = OpKind(
    "LossScaleStep",
    _rescaled,
    shape=lambda *operands, **settings: (),
    gradient=None,
    traits=[Overwrites(positions=lambda attributes: frozenset({0, 1}), aliased=False)],
    key="popxl_addons.LossScaleStep",
)

_are_finite = OpKind(
    "AllFinite",
    lambda *ts: reduce(jnp.logical_and, (jnp.isfinite(t).all() for t in ts)),
    shape=lambda *ts: popxl.TensorSpec((), popxl.bool),
    result="all_finite",
    gradient=None,
    traits=[Colocated()],
    key="popxl_addons.AllFinite",
)


def all_finite(tensors: Iterable[popxl.Tensor], everywhere: bool = False) -> popxl.Tensor:
    """Whether all tensor elements are finite, as a bool scalar.

    Args:
        tensors: floats, at least one.
        everywhere: ask for those of all replicas; otherwise each replica answers for itself.
    """
    finite = _are_finite(*tensors)
    if not everywhere or popxl.gir().replication_factor == 1:
        return finite
    return ops.collectives.replicated_all_reduce(finite.astype(popxl.float32), "min") > 0.5
