"""Predicates of elements, and selection by them: comparisons, logic, `where`.

No gradient flows through a predicate. `where` passes it to the selected elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from popxl import dtypes
from popxl.core.create import constant, with_numbers
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor, TensorLike
from popxl.core.traits import REFUSED, ShardingRule
from popxl.ops.convert import cast_if_needed, identity
from popxl.ops.families import REAL, Binary, binary, public, unary
from popxl.values.shapes import broadcast_shapes, meta_shape_of, predicate, same_dtype
from popxl.values.spec import TensorSpec

isinf = unary("isinf", jnp.isinf, "Whether t is +∞ or -∞.", None, kind="IsInf", shape=predicate, see="numpy.isinf")
isnan = unary("isnan", jnp.isnan, "Whether t is not a number.", None, kind="IsNaN", shape=predicate, see="numpy.isnan")


def _of_one_dtype(relation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Declare a comparison with run-time refusal of mixed dtypes; merely built programs may mix them."""

    def compared(lhs: Any, rhs: Any) -> Any:
        if lhs.dtype != rhs.dtype:
            raise TypeError(f"{lhs.dtype} and {rhs.dtype} are not compared; convert one of them with `ops.cast`")
        return relation(lhs, rhs)

    return compared


equal = binary(
    "equal",
    _of_one_dtype(jnp.equal),
    "Whether lhs = rhs, elementwise. Two dtypes are refused when the program is compiled.",
    REFUSED,
    shape=predicate,
    linear=None,
    see="numpy.equal",
)


def _comparison(name: str, relation: Callable[[Any, Any], Any], meaning: str) -> Binary:
    """Declare a comparison of two tensors of one dtype."""

    def shape(lhs: Any, rhs: Any) -> TensorSpec:
        same_dtype(lhs, rhs)
        return predicate(lhs, rhs)

    traits = () if relation is jnp.not_equal else REAL
    return binary(name, relation, meaning, REFUSED, shape=shape, linear=None, traits=traits, see=f"numpy.{name}")


greater_equal = _comparison(
    "greater_equal", jnp.greater_equal, "Whether lhs ≥ rhs, elementwise; false wherever one of them is NaN."
)
less = _comparison("less", jnp.less, "Whether lhs < rhs, elementwise; false wherever one of them is NaN.")
less_equal = _comparison(
    "less_equal", jnp.less_equal, "Whether lhs ≤ rhs, elementwise; false wherever one of them is NaN."
)
not_equal = _comparison("not_equal", jnp.not_equal, "Whether lhs ≠ rhs, elementwise.")


def _logical(name: str, kind: str, lowering: Callable[[Any, Any], Any], meaning: str) -> Binary:
    """Declare an op of two truth values."""
    declaration = OpKind(kind, lowering, shape=predicate, gradient=REFUSED)

    def of_tensors(lhs: Tensor, rhs: Tensor) -> Tensor:
        declaration.check(lhs, rhs)
        return declaration(cast_if_needed(lhs, dtypes.bool), cast_if_needed(rhs, dtypes.bool))

    def op(lhs: TensorLike, rhs: TensorLike) -> Tensor:
        return with_numbers(of_tensors, lhs, rhs)

    doc = (
        f"{meaning} Operands that are not bool are converted: anything but 0 is true.\n\nArgs:\n    lhs, rhs: tensors "
        "whose shapes broadcast; one of them may be a bool.\n\nReturns:\n    A bool tensor of the broadcast shape."
        "\n\nSee also: "
        f"`numpy.{name}`.\n\nExample:\n    >>> c = ops.{name}(a, b)"
    )
    return public(op, declaration, name, doc)


logical_and = _logical("logical_and", "And", lambda lhs, rhs: lhs & rhs, "Whether both are true, elementwise.")
logical_or = _logical("logical_or", "Or", lambda lhs, rhs: lhs | rhs, "Whether one or both are true, elementwise.")

_not = OpKind("Not", lambda t: ~t, shape=predicate, gradient=REFUSED)
_greater = OpKind(
    "Greater",
    _of_one_dtype(jnp.greater),
    shape=predicate,
    gradient=REFUSED,
    operands=("input", "other"),
    traits=REAL,
)
_where = OpKind(
    "Where",
    lambda condition, lhs, rhs: jnp.where(condition, lhs, rhs),
    shape=lambda condition, lhs, rhs: _selection(condition, lhs, rhs),
    gradient={
        "lhs": lambda g, condition: where(condition, g, constant(0, g.dtype)),
        "rhs": lambda g, condition: where(condition, constant(0, g.dtype), g),
    },
    traits=[ShardingRule(linear=("lhs rhs",))],
)


def _selection(condition: Any, lhs: Any, rhs: Any) -> TensorSpec:
    same_dtype(lhs, rhs)
    return TensorSpec(broadcast_shapes(condition.shape, lhs.shape, rhs.shape), lhs.dtype, meta_shape_of(lhs, rhs))


def greater(input: TensorLike, other: TensorLike) -> Tensor:
    """Whether input > other, elementwise; false wherever one of them is NaN.

    Args:
        input, other: tensors whose shapes broadcast, of one dtype, which is checked at compilation. One of them may be
            a number or an array, which becomes a constant of the dtype of the other.

    Returns:
        A bool tensor of the broadcast shape.

    Raises:
        PopxlError: if the shapes do not broadcast.

    See also: `numpy.greater`.

    Example:
        >>> mask = ops.greater(x, 0.5)                       # the same as x > 0.5
    """
    return with_numbers(_greater, input, other)


def isfinite(t: Tensor) -> Tensor:
    """Whether t is neither infinite nor NaN.

    Made of other ops, as in PopXL: not (isnan or isinf), renamed.

    Args:
        t: tensor of any shape.

    Returns:
        A bool tensor of the same shape.

    See also: `numpy.isfinite`.

    Example:
        >>> ok = ops.isfinite(loss)
    """
    return identity(logical_not(logical_or(isnan(t), isinf(t))), "isfinite_out")


def logical_not(t: Tensor) -> Tensor:
    """Whether t is false. A tensor that is not bool is converted: anything but 0 is true.

    Args:
        t: tensor of any shape.

    Returns:
        A bool tensor of the same shape.

    See also: `numpy.logical_not`.

    Example:
        >>> neither = ops.logical_not(either)
    """
    _not.check(t)
    return _not(cast_if_needed(t, dtypes.bool))


def where(condition: Tensor, lhs: TensorLike, rhs: TensorLike) -> Tensor:
    """`lhs` where the condition is true, else `rhs`, elementwise.

    Args:
        condition: bool tensor, or one that is converted: anything but 0 is true. No gradient flows to it.
        lhs, rhs: tensors of one dtype. The three shapes broadcast. One of them may be a number or an array, which
            becomes a constant of the dtype of the other.

    Returns:
        A new tensor of the broadcast shape.

    Raises:
        PopxlError: if the shapes do not broadcast or the dtypes differ.

    See also: `numpy.where`.

    Example:
        >>> z = ops.where(mask, x, 0.0)
    """

    def chosen(lhs: Tensor, rhs: Tensor) -> Tensor:
        _where.check(condition, lhs, rhs)
        return _where(cast_if_needed(condition, dtypes.bool), lhs, rhs)

    return with_numbers(chosen, lhs, rhs)
