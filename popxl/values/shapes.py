"""Shape rules: from the specs of an op's operands to the spec of its result.

A rule takes tensors (anything with `shape`, `dtype` and `meta_shape`) and the op's attributes, and returns a
`TensorSpec` or raises; the op adds its name, its operands and the user's line to the message.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from popxl import dtypes
from popxl.errors import PopxlError
from popxl.values.spec import TensorSpec

T = TypeVar("T")


def integer(value: Any, what: str, expected: str = "be an integer") -> int:
    """Check an integer argument, including NumPy integers. `what` names it in error messages."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must {expected}; got {value!r} ({type(value).__name__}).") from None


def integers(values: Any, what: str, gaps: bool = False) -> tuple[Any, ...]:
    """Check a sequence of integers; `gaps` permits `None` entries."""
    try:
        entries = tuple(values)
    except TypeError:
        raise TypeError(f"{what} must be a sequence of integers; got {values!r} ({type(values).__name__}).") from None
    return tuple(entry if gaps and entry is None else integer(entry, what, "hold integers") for entry in entries)


def sizes(values: Any, what: str) -> tuple[int, ...]:
    """Check a shape argument: non-negative integers."""
    shape = integers(values, what)
    if min(shape, default=0) < 0:
        raise ValueError(f"{what} is {shape}; sizes are not negative.")
    return shape


def integer_or_integers(value: Any, what: str, gaps: bool = False) -> int | tuple[Any, ...]:
    """Check an argument: one integer, or several."""
    if isinstance(value, int):
        return value
    try:
        entries = tuple(value)
    except TypeError:
        return integer(value, what, "be an integer or a sequence of integers")
    return integers(entries, what, gaps)


def number(value: Any, what: str) -> Any:
    """Check a number argument, including NumPy numbers. `what` names it in error messages."""
    if not isinstance(value, Real):
        raise TypeError(f"{what} must be a number; got {value!r} ({type(value).__name__}).")
    return value.item() if isinstance(value, np.generic) else value


def flag(value: Any, what: str) -> bool:
    """Check a boolean argument, including NumPy booleans, 0 and 1. `what` names it in error messages."""
    if not isinstance(value, bool | np.bool_ | int | np.integer) or value not in (0, 1):
        raise TypeError(f"{what} must be True or False; got {value!r} ({type(value).__name__}).")
    return bool(value)


def word(value: T, what: str, words: Iterable[str]) -> T:
    """Check an argument that is one of several words. `what` names it in error messages."""
    if not is_known_word(value, words := tuple(words)):
        *others, last = map(repr, words)
        raise ValueError(f"{what} is {value!r}; expected {', '.join(others)} or {last}.")
    return value


def is_known_word(value: Any, words: Iterable[str]) -> bool:
    """Membership test for word arguments; false for arrays, which compare elementwise."""
    return isinstance(value, str) and value in words


def set_hints(**hints: Any) -> dict[str, Any]:
    """Hints as op attributes, without `None` values."""
    return {name: hint for name, hint in hints.items() if hint is not None}


def like_first(first: Any, *others: Any, **attributes: Any) -> TensorSpec:
    """The spec of the first operand."""
    return TensorSpec(first.shape, first.dtype, first.meta_shape)


def of_shape(first: Any, *others: Any, shape: tuple[int, ...], **attributes: Any) -> TensorSpec:
    """The shape that an attribute states, and the dtype of the first operand."""
    return TensorSpec(shape, first.dtype)


def same_dtype(first: Any, *others: Any) -> None:
    """Check equal operand dtypes; arithmetic has no implicit promotion."""
    for other in others:
        if other.dtype is not first.dtype:
            raise PopxlError(
                f"the operands have different dtypes, {first.dtype.name} and {other.dtype.name}, and nothing is "
                "promoted implicitly; convert one of them with `ops.cast`."
            )


def keeps_parts(t: Any, *others: Any) -> None:
    """Check that no complex operand is added in place to a real one."""
    for other in others:
        if other.dtype.is_complex and not t.dtype.is_complex:
            raise PopxlError(
                f"complex numbers cannot be added to {t.dtype.name}, in place; use complex64, or `ops.real` of them."
            )


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's rule: sizes are aligned at the right, and are equal or 1."""
    first, *others = shapes
    if all(shape == first for shape in others):
        return first
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        larger = {size for size in sizes if size != 1}
        if len(larger) > 1:
            raise PopxlError(
                f"the shapes {' and '.join(map(str, shapes))} do not broadcast; aligned at the right, sizes have to "
                "be equal or 1."
            )
        result.append(larger.pop() if larger else 1)
    return tuple(result)


def meta_shape_of(*operands: Any) -> tuple[int, ...]:
    """The meta-shape of an elementwise result, inherited from its operands."""
    found: tuple[int, ...] = ()
    for operand in operands:
        if operand.meta_shape:
            if found and operand.meta_shape != found:
                raise PopxlError(f"the operands have different meta-shapes, {found} and {operand.meta_shape}.")
            found = operand.meta_shape
    return found


def broadcast(first: Any, *others: Any, **attributes: Any) -> TensorSpec:
    """Elementwise arithmetic: one dtype, broadcast shapes."""
    same_dtype(first, *others)
    shape = broadcast_shapes(first.shape, *(other.shape for other in others))
    return TensorSpec(shape, first.dtype, meta_shape_of(first, *others))


def broadcast_to_first(first: Any, *others: Any, **attributes: Any) -> TensorSpec:
    """Elementwise arithmetic that is written over the first operand: as `broadcast`, but the shape cannot grow.

    That it does not is found out when the graph is run; programs that are only built may say otherwise.
    """
    return TensorSpec(first.shape, first.dtype, broadcast(first, *others).meta_shape)


def predicate(*operands: Any, **attributes: Any) -> TensorSpec:
    """Elementwise questions: a bool for each element of the broadcast shape, whatever the dtypes."""
    return TensorSpec(broadcast_shapes(*(t.shape for t in operands)), dtypes.bool, meta_shape_of(*operands))


def reduction_axes(axis: int | Iterable[int] | None, rank: int) -> tuple[int, ...]:
    """Reduced axes, ascending and unique; `None` means all."""
    if axis is None:
        return tuple(range(rank))
    axis = integer_or_integers(axis, "`axis`")
    axes = (axis,) if isinstance(axis, int) else axis
    return tuple(sorted({one_axis(a, rank) for a in axes}))


def reduced_shape(shape: tuple[int, ...], axis: int | Iterable[int] | None, keepdims: bool) -> tuple[int, ...]:
    """The shape that a reduction leaves."""
    axes = reduction_axes(axis, len(shape))
    return tuple(1 if d in axes else size for d, size in enumerate(shape) if keepdims or d not in axes)


def one_axis(axis: int, rank: int, what: str = "axis") -> int:
    """A single axis, counted from the front. `what` is what errors call it."""
    if not -rank <= axis < rank:
        choice = f"expected {-rank} to {rank - 1}" if rank else "a scalar has no axes"
        raise PopxlError(f"{what} {axis} does not exist in a tensor of rank {rank}; {choice}.")
    return axis % rank
