"""Adding to some slices of a tensor."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import Overwrites
from popxl.errors import PopxlError
from popxl.ops.index import or_beyond
from popxl.ops.precision import wide_dtype
from popxl.ops.var_updates.factors import factor, number, one_number, optional_tensor, product
from popxl.values.shapes import integer, keeps_parts, like_first
from popxl.values.spec import TensorSpec


def _updated(t: Any, X: Any, indices: Any, f: Any = None, W: Any = None, *, axis: int) -> TensorSpec:
    """Shapes are not judged: programs that are only built may say otherwise."""
    keeps_parts(t, X)
    one_number(f)
    return like_first(t)


def _scattered(t: Any, X: Any, indices: Any, f: Any = None, W: Any = None, *, axis: int) -> Any:
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
    _scattered,
    shape=_updated,
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

    It is the update that the gradient of `gather` makes to its table, without a gradient of the table's size. Computed
    in
    float32 and rounded once; integers without a factor are added as integers.

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
