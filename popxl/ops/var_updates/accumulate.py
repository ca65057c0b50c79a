"""Accumulators: sums, means and moving averages that live in a tensor and are updated in place.

Ops of this family differ only in their formula; `sparse_accumulate_` adds to slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor, taken_back_on_failure
from popxl.core.traits import Overwrites, ShardingRule, Trait
from popxl.errors import PopxlError
from popxl.ops.families import REAL
from popxl.ops.index import or_beyond
from popxl.ops.precision import wide_dtype
from popxl.ops.var_updates.factors import factor, number, one_number, optional_tensor, product
from popxl.values.shapes import integer, keeps_parts, like_first, meta_shape_of
from popxl.values.spec import TensorSpec


def _accumulated(t: Any, X: Any, f: Any = None) -> TensorSpec:
    if t.shape != X.shape:
        raise PopxlError("`t` and `X` have to have the same shape; nothing is broadcast.")
    keeps_parts(t, X)
    one_number(f)
    meta_shape_of(t, X)
    return like_first(t)


def _accumulator(
    name: str,
    formula: Callable[..., Any],
    casts: bool = False,
    restarts: bool = False,
    linear: tuple[str, ...] = (),
    traits: Iterable[Trait] = (),
    **settings: Any,
) -> OpKind:
    """Declare an op that overwrites `t` with `formula(t, X, f)`, optionally casting `X` first."""

    def lowering(t: Any, X: Any, f: Any = None) -> Any:
        exact = f is None and jnp.issubdtype(t.dtype, jnp.integer)
        dtype = t.dtype if exact else wide_dtype(t)
        given = X.astype(t.dtype) if casts else X
        return formula(t.astype(dtype), given.astype(dtype), number(f, dtype))

    settings |= {
        "key": name,
        "shape": _accumulated,
        "traits": [Overwrites("t", restarts=restarts), ShardingRule(linear=linear), *traits],
        "gradient": None,
    }
    return OpKind("Accumulate", lowering, result=f"{name}__{{t}}", **settings)


_accumulate = _accumulator("accumulate", lambda t, X, f: t + product(f, X), linear=("t X",))
_square = _accumulator("accumulate_square", lambda t, X, f: t + product(f, X, X), casts=True, traits=REAL)
_mean = _accumulator(
    "accumulate_mean",
    lambda t, X, step: (jnp.where(step == 0, 0, step * t) + X) / (step + 1),  # ignores old contents of `t`, even NaN
    restarts=True,
    linear=("t X",),
    operands=("t", "X", "step"),
)
_average = _accumulator(
    "accumulate_moving_avg", lambda t, X, f: product(f, t) + product(1 - f, X), casts=True, linear=("t X",)
)
_average_square = _accumulator(
    "accumulate_moving_avg_square", lambda t, X, f: product(f, t) + product(1 - f, X, X), casts=True, traits=REAL
)


def _scalable(t: Any, f: Any = 1.0) -> TensorSpec:
    if not isinstance(f, Tensor) or f.shape != t.shape:
        one_number(f)
    return like_first(t)


def _scaled(t: Any, f: Any = 1.0) -> Any:
    each = not isinstance(f, float) and f.shape == t.shape
    return product(f.astype(wide_dtype(t)) if each else number(f, wide_dtype(t)), t.astype(wide_dtype(t)))


_scale = OpKind(
    "AccumulatorScale",
    _scaled,
    shape=_scalable,
    result="accumulator_scale__{t}",
    traits=[Overwrites("t", forgets=lambda attributes: attributes.get("f") == 0), ShardingRule(linear=("t",))],
    gradient=None,
)


def accumulate_(t: Tensor, X: Tensor, f: float | Tensor | None = None) -> Tensor:
    """Add `f` times `X` to `t`, in place: t ← t + f X.

    Computed in float32 and rounded once; integers without a factor are added as integers.

    Args:
        t: the accumulator.
        X: the addend, of the shape of `t`; its dtype may differ.
        f: a number, or a tensor of one element that is read when the op runs; 1 by default. The plain number 0 ignores
            `X`, even NaN.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if the shapes differ, or `f` has several elements.
        TypeError: if `f` is neither a number nor a tensor.

    Example:
        >>> ops.var_updates.accumulate_(gradient_sum, gradient)
    """
    return _accumulate(t, X, factor(f, "accumulate_: `f`", optional=True))


def accumulate_square_(t: Tensor, X: Tensor, f: float | Tensor = 1.0) -> Tensor:
    """Add `f` times the square of `X` to `t`, in place: t ← t + f X².

    Arguments, result and errors are those of `accumulate_`, but `X` is cast to the dtype of `t` first.

    Example:
        >>> ops.var_updates.accumulate_square_(sum_of_squares, gradient)
    """
    return _square(t, X, factor(f, "accumulate_square_: `f`"))


def accumulate_mean_(t: Tensor, X: Tensor, step: float | Tensor) -> Tensor:
    """Update the running mean `t` of `step` values by `X`, in place: t ← (step t + X) / (step + 1).

    Args:
        t: the accumulator.
        X: the next value: of the shape of `t`; its dtype may differ.
        step: number of values in the mean: for 0, `t` becomes `X`, regardless of its contents. A tensor of one element
            and any dtype, which the caller increments; or a number, which becomes a float32 constant of the graph.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if the shapes differ, or `step` has several elements.
        TypeError: if `step` is neither a number nor a tensor.

    Example:
        The mean of the gradients of some micro-batches.

        >>> ops.var_updates.accumulate_mean_(mean, gradient, count)
        >>> count += 1
    """
    step = factor(step, "accumulate_mean_: `step`")
    if isinstance(step, Tensor):
        return _mean(t, X, step)
    with taken_back_on_failure(constant(step, dtypes.float32)) as count:
        return _mean(t, X, count)


def accumulate_moving_average_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """Move `t` towards `X`, in place: t ← f t + (1 - f) X. The first moment of Adam, for one.

    Args:
        t: the accumulator.
        X: the next value: of the shape of `t`; its dtype may differ, and it is cast to that of `t` first.
        f: the weight of the old value: a number, or a tensor of one element that is read when the op runs.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if the shapes differ, or `f` has several elements.
        TypeError: if `f` is neither a number nor a tensor.

    Example:
        >>> ops.var_updates.accumulate_moving_average_(first_moment, gradient, 0.9)
    """
    return _average(t, X, factor(f, "accumulate_moving_average_: `f`"))


def accumulate_moving_average_square_(t: Tensor, X: Tensor, f: float | Tensor) -> Tensor:
    """Move `t` towards the square of `X`, in place: t ← f t + (1 - f) X². The second moment of Adam, for one.

    Arguments, result and errors are those of `accumulate_moving_average_`.

    Example:
        >>> ops.var_updates.accumulate_moving_average_square_(second_moment, gradient, 0.999)
    """
    return _average_square(t, X, factor(f, "accumulate_moving_average_square_: `f`"))


def accumulator_scale_(t: Tensor, f: float | Tensor) -> Tensor:
    """Multiply `t` by `f`, in place.

    Args:
        t: the accumulator.
        f: a number, a tensor of one element, or one of the shape of `t`. The plain number 0 leaves zeros, whatever
            `t` held; a tensor is multiplied, so that 0 times NaN is NaN.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if `f` has another shape.
        TypeError: if `f` is neither a number nor a tensor.

    Example:
        >>> ops.var_updates.accumulator_scale_(gradient_sum, 1 / micro_batches)
    """
    return _scale(t, factor(f, "accumulator_scale_: `f`"))


def accumulator_zero_(t: Tensor) -> Tensor:
    """Set `t` to zero, in place, whatever it held. The same as `accumulator_scale_(t, 0)`.

    Args:
        t: the accumulator.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Example:
        >>> ops.var_updates.accumulator_zero_(gradient_sum)
    """
    return accumulator_scale_(t, 0)


# Slices -------------------------------------------------------------------------------------------------------------


def _sparse_spec(t: Any, X: Any, indices: Any, f: Any = None, W: Any = None, *, axis: int) -> TensorSpec:
    """Shapes are not judged: programs that are only built may say otherwise."""
    keeps_parts(t, X)
    one_number(f)
    return like_first(t)


def _sparse_sum(t: Any, X: Any, indices: Any, f: Any = None, W: Any = None, *, axis: int) -> Any:
    exists = -t.ndim <= axis < t.ndim
    at = axis % t.ndim if exists else axis
    expected = t.shape[:at] + indices.shape + t.shape[at + 1 :]
    if not exists or X.shape != expected:
        raise PopxlError(
            f"sparse_accumulate_: `X` has the shape {X.shape}; expected that of `t`, {t.shape}, with that of "
            f"`indices`, {indices.shape}, in place of dimension {axis}{f': {expected}' if exists else ''}."
        )
    exact = f is None and jnp.issubdtype(t.dtype, jnp.integer)
    dtype = t.dtype if exact else wide_dtype(t)
    index = or_beyond(indices, t.shape[at])  # where "drop" drops indices out of range
    added = product(number(f, dtype), X.astype(dtype))
    return t.astype(dtype).at[(slice(None),) * at + (index,)].add(added, mode="drop")


_sparse_accumulate = OpKind(
    "PopartSparseAccumulate",
    _sparse_sum,
    shape=_sparse_spec,
    result="sparse_accumulate__{t}",
    traits=[Overwrites("t")],
    gradient=None,
)


def sparse_accumulate_(
    t: Tensor,
    X: Tensor,
    indices: Tensor,
    axis: int = 0,
    f: float | Tensor | None = None,
    W: Tensor | None = None,
) -> Tensor:
    """Add `f` times the slices of `X` to slices of `t`, in place: t[indices[j]] += f X[j], on dimension `axis`.

    It is the update that the gradient of `gather` makes to its table, without a gradient of the table's size.
    Computed in float32 and rounded once; integers without a factor are added as integers.

    Args:
        t: the accumulator.
        X: tensor to add: its shape is that of `t` with the shape of `indices` in place of dimension `axis`; its dtype
            may differ from that of `t`. The shape is checked when the program is compiled.
        indices: int32 or uint32 tensor. An index that is there several times adds each time, one out of range not at
            all; negative indices are out of range.
        axis: the dimension that is indexed; negative ones count from the back.
        f: a number, or a tensor of one element that is read when the op runs; 1 by default.
        W: a tensor with the layout of `t`, the embedding table for instance; no effect.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if `f` has several elements.
        TypeError: if `f` is neither a number nor a tensor, or `W` is not a tensor.

    See also: `numpy.add.at`.

    Example:
        >>> ops.var_updates.sparse_accumulate_(table_gradient, rows, ids)
    """
    what = "sparse_accumulate_"
    optional_tensor(what, W=W)
    f = factor(f, f"{what}: `f`", optional=True)
    return _sparse_accumulate(t, X, indices, f, W, axis=integer(axis, f"{what}: `axis`"))
