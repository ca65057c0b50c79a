"""Initial values of the variables of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import numpy as np

import popxl
from popxl import initial
from popxl.extend.arguments import check_type
from popxl.initial import Initial

_draws_weights = ContextVar("_draws_weights", default=True)


@contextmanager
def uninitialized_weights() -> Iterator[None]:
    """Initialise the layers whose graphs are made in the block with zeros instead of random numbers.

    Drawing numbers takes long for a large model, and is useless if weights are loaded, or are another session's.

    Example:
        >>> from popxl_addons.layers import Linear
        >>> with popxl.Ir().main_graph, uninitialized_weights():
        ...     facts, graph = Linear(3).create_graph(popxl.TensorSpec((5, 4), popxl.float32))
        ...     variables = facts.init()
        >>> bool(variables.weight.data.any())
        False
    """
    before = _draws_weights.set(False)
    try:
        yield
    finally:
        _draws_weights.reset(before)


undrawn_weights = uninitialized_weights  # earlier name


def truncated_normal(*shape: int, std: float = 0.02) -> np.ndarray:
    """Draws of a normal distribution that is cut off at two `std`, from NumPy's global generator.

    For a seed they are those of `scipy.stats.truncnorm.rvs(-2, 2, scale=std, size=shape)`, which takes longer.

    Example:
        >>> values = truncated_normal(3, 4)
        >>> values.shape, bool((abs(values) <= 0.04).all())
        ((3, 4), True)
    """
    if not _draws_weights.get():
        return np.broadcast_to(np.float32(0), shape)  # one number in memory
    from scipy.special import ndtr, ndtri  # JAX needs SciPy, too

    shares = ndtr(-2) + np.random.uniform(size=shape) * (ndtr(2) - ndtr(-2))
    return ndtri(shares) * std


DESCRIBED_FROM = 1 << 20
"""Minimum number of elements of weights that are described lazily, and drawn when first needed."""


def weights(*shape: int, std: float = 0.02) -> np.ndarray | Initial:
    """Initial weights from `truncated_normal`; for large arrays a lazy description with a derived seed.

    Example:
        >>> weights(2, 3).shape, weights(50257, 4096).kind
        ((2, 3), 'truncated_normal')
    """
    if not _draws_weights.get():
        return initial.zeros(shape)
    if math.prod(shape) < DESCRIBED_FROM:
        return truncated_normal(*shape, std=std)
    return initial.truncated_normal(shape, std=std, seed=int(np.random.randint(2**63 - 1)))


def drawn_weights(layer: str, dtype: popxl.dtype, *shape: int) -> Callable[[], np.ndarray | Initial]:
    """Draw `weights` in a variable dtype. Raises `ValueError` for integers, since truncation gives zeros."""
    check_type(dtype, popxl.dtype, f"{layer}: the dtype of the weights", "a popxl dtype, as that of a Tensor")
    if not dtype.is_inexact:
        raise ValueError(
            f"{layer}: the weights would be of {dtype.name}, and begin with random numbers around 0 that it does not "
            "hold. Cast the input with `ops.cast`, or ask for a floating point type."
        )
    return partial(weights, *shape)
