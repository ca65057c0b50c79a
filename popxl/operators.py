"""Meaning of `x + y`, `x[0]` and `x.reshape(...)`: each operator and method of tensors is an op of `popxl.ops`.

Ops need tensors, so `popxl.core.tensor` imports none. Importing this file gives `Tensor` its operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, ClassVar

import numpy as np

from popxl import ops
from popxl.core.create import constant, operand_beside
from popxl.core.refused_conversions import check_not_traced
from popxl.core.tensor import Constant, HostScalarTensor, Tensor, TensorLike, Variable, taken_back_on_failure
from popxl.dtypes import dtype as dtype_

__all__ = ["Operators"]


def _applied(t: Tensor, op: Callable[..., Tensor], other: Any, reflected: bool = False) -> Tensor:
    """An op of a tensor and another operand: anything but a tensor becomes a constant of the tensor's dtype."""
    if isinstance(other, Tensor):
        return op(t, other)
    check_not_traced(t, other)
    if np.size(other) == 0:
        raise ValueError(f"An operand without elements was given to an operator of {t!r}: {other!r}.")
    operand = operand_beside(t, other)
    with taken_back_on_failure(operand):
        return op(operand, t) if reflected else op(t, operand)


_Operator = Callable[[Any, TensorLike], Tensor]


def _operator(op: Callable[..., Tensor], reflected: bool = False) -> _Operator:
    """Declare an operator of a tensor; a reflected one is that of its right operand."""

    def operator(self: Any, other: TensorLike) -> Tensor:
        return _applied(self, op, other, reflected)

    return operator


# NumPy's operators, called with an array or a NumPy scalar on the left of a tensor.
_OPERATORS: dict[np.ufunc, Callable[[Tensor, Any], Any]] = {
    np.add: lambda t, other: t.__radd__(other),
    np.subtract: lambda t, other: t.__rsub__(other),
    np.multiply: lambda t, other: t.__rmul__(other),
    np.true_divide: lambda t, other: t.__rtruediv__(other),
    np.remainder: lambda t, other: t.__rmod__(other),
    np.matmul: lambda t, other: t.__rmatmul__(other),
    np.power: lambda t, other: t.__rpow__(other),
    np.bitwise_and: lambda t, other: t.__rand__(other),
    np.bitwise_or: lambda t, other: t.__ror__(other),
    np.greater: lambda t, other: t < other,  # called for the tensor, on the right
    np.greater_equal: lambda t, other: t <= other,
    np.less: lambda t, other: t > other,
    np.less_equal: lambda t, other: t >= other,
    np.equal: lambda t, other: False,  # a tensor is equal to itself only
    np.not_equal: lambda t, other: True,
}

_REDUCTIONS: dict[np.ufunc, str] = {np.add: "sum", np.multiply: "prod", np.maximum: "max", np.minimum: "min"}

_NAMES = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "concatenate": "concat",
    "divide": "div",
    "multiply": "mul",
    "negative": "negate",
    "power": "pow",
    "remainder": "fmod",
    "subtract": "sub",
    "take": "gather",
}
"""The op for a function of NumPy's, where the names differ."""


def _of_ufunc(t: Tensor, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Apply a NumPy ufunc to a tensor: `array + t`, or an error that names the op."""
    meaning = _OPERATORS.get(ufunc)
    if method == "__call__" and not keywords and meaning is not None and inputs[1] is t:
        return meaning(t, inputs[0])
    raise _refusal(t, _REDUCTIONS.get(ufunc, ufunc.__name__) if method == "reduce" else ufunc.__name__)


def _refusal(t: Tensor, name: str) -> TypeError:
    """Build the error for a tensor passed to a NumPy function."""
    op = _NAMES.get(name, name)
    remedy = f"Use `ops.{op}`." if hasattr(ops, op) else f"There is no `ops.{op}`: write it with those that there are."
    return TypeError(f"NumPy's `{name}` takes arrays, and {t!r} is a tensor, to be computed by a session. {remedy}")


class Operators:
    """The operators and methods that `Tensor` is given below. Type checkers see them as those of a base class."""

    # Operators ------------------------------------------------------------------------------------------------------

    __add__: ClassVar[_Operator] = _operator(ops.add)
    __radd__: ClassVar[_Operator] = _operator(ops.add, reflected=True)
    __sub__: ClassVar[_Operator] = _operator(ops.sub)
    __rsub__: ClassVar[_Operator] = _operator(ops.sub, reflected=True)
    __mul__: ClassVar[_Operator] = _operator(ops.mul)
    __rmul__: ClassVar[_Operator] = _operator(ops.mul, reflected=True)
    __truediv__: ClassVar[_Operator] = _operator(ops.div)
    __rtruediv__: ClassVar[_Operator] = _operator(ops.div, reflected=True)
    __mod__: ClassVar[_Operator] = _operator(ops.fmod)
    __rmod__: ClassVar[_Operator] = _operator(ops.fmod, reflected=True)
    __matmul__: ClassVar[_Operator] = _operator(ops.matmul)
    __rmatmul__: ClassVar[_Operator] = _operator(ops.matmul, reflected=True)
    __and__: ClassVar[_Operator] = _operator(ops.logical_and)
    __rand__: ClassVar[_Operator] = _operator(ops.logical_and, reflected=True)
    __or__: ClassVar[_Operator] = _operator(ops.logical_or)
    __ror__: ClassVar[_Operator] = _operator(ops.logical_or, reflected=True)
    __gt__: ClassVar[_Operator] = _operator(ops.greater)
    __ge__: ClassVar[_Operator] = _operator(ops.greater_equal)
    __lt__: ClassVar[_Operator] = _operator(ops.less)
    __le__: ClassVar[_Operator] = _operator(ops.less_equal)

    def __iadd__(self: Any, other: TensorLike) -> Tensor:
        _applied(self, ops.add_, other)
        return self

    def __pow__(self: Any, other: TensorLike) -> Tensor:
        return ops.pow(self, other)

    def __rpow__(self: Any, other: HostScalarTensor) -> Tensor:
        base = operand_beside(self, other) if self.dtype.holds(other) else constant(other)
        with taken_back_on_failure(base):
            return ops.pow(base, self)

    def __neg__(self: Any) -> Tensor:
        return ops.negate(self)

    def __invert__(self: Any) -> Tensor:
        return ops.logical_not(self)

    def __getitem__(self: Any, key: Any) -> Tensor:
        """Slices and integers, an integer tensor (a gather on axis 0), or a bool mask (other elements become 0)."""
        return ops.getitem(self, key)

    def __array_ufunc__(self: Any, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return _of_ufunc(self, ufunc, method, inputs, kwargs)

    def __array_function__(self: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is np.shape:
            return self.shape
        raise _refusal(self, function.__name__)

    # Methods --------------------------------------------------------------------------------------------------------

    @property
    def T(self: Any) -> Tensor:
        """The transpose: all dimensions reversed."""
        return ops.transpose(self)

    @property
    def T_(self: Any) -> Tensor:
        """Transposed view of this tensor."""
        return ops.transpose_(self)

    def transpose(self: Any, permutation: Iterable[int] | None = None) -> Tensor:
        """`ops.transpose` of this tensor."""
        return ops.transpose(self, permutation)

    def transpose_(self: Any, permutation: Iterable[int] | None = None) -> Tensor:
        """`ops.transpose_` of this tensor: a view."""
        return ops.transpose_(self, permutation)

    def reshape(self: Any, shape: Iterable[int]) -> Tensor:
        """`ops.reshape` of this tensor."""
        return ops.reshape(self, shape)

    def reshape_(self: Any, shape: Iterable[int]) -> Tensor:
        """`ops.reshape_` of this tensor: a view."""
        return ops.reshape_(self, shape)

    def flatten(self: Any) -> Tensor:
        """`ops.flatten` of this tensor."""
        return ops.flatten(self)

    def flatten_(self: Any) -> Tensor:
        """`ops.flatten_` of this tensor: a view."""
        return ops.flatten_(self)

    def astype(self: Any, dtype: dtype_) -> Tensor:
        """`ops.cast` of this tensor."""
        return ops.cast(self, dtype)

    def sum(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.sum` of this tensor."""
        return ops.sum(self, axis, keepdims)

    def mean(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.mean` of this tensor."""
        return ops.mean(self, axis, keepdims)

    def max(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.max` of this tensor."""
        return ops.max(self, axis, keepdims)

    def min(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.min` of this tensor."""
        return ops.min(self, axis, keepdims)

    def std(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.std` of this tensor."""
        return ops.std(self, axis, keepdims)

    def var(self: Any, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        """`ops.var` of this tensor."""
        return ops.var(self, axis, keepdims)

    def detach(self: Any) -> Tensor:
        """`ops.detach` of this tensor: equal value without gradient flow."""
        return ops.detach(self)

    def detach_(self: Any) -> Tensor:
        """`ops.detach_` of this tensor: an alias through which no gradient flows."""
        return ops.detach_(self)

    def diag(self: Any) -> Tensor:
        """Matrix diagonal. Raises `ValueError` for other ranks.

        Every `ncols + 1`-th element of the flattened matrix, as in PopXL: a tall matrix can give further elements
        from below the diagonal.
        """
        if self.rank != 2:
            raise ValueError(f"diag: expected a matrix, got {self!r} of rank {self.rank}.")
        return self.flatten()[:: self.shape[1] + 1]

    def copy_to_ipu(self: Any, destination: int, source: int | None = None) -> Tensor:
        """`ops.ipu_copy` of this tensor."""
        return ops.ipu_copy(self, destination, source)


class _WithoutProducer:
    """Overrides for variables and constants, which have no producing op to determine their IPU."""

    def copy_to_ipu(self: Any, dst: int, src: int) -> Tensor:
        """`ops.ipu_copy` of this tensor; `source` is required, as no op of the graph computes the tensor."""
        return ops.ipu_copy(self, dst, src)


def _give(methods: type, *kinds: type) -> None:
    for name, member in vars(methods).items():
        if callable(member) or isinstance(member, property):
            if isinstance(member, FunctionType):
                member.__qualname__ = f"{kinds[0].__name__}.{name}"  # the name in Python's own errors
            for kind in kinds:
                setattr(kind, name, member)


_give(Operators, Tensor)
_give(_WithoutProducer, Variable, Constant)
