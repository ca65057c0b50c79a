"""Random numbers: pure functions of an explicit seed.

A seed is a uint32 tensor of shape `(2,)`, made on the host by `popxl.create_seeds` or in a program by
`split_random_seed`. It is the key of JAX's Threefry generator. An op draws the same numbers from the same seed and
attributes whenever and wherever it runs: in a loop, in a called graph, in the gradient. The position of the op has no
influence, so ops and replicas that are to differ need seeds of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import Draws, Drops, ShardingRule
from popxl.dtypes import check_dtype
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.ops.kernels.elements import quotient
from popxl.ops.kernels.words import fold_in, key_of, words
from popxl.ops.precision import wide_dtype
from popxl.values.shapes import broadcast_shapes, integer, integers, like_first, number
from popxl.values.spec import TensorSpec, brief


def draw_sharded(draw: Callable[..., Any], seed: Any, *how: Any, **parameters: Any) -> Any:
    """Draw from a seed with JAX's partitionable counter mode, whose results can be sharded."""
    with jax.threefry_partitionable(True):
        return draw(key_of(seed), *how, **parameters)


def check_seed(seed: Any, any_integers: bool = False) -> None:
    if seed.shape != (2,) or not (seed.dtype is dtypes.uint32 or (any_integers and seed.dtype.is_int)):
        raise ValueError(
            f"expected a seed, a uint32 tensor of shape (2,) such as `popxl.create_seeds` makes; got {brief(seed)}."
        )


# Seeds --------------------------------------------------------------------------------------------------------------


def _seed_spec(seed: Any, modifier: Any = 0) -> TensorSpec:
    check_seed(seed)
    return like_first(seed)


_modify_random_seed = OpKind(
    "ModifyRandomSeed",
    lambda seed, modifier=0: fold_in(seed, modifier),
    shape=_seed_spec,
    result="modified_seed",
    gradient=None,
)


def split_random_seed(seed: Tensor, n: int = 2) -> tuple[Tensor, ...]:
    """New seeds made of one.

    Each depends on `seed` and on its place alone: the first of five is the first of two. They differ from one another
    and from `seed`, which should not be used for anything else from here on.

    Args:
        seed: uint32 tensor of shape `(2,)`.
        n: number of seeds.

    Returns:
        A tuple of `n` seeds.

    Raises:
        ValueError: if `seed` has another shape or dtype, or `n` is negative.

    See also: `jax.random.split`.

    Example:
        >>> seed, dropout_seed = ops.split_random_seed(seed)
    """
    count = integer(n, "split_random_seed: `n`")
    if count < 0:
        raise ValueError(f"split_random_seed: `n` is {n}; expected 0 or more seeds.")
    _modify_random_seed.check(seed)  # before there are constants
    return tuple(_modify_random_seed(seed, constant(i, dtypes.uint32)) for i in range(count))


# Samples ------------------------------------------------------------------------------------------------------------


def _sample_spec(seed_tensor: Any, *, shape: tuple[int, ...], dtype: dtype_, **parameters: float) -> TensorSpec:
    check_seed(seed_tensor)
    if any(size < 0 for size in shape):
        raise ValueError(f"`shape` is {shape}; expected sizes of 0 or more.")
    if dtype.is_float8 or not dtype.is_floating_point:
        raise ValueError(f"`dtype` is {dtype!r}; expected popxl.float32, popxl.float16 or popxl.bfloat16.")
    return TensorSpec(shape, dtype)


def _sampler(name: str, draw: Callable[..., Any], result: str) -> OpKind:
    """An op that draws a tensor of its own. Halves are drawn as float32, and rounded."""

    def lowering(seed_tensor: Any, *, shape: tuple[int, ...], dtype: dtype_, **parameters: float) -> Any:
        wide = jnp.promote_types(dtype.as_jax(), jnp.float32)
        return draw_sharded(draw, seed_tensor, shape, wide, **parameters)

    return OpKind(name, lowering, shape=_sample_spec, result=result, gradient=None, traits=[Draws()])


_uniform = _sampler(
    "RandomUniform",
    lambda key, shape, dtype, low, high: jax.random.uniform(key, shape, dtype, low, high),
    "random_uniform_out",
)
_normal = _sampler(
    "RandomNormal",
    lambda key, shape, dtype, mean, std: mean + std * jax.random.normal(key, shape, dtype),
    "random_normal_out",
)


def _sample_arguments(name: str, shape: Iterable[int], dtype: dtype_ | None, **parameters: float) -> dict[str, Any]:
    if dtype is not None:
        check_dtype(dtype, f"{name}: `dtype`")
    plain = {key: float(number(value, f"{name}: `{key}`")) for key, value in parameters.items()}
    return {"shape": integers(shape, f"{name}: `shape`"), "dtype": dtypes.float32 if dtype is None else dtype, **plain}


def random_uniform(
    seed_tensor: Tensor,
    shape: tuple[int, ...],
    low: float = 0.0,
    high: float = 1.0,
    dtype: dtype_ = dtypes.float32,
) -> Tensor:
    """Uniform random numbers between `low` and `high`.

    Args:
        seed_tensor: uint32 tensor of shape `(2,)`. The same seed gives the same numbers.
        shape: shape of the result.
        low, high: ends of the interval. `high` itself is not drawn, but in halves a number may be rounded to it.
        dtype: `popxl.float32`, `popxl.float16` or `popxl.bfloat16`; `None` means float32.

    Returns:
        A new tensor. No gradient flows.

    Raises:
        ValueError: if `seed_tensor` has another shape or dtype, a size is negative, or `dtype` is another.

    See also: `numpy.random.Generator.uniform`, `jax.random.uniform`.

    Example:
        >>> noise = ops.random_uniform(seed, (4, 8), -1, 1)
    """
    return _uniform(seed_tensor, **_sample_arguments("random_uniform", shape, dtype, low=low, high=high))


def random_normal(
    seed_tensor: Tensor,
    shape: tuple[int, ...],
    mean: float = 0.0,
    std: float = 1.0,
    dtype: dtype_ = dtypes.float32,
) -> Tensor:
    """Random numbers of the normal distribution.

    Args:
        seed_tensor: uint32 tensor of shape `(2,)`. The same seed gives the same numbers.
        shape: shape of the result.
        mean: mean of the numbers.
        std: standard deviation of the numbers.
        dtype: `popxl.float32`, `popxl.float16` or `popxl.bfloat16`; `None` means float32.

    Returns:
        A new tensor. No gradient flows.

    Raises:
        ValueError: if `seed_tensor` has another shape or dtype, a size is negative, or `dtype` is another.

    See also: `numpy.random.Generator.normal`, `jax.random.normal`.

    Example:
        >>> noise = ops.random_normal(seed, (4, 8), std=0.02)
    """
    return _normal(seed_tensor, **_sample_arguments("random_normal", shape, dtype, mean=mean, std=std))


# Dropout ------------------------------------------------------------------------------------------------------------


def _dropped(t: Any, seed_tensor: Any, shape: tuple[int, ...], ratio: float) -> Any:
    if not ratio:
        return t
    # Compared as integers: whether JAX computes in 64 bits makes no difference to them.
    kept = words(seed_tensor, shape) >= np.uint32(min(round(ratio * 2**32), 2**32 - 1))
    wide = wide_dtype(t)
    # Chosen element by element because XLA multiplies by the inverse of a constant, which may round differently.
    divisor = jnp.where(kept, np.asarray(1 - ratio, wide), np.ones((), wide))
    return jnp.where(kept, quotient(t.astype(wide), divisor), np.zeros((), wide))


def _dropout_on_arrays(t: Any, seed_tensor: Any, *, p: float) -> Any:
    # Not in the shape rule: programs that only build a graph may give `dropout` another seed.
    check_seed(TensorSpec(seed_tensor.shape, dtype_.as_dtype(seed_tensor.dtype)), any_integers=True)
    return _dropped(t, seed_tensor, t.shape, p)


def _masked(t: Any, seed_tensor: Any, *, shape: tuple[int, ...], ratio: float) -> TensorSpec:
    if broadcast_shapes(t.shape, shape) != t.shape:
        raise PopxlError(f"the `shape` {shape} does not broadcast to that of `t`.")
    check_seed(seed_tensor, any_integers=True)
    return like_first(t)


_MASKED = ShardingRule("...,_->...", ("t",))
_dropout: OpKind = OpKind(
    "Dropout",
    _dropout_on_arrays,
    shape=like_first,
    traits=[Drops("seed_tensor", "p"), _MASKED],
    gradient={"t": lambda g, seed_tensor, p: _dropout(g, seed_tensor, p=p)},
)
_shaped_dropout: OpKind = OpKind(
    "ShapedDropout",
    lambda t, seed_tensor, *, shape, ratio: _dropped(t, seed_tensor, shape, ratio),
    shape=_masked,
    result="shapeddropout_out",
    traits=[Drops("seed_tensor", "ratio"), _MASKED],
    gradient={
        "t": lambda g, seed_tensor, shape, ratio: _shaped_dropout(g, seed_tensor, shape=shape, ratio=ratio),
    },
)


def probability(value: float, what: str) -> float:
    if not 0 <= number(value, what) < 1:
        raise ValueError(f"{what} is {value!r}; expected a probability from 0 to below 1.")
    return float(value)


def dropout(t: Tensor, seed_tensor: Tensor, p: float) -> Tensor:
    """Zero elements with probability `p`; scale remaining ones by `1 / (1 - p)`.

    It always drops; leave it out of programs for inference, or say `p=0`. The gradient is the same op on the incoming
    gradient: it draws the same mask from the same seed.

    Args:
        t: float tensor of any shape.
        seed_tensor: uint32 tensor of shape `(2,)`. The same seed gives the same mask, in other ops too, so give each
            its own (`split_random_seed`), and a new one in each step.
        p: the probability, from 0 to below 1.

    Returns:
        A new tensor of the same shape and dtype.

    Raises:
        ValueError: for another `p`.
        PopxlError: when the session is made, if `seed_tensor` has another shape or holds no integers.

    See also: `torch.nn.functional.dropout`.

    Example:
        >>> seed, s = ops.split_random_seed(seed)
        >>> h = ops.dropout(h, s, p=0.1)
    """
    return _dropout(t, seed_tensor, p=probability(p, "dropout: `p`"))


def shaped_dropout(t: Tensor, seed_tensor: Tensor, shape: Iterable[int], ratio: float) -> Tensor:
    """Structured `dropout`, for example of rows or columns, with a mask shape broadcast to `t`.

    Args:
        t: float tensor of any shape.
        seed_tensor: uint32 tensor of shape `(2,)`. The same seed gives the same mask.
        shape: shape of the mask; it broadcasts to the shape of `t`.
        ratio: probability that a part is dropped, from 0 to below 1. The other elements are divided by `1 - ratio`.

    Returns:
        A new tensor of the shape and dtype of `t`.

    Raises:
        ValueError: for another `ratio`, or if `seed_tensor` has another shape or holds no integers.
        PopxlError: if `shape` does not broadcast to the shape of `t`.

    See also: `torch.nn.functional.dropout1d`.

    Example:
        Each row is dropped as a whole, or doubled.

        >>> y = ops.shaped_dropout(x, seed, (2, 1), 0.5)
    """
    parts = integers(shape, "shaped_dropout: `shape`")
    return _shaped_dropout(t, seed_tensor, shape=parts, ratio=probability(ratio, "shaped_dropout: `ratio`"))
