"""`clip`: limit the elements of a tensor to a range."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.ops.families import REAL
from popxl.values.shapes import like_first, number

_clip_grad = OpKind(
    "ClipGrad", lambda g, out, *, min, max: jnp.where((out == min) | (out == max), 0, g), shape=like_first
)


def _clipped(t: Any, *, min: float, max: float) -> Any:
    if jnp.issubdtype(t.dtype, jnp.integer):
        bounds = [None if math.isinf(bound) else np.asarray(bound, t.dtype) for bound in (min, max)]
        return jnp.clip(t, *bounds)
    return jnp.clip(t, min, max)


_clip = OpKind(
    "Clip",
    _clipped,
    shape=like_first,
    gradient={"t": lambda g, out, min, max: _clip_grad(g, out, min=min, max=max)},
    traits=REAL,
)


def clip(t: Tensor, min: float = -math.inf, max: float = math.inf) -> Tensor:
    """Clip `t` elementwise to the range from `min` to `max`. Gradients are 0 at clipped elements.

    Args:
        t: tensor of any shape.
        min, max: plain numbers, rounded to float32. Integers are limited to the integers of the range, exactly. If
            `min` is larger than `max`, everything becomes `max`.

    Returns:
        A new tensor of the same shape and dtype. NaN stays NaN.

    Raises:
        TypeError: if a bound is not a number.

    See also: `numpy.clip`.

    Example:
        >>> y = ops.clip(x, 0.0, 6.0)
    """
    lowest, highest = _bounds(t, number(min, "clip: `min`"), number(max, "clip: `max`"))
    return _clip(t, min=lowest, max=highest)


clamp = clip


def _bounds(t: Any, min: float, max: float) -> tuple[float, float]:
    """Bounds as float32, limited to the largest half for half operands.

    For integers they are the outermost integers of the range, exactly.
    """
    if isinstance(t, Tensor) and t.dtype.is_int:
        return _integer_bound(min, t, math.ceil), _integer_bound(max, t, math.floor)
    bounds = (min, max)
    half = isinstance(t, Tensor) and t.dtype.is_half and not all(map(math.isinf, bounds))
    largest = float(jnp.finfo(t.dtype.as_jax()).max) if half else math.inf
    with np.errstate(over="ignore"):
        lowest, highest = (float(np.float32(np.clip(bound, -largest, largest))) for bound in bounds)
    return lowest, highest


def _integer_bound(bound: float, t: Tensor, rounded: Callable[[float], int]) -> float:
    """A bound of integers: the next integer inside, no further out than the dtype reaches; infinite ones stay."""
    if math.isinf(bound):
        return float(bound)
    limits = np.iinfo(t.dtype.as_numpy())
    whole = rounded(bound)
    return int(limits.min) if whole < limits.min else int(limits.max) if whole > limits.max else whole
